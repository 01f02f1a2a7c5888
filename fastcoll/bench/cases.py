"""The cases (measurements) of a run; every rank derives them from the options.

The second part parses the arguments of a command line into sizes, dtypes and names.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..arrays.dtypes import parse_dtype
from ..core.operations import KINDS, NATIVE, NO_ARRAY
from ..errors import UsageError

REDOPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "custom")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)


class CaseShape(NamedTuple):
    """How the table of results treats an operation; sizes and factors are those of nccl-tests."""

    rounds: int  # how often a rank's link carries all blocks except this rank's; 0: it carries the array once
    per_rank: bool = False  # whether the size is the sum of a block for each rank, not that of one array
    reduces: bool = False
    rooted: bool = False
    moves: bool = True  # whether it moves data

    def bus_factor(self, ranks: int) -> float:
        """Return busbw / algbw: how many bytes a link must carry for each byte of the size."""
        return self.rounds * (ranks - 1) / ranks if self.rounds else 1.0


_LEFT_OUT = ("scan", "exscan", "refused", "monitored_barrier")  # nccl-tests has no figures for the first two
SHAPES: dict[str, CaseShape] = {
    **{
        name: CaseShape(
            1 if kind.has_blocks else 2 if kind.reduces and not kind.root else 0,
            kind.has_blocks,
            kind.reduces,
            bool(kind.root),
            kind.form != NO_ARRAY,
        )
        for name, kind in KINDS.items()
        if name in NATIVE and name not in _LEFT_OUT
    },
    "sendrecv": CaseShape(0),
    "update_all_reduce": CaseShape(2, reduces=True),
    "update_symmetric_all_reduce": CaseShape(2, reduces=True),
}
"""The operations that can be measured: those of core/operations.py, and three that consist of several calls."""


@dataclass(frozen=True)
class Case:
    """One measurement, which is one row of the table."""

    operation: str  # a key of SHAPES
    dtype: np.dtype[Any]
    redop: str  # a name of REDOPS, or "none"
    root: int  # the root's rank, or -1 if the operation has no root
    count: int  # elements of one block (see `CaseShape.per_rank`)
    ranks: int

    @property
    def size(self) -> int:
        """The number of bytes that algbw counts."""
        blocks = self.ranks if SHAPES[self.operation].per_rank else 1
        return blocks * self.count * self.dtype.itemsize


def cases(
    operations: list[str], dtypes: list[str], redops: list[str], sizes: list[int], root: int, ranks: int
) -> Iterator[Case]:
    """Yield the cases of a run, in order.

    Sizes are rounded up to whole elements per rank; sizes that are then equal are measured once.
    """
    for operation in operations:
        shape = SHAPES[operation]
        for dtype in map(parse_dtype, dtypes if shape.moves else ["uint8"]):
            block = dtype.itemsize * (ranks if shape.per_rank else 1)
            counts = dict.fromkeys(-(-size // block) for size in sizes) if shape.moves else [0]
            for redop in redops if shape.reduces else ["none"]:
                for count in counts:
                    yield Case(operation, dtype, redop, root if shape.rooted else -1, count, ranks)


def parse_operation(text: str) -> str:
    """Return the operation that `text` names; `-` and `_` are equivalent."""
    return _choose("operation", text.lower().replace("-", "_"), SHAPES)


def parse_redop(text: str) -> str:
    """Return the reduction that `text` names."""
    return _choose("reduction", {"prod": "product"}.get(text.lower(), text.lower()), REDOPS)


def _choose(what: str, name: str, known: Iterable[str]) -> str:
    if name not in known:
        raise UsageError(f"there is no {what} {name!r}; known: {', '.join(known)}")
    return name


def parse_size(text: str) -> int:
    """Parse a number of bytes: `8`, `4K`, `64M`, `1.5G`; K, M and G are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    nbytes = float(match[1]) * _UNITS[match[2].upper()] if match else 0.5
    if nbytes.is_integer():
        return int(nbytes)
    raise UsageError(
        f"{text!r} is no size in bytes; give a number with or without K, M or G, e.g. 8, 4K, 64M"
    )


def format_size(nbytes: int) -> str:
    """Return the shortest exact text for `nbytes` that `parse_size` reads: 65536 is `64K`."""
    for unit in ("G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def size_range(begin: int, end: int, factor: float) -> list[int]:
    """Return `begin`, `begin * factor`, ... up to `end`; strictly increasing."""
    if not 1 <= begin <= end:
        sizes = f"{format_size(begin)} to {format_size(end)}"
        raise UsageError(f"sizes from {sizes}: begin must be from 1 to the end")
    if not factor > 1:
        raise UsageError(f"the factor between sizes is {factor:g}; it must be larger than 1")
    found, size = [begin], float(begin)
    while (size := size * factor) <= end:
        if int(size) > found[-1]:
            found.append(int(size))
    return found


def argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser for argparse, which shows the errors of `parse`."""

    def reader(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return reader


def listed(parse: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Return a parser of several values, separated by commas."""
    return lambda text: [argument(parse)(part) for part in text.split(",")]


def positive(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser of a finite number of this kind that is greater than 0."""

    def parse(text: str) -> Any:
        value = kind(text)
        if not 0 < value < math.inf:
            raise UsageError(f"{text} is not a finite number greater than 0")
        return value

    return argument(parse)


def cores(text: str) -> list[int]:
    """Parse CPUs that this process may use: `0,2`, or `none`."""
    wanted = [] if text == "none" else [int(part) for part in text.split(",")]
    if unusable := set(wanted) - os.sched_getaffinity(0):
        raise UsageError(f"this process may not use core {min(unusable)}")
    return wanted
