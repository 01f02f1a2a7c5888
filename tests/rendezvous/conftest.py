"""Fixtures of the rendezvous tests: processes that are always cleaned up, and a leak check."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from hypothesis import settings
from rendezvous.observed import open_descriptors
from together import together

from fastcoll import config
from fastcoll.rendezvous import assemble, multicast
from fastcoll.store import HashStore, tcp_store, waiting
from fastcoll.store import store as stores

DEADLINE = 120.0

# Other work on the machine makes single examples slow.
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


class Processes:
    """Python processes that run source code; `sys.argv[1:]` are its arguments."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, source: str, *args: object, **environ: str) -> subprocess.Popen[str]:
        return self.run([sys.executable, "-c", source, *map(str, args)], **environ)

    def run(self, command: list[str], **environ: str) -> subprocess.Popen[str]:
        """Start a command, without a launcher's variables, but with those of `environ`."""
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environ() | environ,
        )
        self.started.append(process)
        return process

    def stop(self, process: subprocess.Popen[str]) -> None:
        """Stop a process by SIGSTOP, and wait until all its threads have stopped."""
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def outputs(self, processes: list[subprocess.Popen[str]]) -> list[str]:
        """Return the output of each process; a process that failed fails the test with its stderr."""
        results = [process.communicate(timeout=DEADLINE) for process in processes]
        for process, (_, err) in zip(processes, results, strict=True):
            assert process.returncode == 0, err
        return [out.strip() for out, _ in results]


def clean_environ() -> dict[str, str]:
    """Return this environment without a launcher's variables."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "MPI_", "MV2_", "SLURM_", "FASTCOLL_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return environ | {"PYTHONPATH": root}


@pytest.fixture
def processes() -> Iterator[Processes]:
    """Return the processes of one test; kill what still runs at its end."""
    group = Processes()
    yield group
    for process in group.started:
        process.kill()
        process.communicate()


@pytest.fixture(autouse=True)
def no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use default settings, and check that no thread or descriptor is left after a test."""
    for name in list(os.environ):
        if name not in clean_environ() and name != "PYTHONPATH":
            monkeypatch.delenv(name)
    config.forget()
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    yield
    config.forget()
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert not left, f"threads left behind: {left}"
    new = {
        fd: name for fd, name in open_descriptors().items() if fd not in descriptors and "pidfd" not in name
    }
    assert not new, f"descriptors left behind: {new}"


class Clock:
    """The clock of waits: the real time plus `ahead` seconds, which the test adds."""

    time, sleep = staticmethod(time.time), staticmethod(time.sleep)

    def __init__(self) -> None:
        self.ahead = 0.0
        self.waits = threading.Semaphore(0)  # the waits that have begun

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead

    def warnings_after(
        self,
        seconds: float,
        caplog: pytest.LogCaptureFixture,
        count: int,
        more: float,
        warnings: int | None = None,
    ) -> list[str]:
        """Once `count` waits have begun, advance the time until all warn, then by `more`; return the warnings.

        `warnings`: how many waits warn; None: all.
        """
        assert all(self.waits.acquire(timeout=DEADLINE) for _ in range(count))
        self.ahead += seconds
        end = time.monotonic() + DEADLINE
        while len(found := [each.message for each in caplog.records if "has waited" in each.message]) < (
            count if warnings is None else warnings
        ):
            assert time.monotonic() < end, caplog.text
            time.sleep(0.005)
        self.ahead += more
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of all waits for other ranks in this process, which poll a hundred times a second."""
    made, begin = Clock(), waiting.LateWarning.__init__

    def begin_and_count(late: waiting.LateWarning, part: float = 1.0) -> None:
        begin(late, part)
        made.waits.release()

    monkeypatch.setattr(waiting.LateWarning, "__init__", begin_and_count)
    for module in (assemble, multicast, stores, tcp_store, waiting):
        monkeypatch.setattr(module, "time", made)
    monkeypatch.setattr(waiting, "SLICE_SECONDS", 0.01)
    return made


@pytest.fixture
def in_threads() -> Callable[..., list[object]]:
    """Run several calls at the same time; return the result or exception of each."""
    return partial(together, deadline=DEADLINE)


@pytest.fixture
def store() -> Iterator[HashStore]:
    """Return a store of this process, closed at the end."""
    with HashStore() as made:
        yield made
