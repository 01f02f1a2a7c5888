"""Sizes at which collectives over shared GPU memory go one way or another. None is measured by fastcoll on hardware.

One-shot: every rank reads all inputs, one exchange. Two-shot: each reduces its slice, then all gather; two exchanges,
2/size of the bytes. vLLM (csrc/custom_all_reduce.cuh, for GPUs that all reach one another) takes one-shot with 2 ranks
always, with up to 4 below 512 KiB, with up to 8 below 256 KiB; TensorRT-LLM's customAllReduceKernels choose alike. More
than 8 ranks are no case of theirs: 128 KiB goes on with their series.
"""

from __future__ import annotations

ONE_SHOT_BELOW = ((4, 512 << 10), (8, 256 << 10), (64, 128 << 10))
"""(ranks at most, bytes)."""

HAND_OVER_ABOVE = 8 << 20
"""Bytes of a call that NCCL does better where each rank has a GPU of its own: vLLM's default (max_size of
CustomAllreduce, vllm/distributed/device_communicators/custom_all_reduce.py)."""

SLOT = 16 << 20
"""Bytes of a slot, of which a rank and group have four. Each slot filled costs an exchange: some 10 us where ranks have
a GPU each, but a change of processes where they share one, 50 us to a time slice of about 2 ms."""


def is_one_shot(size: int, nbytes: int) -> bool:
    """Whether an all_reduce of so many bytes among so many ranks goes one-shot."""
    return size <= 2 or any(size <= most and nbytes < limit for most, limit in ONE_SHOT_BELOW)
