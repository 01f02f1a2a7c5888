"""An elastic job under test: a store that outlives its ranks, and processes that are started one by one."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from faults import crew

import fastcoll as dist
from elastic import members
from elastic.members import Course

DEADLINE = 120.0  # s, which only ends a hang


class Crowd:
    """The processes of one job; those that still run at the end are killed.

    Attributes:
        store: the store of the job.
    """

    def __enter__(self) -> Crowd:
        crew.serve()
        self._folder = tempfile.TemporaryDirectory()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=DEADLINE)
        self._started: list[tuple[Any, Any, Path]] = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process, pipe, _ in self._started:
            process.kill()
            process.join()
            process.close()
            pipe.close()
        self.store.close()
        self._folder.cleanup()

    def begin(self, n: int, course: Course, **courses: Course) -> list[int]:
        """Start the ranks of the first world; `courses` has the courses of particular ranks, as rank1=..."""
        return [self._start(rank, n, courses.get(f"rank{rank}", course)) for rank in range(n)]

    def joiner(self, course: Course) -> int:
        """Start a joiner."""
        return self._start(-1, 0, course)

    def _start(self, rank: int, n: int, course: Course) -> int:
        number, url = len(self._started), f"file://{self._folder.name}/rendezvous"
        stacks = Path(self._folder.name, f"stacks-{number}")
        address = f"127.0.0.1:{self.store.port}"
        process, pipe = crew.start(members.take_part, stacks, rank, n, url, address, course)
        self._started.append((process, pipe, stacks))
        return number

    def lose_store(self) -> None:
        """End the store, as if its process had died."""
        self.store.close()

    def kill(self, number: int) -> None:
        """Kill a member, which may have ended already."""
        self._started[number][0].kill()

    def has_joined(self, number: int) -> int:
        """Wait until a member trains, and return the size of its first world."""
        return int(self.store.get(f"in/{self._started[number][0].pid}"))

    def await_size(self, size: int) -> None:
        """Wait until a world of this size trains."""
        end = time.monotonic() + DEADLINE
        while self.store.peek(["size"]) != [str(size).encode()]:
            assert time.monotonic() < end, f"no world of {size} comes"
            time.sleep(0.005)

    def ends(self) -> list[crew.Outcome]:
        """Return the outcomes of all members, within the deadline."""
        return [self.end_of(number) for number in range(len(self._started))]

    def end_of(self, number: int) -> crew.Outcome:
        """Return the outcome of one member; an AssertionError with the stacks of all if it does not end."""
        process, pipe, _ = self._started[number]
        try:
            return crew.collect(number, process, pipe, time.monotonic() + DEADLINE)
        except AssertionError as error:
            texts = []
            for other, _, path in self._started:
                if other.is_alive():
                    os.kill(other.pid, signal.SIGUSR1)
                    time.sleep(0.2)
                    texts.append(f"-- {other.pid}\n{path.read_text()}")
            raise AssertionError(f"{error}\n" + "\n".join(texts)) from None
