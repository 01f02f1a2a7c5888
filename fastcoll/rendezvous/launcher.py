"""The process that launched all local ranks, as a name that they share without being told one."""

from __future__ import annotations

import os

from ..errors import UsageError


def shared_path(rank_variable: str) -> str:
    """A path that exactly the ranks started by one local launcher derive alike.

    It is made of the pid and start time of the nearest ancestor that does not carry the rank's
    variable: that is the launcher's daemon, also when a shell or a wrapper stands in between.

    Raises:
        UsageError: no such ancestor is visible (as when each rank runs in a container of its own).
    """
    import tempfile  # it brings random and the compressions, for few who start

    pid = os.getppid()
    while pid > 0 and _carries(pid, rank_variable):
        pid = int(_stat(pid)[1])
    if pid <= 0:
        raise UsageError(
            f"{rank_variable} is set, but the launcher that set it is not visible from here; set MASTER_ADDR and "
            "MASTER_PORT for all ranks"
        )
    return os.path.join(tempfile.gettempdir(), f"fastcoll-{os.geteuid()}-{pid}-{_stat(pid)[19]}")


def _carries(pid: int, variable: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(entry.startswith(variable.encode() + b"=") for entry in file.read().split(b"\0"))
    except PermissionError:  # another user's: a daemon such as slurmstepd
        return False


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat behind the command: state, parent, ..., start time at 19."""
    with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
        return file.read().rpartition(")")[2].split()
