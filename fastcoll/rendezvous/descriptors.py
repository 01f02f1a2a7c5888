"""File descriptors for a store's connections: one for each rank, where many systems allow 1,024 to begin with."""

from __future__ import annotations

import logging
import os
import resource

from ..errors import ResourceError

logger = logging.getLogger("fastcoll")

# For what else a process opens: files, libraries, pidfds, the connections of its groups.
_FOR_OTHERS = 64
CURE = "raise it before the start (ulimit -n, systemd's LimitNOFILE=, docker's --ulimit nofile=)"


def make_room(connections: int, what: str) -> None:
    """See to it that this process may open `connections` more descriptors, and some for other uses.

    Raises the process's soft limit as far as needed.

    Args:
        what: needs them, for messages.

    Raises:
        ResourceError: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/proc/self/fd")) + connections + _FOR_OTHERS
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ResourceError(
            f"{what} needs {needed} file descriptors, and process {os.getpid()} on {os.uname().nodename} may have "
            f"{hard}; {CURE}"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    _tell(soft, needed, what)


def raise_limit(by: int, what: str) -> bool:
    """Raise the process's soft limit by so many, as far as the hard one allows; whether that was any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft == hard:
        return False
    new = soft + by if hard == resource.RLIM_INFINITY else min(soft + by, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
    _tell(soft, new, what)
    return True


def _tell(soft: int, new: int, what: str) -> None:
    logger.info("raised this process's limit of file descriptors from %d to %d for %s", soft, new, what)
