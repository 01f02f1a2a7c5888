"""Sizes in bytes as people write them: `8`, `4K`, `64M`, `1.5G`; K, M and G are powers of 1024."""

from __future__ import annotations

import re

from ..errors import UsageError

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:I?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """The number of bytes that `text` means.

    Raises:
        UsageError: it is no size, or not a whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    nbytes = float(match[1]) * _UNITS[match[2].upper()] if match else 0.5
    if not nbytes.is_integer():
        raise UsageError(
            f"{text!r} is no size in bytes; give a number with or without K, M or G, e.g. 8, 4K, 64M"
        )
    return int(nbytes)


def format_size(nbytes: int) -> str:
    """The shortest exact text for `nbytes` that `parse_size` reads: 65536 is `64K`."""
    for unit in ("G", "M", "K"):
        if nbytes and nbytes % _UNITS[unit] == 0:
            return f"{nbytes // _UNITS[unit]}{unit}"
    return str(nbytes)


def size_range(begin: int, end: int, factor: float) -> list[int]:
    """`begin`, `begin * factor`, ... up to `end`; strictly increasing.

    Raises:
        UsageError: begin is larger than end, or the factor is not larger than 1.
    """
    if not 1 <= begin <= end:
        raise UsageError(
            f"sizes from {format_size(begin)} to {format_size(end)}: begin must be from 1 to the end"
        )
    if not factor > 1:
        raise UsageError(f"the factor between sizes is {factor:g}; it must be larger than 1")
    sizes, size = [begin], float(begin)
    while (size := size * factor) <= end:
        if int(size) > sizes[-1]:
            sizes.append(int(size))
    return sizes
