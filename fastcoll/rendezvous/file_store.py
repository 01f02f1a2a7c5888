"""FileStore: a store in a file that all ranks can reach.

Every participant is written into the file with its process. The one that leaves last removes it, and
one that comes to a file whose participants are all dead starts it anew.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from datetime import timedelta

from ..core.arguments import whole
from ..core.processes import ProcessId
from ..errors import StoreError, UsageError
from .shared_log import SharedLog
from .store import DEFAULT_TIMEOUT
from .table import Request
from .table_store import TableStore

_PAUSE_FIRST, _PAUSE_MOST = 0.001, 0.02


class FileStore(TableStore):
    """Keys and values in the file `file_name`, appended under an fcntl lock. Thread safe.

    The file is made with mode 0600 and removed when the last participant closes the store (at the
    latest when its process ends in an orderly way). A file left by processes that were killed is
    recognised by their pids and start times, and started anew.

    Args:
        file_name: in an existing directory, on a file system with fcntl locks (NFS has them).
        world_size: how many participants there will be: the file stays until so many have come and
            all have left. -1: it goes when nobody has it open.
        timeout: of blocking operations.

    Raises:
        UsageError: `file_name` is a link, another user's, in no directory, or holds something else.
    """

    def __init__(
        self,
        file_name: str | os.PathLike[str],
        world_size: int = -1,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
    ) -> None:
        self._timeout = self._limit(timeout)
        self.path = os.fspath(file_name)
        self.world_size = whole("world_size", world_size)
        self._pid = os.getpid()
        self._mutex = threading.Lock()
        self._log = SharedLog(self.path, time.monotonic() + self._timeout)
        self._leave = weakref.finalize(self, _leave, self._log, self.world_size, self._pid)

    def participants(self) -> list[ProcessId]:
        """The processes that have the file open, as they wrote themselves down.

        Raises:
            StoreError: the store is closed or the file damaged.
        """
        self._check_process()
        with self._mutex, self._log.transaction(time.monotonic() + self._timeout):
            return list(self._log.participants.values())

    def clone(self) -> FileStore:
        """A participant more."""
        return FileStore(self.path, self.world_size, self._timeout)

    def close(self) -> None:
        with self._mutex:
            self._closed = True
            self._leave()

    def _ask(self, request: Request) -> list[bytes] | bytes:
        self._check_process()
        deadline = time.monotonic() + request.timeout
        pause = _PAUSE_FIRST
        answer = self._try(request)
        while isinstance(answer, bytes):
            left = deadline - time.monotonic()
            if left <= 0:
                break
            time.sleep(min(pause, left))
            pause = min(2 * pause, _PAUSE_MOST)
            if self._may_go(request):
                answer = self._try(request)
        return answer

    def _may_go(self, request: Request) -> bool:
        """Whether trying again is worth the lock: other processes or our own threads wrote."""
        with self._mutex:
            return self._closed or self._log.has_news() or self._log.table.first_missing(request) is None

    def _try(self, request: Request) -> list[bytes] | bytes:
        """The answer to `request`, or the key that it still waits for."""
        with self._mutex:
            if self._closed:
                raise StoreError(f"this FileStore on {self.path} was closed while a call waited in it")
            with self._log.transaction(time.monotonic() + self._timeout):
                missing = self._log.table.first_missing(request)
                return self._log.apply(request) if missing is None else missing

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise UsageError(
                f"this FileStore belongs to process {self._pid} and came here by a fork; open a FileStore "
                f"of its own in process {os.getpid()}"
            )


def _leave(log: SharedLog, world_size: int, pid: int) -> None:
    if pid == os.getpid():  # a forked child must not write its parent out
        log.leave(world_size)
