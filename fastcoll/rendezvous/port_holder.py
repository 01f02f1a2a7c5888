"""Which process listens on a TCP port, from /proc, for the error that a taken port deserves."""

from __future__ import annotations

import os
from collections.abc import Iterator

_LISTEN = "0A"


def port_holder(port: int) -> str | None:
    """`pid 123 (python train.py)` of a process that listens on `port`; None when it cannot be seen.

    Only this network namespace is searched, and only processes whose descriptors are readable.
    """
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    return next((f"pid {pid} ({_command(pid)})" for pid in _pids() if _holds(pid, sockets)), None)


def _listening_inodes(port: int) -> Iterator[str]:
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError:
            continue
        for row in rows:
            if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port:
                yield row[9]


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _holds(pid: int, sockets: set[str]) -> bool:
    folder = f"/proc/{pid}/fd"
    try:
        return any(_target(f"{folder}/{fd}") in sockets for fd in os.listdir(folder))
    except OSError:  # gone, or another user's
        return False


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def _command(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return "its command is not readable"
    return " ".join(text.split())[:120]
