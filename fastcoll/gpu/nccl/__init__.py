"""Arrays on GPUs, by NCCL."""
