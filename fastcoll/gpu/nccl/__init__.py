"""Operations on GPU arrays by NCCL."""
