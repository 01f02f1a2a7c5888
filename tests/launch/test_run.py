"""`run`: functions of all kinds in new ranks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launch.launching import LIMIT, wait_for

import fastcoll as dist
from fastcoll.launch import supervisor
from fastcoll.launch.lifeline import children_of
from fastcoll.launch.spawn import ProcessExitedError, ProcessRaisedError
from fastcoll.testing.worker import shm_names


def test_closures_run_in_ranks_that_have_met_and_results_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    scale = 3.0

    class Kept:
        def __init__(self, x: Any) -> None:
            self.x = x

    def total(x: Any, plus: float) -> Kept:
        x = x * scale
        dist.all_reduce(x)
        print(f"rank {dist.get_rank()} prints")
        print("and complains", file=sys.stderr)
        return Kept(x + plus)

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        results = dist.run(total, 3, (np.ones(200_000),), {"plus": 1})
    assert [type(kept) for kept in results] == [Kept] * 3
    assert all(kept.x.shape == (200_000,) and (kept.x == 10).all() for kept in results)
    assert sorted(out.getvalue().splitlines()) == [f"[{rank}] rank {rank} prints" for rank in range(3)]
    assert {f"[{rank}] and complains" for rank in range(3)} <= set(err.getvalue().splitlines())
    assert dist.run(lambda: dist.get_rank(), ranks=1, backend="tcp", timeout=LIMIT, prefix=False) == [0]
    assert not dist.is_initialized()


def test_ranks_have_the_options_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "warnoptions", ["error:an error here"])
    assert "error:an error here" in dist.run(lambda: sys.warnoptions, 1)[0]


def fail(how: str) -> None:
    """Fail on rank 1, which makes the others fail with errors of their own."""
    if dist.get_rank() != 1:
        try:
            dist.barrier()
        except dist.GroupError as error:
            raise RuntimeError("the step failed") from error
    elif how == "raise":
        raise ValueError("no data")
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        sys.exit(0)


@pytest.mark.long
def test_the_cause_is_raised_and_not_what_followed_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "CAUSE_SECONDS", LIMIT)  # a rank may get no core for a second
    text = r"rank 1 \(pid \d+\) raised:(.|\n)*in fail(.|\n)*no data"
    with pytest.raises(ProcessRaisedError, match=text) as raised:
        dist.run(fail, 3, ("raise",))
    assert raised.value.rank == 1
    assert isinstance(raised.value.__cause__, ValueError)
    assert "launch/run.py" not in str(raised.value)
    for how, code in (("kill", -9), ("exit", 0)):
        with pytest.raises(ProcessExitedError) as exited:
            dist.run(fail, 2, (how,))
        assert (exited.value.rank, exited.value.exit_code) == (1, code)


def test_of_ranks_that_fail_each_by_itself_the_first_is_named() -> None:
    def fail_in_turn() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pids: list[int] = [0, 0]
        dist.all_gather_object(pids, os.getpid())
        while dist.get_rank() == 0 and os.path.exists(f"/proc/{pids[1]}"):
            time.sleep(0.01)
        raise ValueError("no data")

    with pytest.raises(ProcessRaisedError, match="no data") as raised:
        dist.run(fail_in_turn, 2)
    assert raised.value.rank == 1


@pytest.mark.long
@pytest.mark.parametrize("others", ["done", "at work"])
def test_a_rank_that_fails_after_its_result_is_named(others: str) -> None:
    def fail_at_exit() -> None:
        if dist.get_rank() == 1:
            atexit.register(os._exit, 3)
        elif others == "at work":
            time.sleep(1000)

    with pytest.raises(ProcessExitedError) as exited:
        dist.run(fail_at_exit, 2)
    assert (exited.value.rank, exited.value.exit_code) == (1, 3)


def test_a_rank_that_cannot_be_watched_is_not_left_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    children, descriptors = children_of(os.getpid()), os.listdir("/proc/self/fd")
    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        dist.run(lambda: None, 2)
    assert {*children_of(os.getpid())} <= {*children}  # a child of an earlier test may have ended meanwhile
    assert {*os.listdir("/proc/self/fd")} <= {*descriptors}


def test_a_failing_stdout_of_the_caller_is_raised_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Full(io.TextIOBase):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    descriptors = os.listdir("/proc/self/fd")
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(OSError, match="No space left on device"):
        dist.run(lambda: print("x\n" * (1 << 19)), 2)
    assert {*os.listdir("/proc/self/fd")} <= {*descriptors}


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"fn": 3}, "fn must be a function, got int"),
        ({"ranks": 0}, "ranks must be an int from 1 up, got 0"),
        ({"args": 5}, r"args must be a tuple or list of arguments, got int; give \(x,\)"),
        ({"args": (threading.Lock(),)}, "cannot be pickled"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(dist.UsageError, match=complaint):
        dist.run(**{"fn": fail, **arguments})


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(ProcessRaisedError, match="the result, a lock, cannot be pickled"):
        dist.run(lambda: threading.Lock(), 1)


def test_the_standard_streams_of_the_caller_may_be_closed(tmp_path: Path) -> None:
    """As in a daemon."""
    code = "import fastcoll; open('results', 'w').write(str(fastcoll.run(lambda: print('dropped') or 7, 2)))"
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code]
    subprocess.run(command, cwd=tmp_path, timeout=LIMIT, check=True)
    assert (tmp_path / "results").read_text() == "[7, 7]"


class ParseError(Exception):
    def __init__(self, line: int, column: int) -> None:
        super().__init__(f"line {line}, column {column}")


def test_a_result_that_can_be_pickled_but_not_loaded_is_an_error() -> None:
    text = "the result of rank 0 can be pickled but not loaded: TypeError.*'column'"
    with pytest.raises(dist.UsageError, match=text):
        dist.run(lambda: [ParseError(3, 14)], 1)


# As in a shell: functions of `__main__`, which has no file that a rank could import.
SHELL = """
import os, sys, time
import fastcoll as dist

def wait(file):
    open(f"{file}{dist.get_rank()}", "w").write(str(os.getpid()))
    os.rename(f"{file}{dist.get_rank()}", f"{file}-{dist.get_rank()}")
    time.sleep(1000)

print(dist.run(lambda: helper(dist.get_rank()), 2) if (helper := lambda x: x + 1) else None, flush=True)
dist.run(wait, 2, (sys.argv[1],))
"""


@pytest.mark.parametrize("seconds", [LIMIT, pytest.param(1, marks=pytest.mark.timed)])
def test_ctrl_c_ends_all_ranks_within_a_second_also_of_a_shell(tmp_path: Path, seconds: float) -> None:
    before = shm_names()
    with subprocess.Popen(
        [sys.executable, "-", str(tmp_path / "rank")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as shell:  # fmt: skip
        assert shell.stdin is not None
        shell.stdin.write(SHELL)
        shell.stdin.close()
        shell.stdin = None
        files = [tmp_path / f"rank-{rank}" for rank in range(2)]
        wait_for(*files)
        ranks = [os.pidfd_open(int(file.read_text())) for file in files]
        shell.send_signal(signal.SIGINT)
        start = time.monotonic()
        for rank in ranks:
            assert select.select([rank], [], [], LIMIT)[0]
            os.close(rank)
        assert time.monotonic() - start < seconds
        out, err = shell.communicate(timeout=LIMIT)
    assert out == "[1, 2]\n"
    assert err.endswith("KeyboardInterrupt\n")
    assert shm_names() <= before
