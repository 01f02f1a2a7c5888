"""Slurm's compressed lists of hosts, such as `node[01-03,7],login`."""

from __future__ import annotations

import re

from ..errors import UsageError

_PART = re.compile(r"([^\[\],]+)(?:\[([^\]]*)\])?([^\[\],]*)(?:,|$)")


def first_host(nodelist: str) -> str:
    """The first host of a list.

    Raises:
        UsageError: the text is no list of hosts.
    """
    return expand(nodelist)[0]


def expand(nodelist: str) -> list[str]:
    """All hosts of a list, in order; leading zeros are kept.

    Raises:
        UsageError: the text is no list of hosts.

    Example:
        >>> expand("n[08-10,3],login")
        ['n08', 'n09', 'n10', 'n3', 'login']
    """
    hosts: list[str] = []
    at = 0
    while at < len(nodelist):
        part = _PART.match(nodelist, at)
        if part is None:
            break
        prefix, ranges, suffix = part.groups()
        numbers = (
            [""] if ranges is None else [n for item in ranges.split(",") for n in _numbers(item, nodelist)]
        )
        hosts += [prefix + number + suffix for number in numbers]
        at = part.end()
    if at < len(nodelist) or not hosts:
        raise UsageError(
            f"the Slurm node list {nodelist!r} cannot be read; set MASTER_ADDR to the host of rank 0"
        )
    return hosts


def _numbers(item: str, nodelist: str) -> list[str]:
    """`08-10` as 08, 09, 10."""
    low, dash, high = item.partition("-")
    high = high if dash else low
    if not (low.isdecimal() and high.isdecimal() and 0 <= int(high) - int(low) < 1 << 16):
        raise UsageError(
            f"the Slurm node list {nodelist!r} has the range {item!r}; set MASTER_ADDR to rank 0's host"
        )
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
