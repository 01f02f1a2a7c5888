"""Whether the ranks' calls on GPUs match: asked over the group's CPU backend.

NCCL compares nothing: calls that do not match hang, or end with wrong data. A comparison meets all ranks on the host,
which a call on GPUs otherwise does not; so each rank makes it where a call is the first of its kind: operation, dtype,
sizes, reduction and root. All ranks take a call for new alike, if their calls match. In gather, scatter and all_to_all
a rank does not know others' sizes, so there the kind is without them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...core import signature
from ...core.group import ProcessGroup
from ...errors import MismatchError

_MOST_KINDS = 10_000


@dataclass(frozen=True)
class Signature:
    """A call as it is compared.

    Attributes:
        call: as `signature.encode` says, with the root.
        shape: bytes; -1 and less for blocks of different sizes.
        gives, takes: bytes that this rank gives and expects, one a rank; None where `shape` says it all.
        kind: what is equal on all ranks whose calls match, and tells the call from others.
    """

    call: int
    shape: int
    kind: tuple[int, ...]
    gives: tuple[int, ...] | None = field(default=None)
    takes: tuple[int, ...] | None = field(default=None)

    def balance(self, rank: int) -> int:
        """What over all ranks adds up to 0 modulo 2**64, if all get what they expect."""
        if self.gives is None or self.takes is None:
            return 0
        return signature.balance(rank, self.gives, self.takes)


class Checks:
    """The comparisons of one group."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._known: set[tuple[int, ...]] = set()
        self._count = 0

    def check(self, said: Signature) -> None:
        """Compare the ranks' calls, if this one is the first of its kind; blocks then.

        Raises:
            MismatchError: they differ; on all ranks, which go on.
        """
        self._count += 1
        if said.kind not in self._known:
            self._compare(said)
            if len(self._known) < _MOST_KINDS:  # the same on all ranks
                self._known.add(said.kind)

    def _compare(self, said: Signature) -> None:
        group = self._group
        row = np.array([self._count, said.call, said.shape, said.balance(group.rank)], np.int64)
        rows = exchanged(group, row)
        heads = signature.comparable([(int(call), int(shape)) for call, shape in rows[:, 1:3]])
        counts = rows[:, 0].tolist()
        if len(set(heads)) > 1:
            raise self._mismatch(signature.describe_differences(heads, group.ranks))
        if len(set(counts)) > 1:
            text = ", ".join(f"rank {r} its call {n}" for r, n in zip(group.ranks, counts, strict=True))
            raise self._mismatch(
                f"{signature.describe(*heads[0])} is {text}: a rank has left out a call before"
            )
        if rows[:, 3].sum():
            tables = exchanged(group, np.array([said.gives, said.takes], np.int64))
            sizes = [(gives.tolist(), takes.tolist()) for gives, takes in tables]
            raise self._mismatch(signature.describe_mismatch(heads, group.ranks, lambda: sizes))

    def _mismatch(self, text: str) -> MismatchError:
        return signature.mismatch(text, self._count, f"{self._group.name} on GPUs")


def exchanged(group: ProcessGroup, row: np.ndarray) -> np.ndarray:
    """Every rank's array, one after the other; over the CPU backend."""
    if group.gate.is_inside():  # the call is part of one of the group's own
        return group.rows_of_all(row)
    everybody = np.empty((group.size, *row.shape), row.dtype)
    group.all_gather(list(everybody), row)
    return everybody
