"""A limit for each test: a test that hangs fails, and shows the stacks of every process that it started.

A process beside pytest counts the seconds, since pytest itself may be what hangs. When a test exceeds its limit, this
process writes the stacks of pytest and of all that it started, by py-spy, and ends what the test started, so that the
test fails where it waits. If the test still goes on, pytest is ended as well. The default limit is SECONDS; the mark
`limit(seconds)` sets another one. A test in several ranks also has the limit of its mark `ranks`, which comes first.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pytest

from fastcoll.launch.lifeline import children_of
from fastcoll.system.processes import status_of

SECONDS = 300.0  # the slowest test without a mark took 44 s in CI


class Limits:
    """The plugin, which sends the beginning and end of each test to the other process."""

    current: ClassVar[Limits | None] = None
    """The plugin of this process, if pytest runs in it."""

    def __init__(self) -> None:
        """Start the other process; its messages go where this one's go now, so capture must be off."""
        self._folder = tempfile.TemporaryDirectory()
        self._stacks = Path(self._folder.name) / "stacks"
        self.sent: list[float | None] = [None, None, 0.0]
        Limits.current = self
        self._clock = subprocess.Popen(
            [sys.executable, __file__, str(os.getpid()), str(self._stacks)],
            stdin=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
        )

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        mark = item.get_closest_marker("limit")
        self._since = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.set_limit(mark.args[0] if mark else SECONDS)
        result = yield
        self.set_limit(None)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        report = yield
        if os.access(self._stacks, os.F_OK):  # tests may have replaced os.stat
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid} exceeded its limit\n{report.longreprtext}"
            report.sections.append(("stacks when the limit was exceeded", self._stacks.read_text()))
            self._stacks.unlink()
        return report

    def pytest_unconfigure(self) -> None:
        self._clock.stdin.close()
        self._clock.wait()
        self._folder.cleanup()

    def set_limit(self, limit: float | None, again: float | None = None) -> None:
        """Send the time that the test has from now, and the time to fail after that; None: the test has ended."""
        self.sent = [limit, again or limit, self._since]
        with suppress(BrokenPipeError):
            self._clock.stdin.write(f"{json.dumps(self.sent)}\n")


@contextmanager
def unlimited() -> Iterator[None]:
    """Do not count the seconds of this block; afterwards the running test has its full limit again.

    The block needs a limit of its own.
    """
    limits = Limits.current
    if limits is None:
        yield
        return
    limit, again, _ = limits.sent
    limits.set_limit(None)
    try:
        yield
    finally:
        limits.set_limit(limit, again)


def descendants(pid: int, since: float) -> list[int]:
    """Return the processes that a process and its children have started since then, except this one.

    Args:
        since: seconds after the machine started. The pool's workers, which later tests need, are older.
    """
    found: list[int] = []
    for parent in chain([pid], found):  # `found` grows meanwhile
        with suppress(OSError):  # it has ended
            found += [
                child for child in children_of(parent) if child != os.getpid() and is_since(child, since)
            ]
    return found


def is_since(pid: int, since: float) -> bool:
    with suppress(OSError):  # it has ended
        ticks = int(status_of(pid)[19]) + 1  # the start is rounded down
        return ticks / os.sysconf("SC_CLK_TCK") >= since
    return False


def write_stacks(pids: list[int], path: Path) -> None:
    """Write the stacks of these processes, which py-spy stops for a moment; the file appears when it is complete."""
    py_spy = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    texts = []
    for pid in pids:
        if py_spy is None:
            texts.append(f"process {pid}: py-spy is not installed")
            continue
        done = subprocess.run([py_spy, "dump", "--pid", str(pid)], capture_output=True, text=True)
        texts.append(done.stdout or f"process {pid}: {done.stderr.strip().splitlines()[-1:]}")
    path.with_suffix(".part").write_text("\n".join(texts))
    path.with_suffix(".part").rename(path)


def count(pid: int, stacks: Path) -> None:
    """Read the beginnings and ends of a pytest process's tests, and act when one exceeds its limit."""
    limit: float | None = None
    again, is_last, since = limit, False, 0.0
    while True:
        if not select.select([sys.stdin], [], [], limit)[0]:
            tests = descendants(pid, since)
            write_stacks([pid, *tests], stacks)
            if is_last:  # written first, because the reader may wait only for pytest's end
                print(
                    f"a test did not end; pytest (process {pid}) is killed:\n{stacks.read_text()}",
                    file=sys.stderr,
                )
                os.kill(pid, signal.SIGKILL)
                return
            for each in tests:
                with suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)
            limit, is_last = again, True
            continue
        lines = os.read(sys.stdin.fileno(), 1 << 16).splitlines()
        if not lines:
            return
        (limit, again, since), is_last = json.loads(lines[-1]), False


if __name__ == "__main__":
    count(int(sys.argv[1]), Path(sys.argv[2]))
