"""What the ranks compare of a call over shared GPU memory, and what is said when it does not match."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

from ...core import calls
from ...core.mismatch import comparable, operation_of
from ...kernels.cuda.ipc_page import BALANCE_MASK

_MASK = (1 << 64) - 1


class Said(NamedTuple):
    """The words of a line: calls.py's fingerprint, and the balance of the sizes."""

    call: int
    shape: int
    balance: int = 0


def shape_of(sizes: Sequence[int]) -> int:
    """One number that tells sizes that all ranks know from others: their sum if they are equal, else negative."""
    if len(set(sizes)) == 1:
        return sum(sizes)
    return -1 - zlib.crc32(repr(list(sizes)).encode())


def balance_of(rank: int, gives: Sequence[int], takes: Sequence[int]) -> int:
    """The sum over what a rank gives each rank less that over what it expects; -1 where there is no message.

    Over all ranks these add up to 0, modulo BALANCE_MASK + 1, when all sizes agree, and otherwise hardly ever.
    """
    total = sum(
        _weight(rank, peer, nbytes) for peer, nbytes in enumerate(gives) if peer != rank and nbytes >= 0
    )
    total -= sum(
        _weight(peer, rank, nbytes) for peer, nbytes in enumerate(takes) if peer != rank and nbytes >= 0
    )
    return total & BALANCE_MASK


def _weight(source: int, destination: int, nbytes: int) -> int:
    """64 well mixed bits (the finalizer of SplitMix64, Steele et al. 2014) for so many bytes between two ranks."""
    z = (nbytes + 0x9E3779B97F4A7C15 * (1 + source + (destination << 24))) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def differences(said: Sequence[tuple[int, int]], ranks: Sequence[int]) -> str:
    """Who called what; or, where all called the same, that sizes differ."""
    said = comparable(said)
    if len(set(said)) > 1:
        return calls.describe_differences(said, ranks)
    return f"{operation_of(said)}: what ranks give and what others expect differ in size"
