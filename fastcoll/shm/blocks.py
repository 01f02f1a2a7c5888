"""A list of arrays as kernels take it: two tables, addresses and bytes, one word a rank."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels.pointers import address_of


class Blocks:
    """One array a rank, or None where there is no message.

    Attributes:
        sizes: bytes a rank, -1 where there is none.
        addresses: address of the table of addresses.
        nbytes: address of the table of sizes.
    """

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any] | None]) -> None:
        self.arrays = arrays  # kept alive
        self.sizes = [-1 if x is None else x.nbytes for x in arrays]
        self._table = np.array([[0 if x is None else address_of(x) for x in arrays], self.sizes], np.int64)
        self.addresses = address_of(self._table)
        self.nbytes = self.addresses + 8 * len(arrays)

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        return max(0, *self.sizes)

    @property
    def shape(self) -> int:
        """One number that tells these sizes from others: their sum when all are equal, else negative."""
        if len(set(self.sizes)) == 1:
            return sum(self.sizes)
        return -1 - zlib.crc32(repr(self.sizes).encode())
