"""Operations on arrays on the GPUs of one node, through CUDA's inter-process memory."""
