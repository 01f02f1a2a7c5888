"""`spawn`, with functions that a fresh interpreter can import."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launch.launching import LIMIT, has_ended

from fastcoll.errors import GroupError, UsageError
from fastcoll.launch.run import run
from fastcoll.launch.spawn import ProcessExitedError, ProcessRaisedError, SpawnContext, spawn


def write(rank: int, folder: Path, text: str) -> None:
    (folder / str(rank)).write_text(f"{text} {rank}")


def fail(rank: int, how: str) -> None:
    if rank == 1 and how in ("raise", "follow"):
        raise ValueError("the cause")
    if rank == 0 and how == "follow":
        raise RuntimeError("the step failed") from GroupError("rank 1 failed")
    if rank == 0 and how == "alone":
        raise GroupError("rank 1 did not come")
    if rank == 1 and how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 1 and how == "exit":
        sys.exit(3)
    if rank == 1 and how == "interrupt":
        os.kill(os.getpid(), signal.SIGINT)
    if rank == 1 and how == "long":
        raise ValueError("x" * 200_000 + "end")
    time.sleep(1000)


def linger(rank: int, raised: Path) -> None:
    """Fail on rank 1, which exits late, as if it closed its groups; rank 0 fails because of it and exits first."""
    if rank == 1:
        atexit.register(time.sleep, 1000)
        atexit.register(raised.touch)  # handlers run in reverse order
        raise ValueError("the cause")
    while not raised.exists():
        time.sleep(0.01)
    raise GroupError("rank 1 failed")


def ignore_sigterm(rank: int, ready: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ready.touch()
    time.sleep(1000)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the children import this file under its name here."""
    root = Path(__file__).parents[__name__.count(".")]
    monkeypatch.syspath_prepend(root)


@pytest.mark.parametrize("start_method", ["spawn", "fork", "forkserver"])
def test_runs_on_every_rank(tmp_path: Path, start_method: str) -> None:
    assert spawn(write, (tmp_path, "from"), nprocs=3, start_method=start_method) is None
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["from 0", "from 1", "from 2"]


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("raise", r"rank 1 \(pid \d+\) raised:(.|\n)*in fail(.|\n)*the cause"),
        ("long", "xxxend"),  # the message does not block the rank
        pytest.param("alone", "GroupError: rank 1 did not come", marks=pytest.mark.long),
        ("kill", r"rank 1 \(pid \d+\) ended with signal SIGKILL \(9\)"),
        ("exit", "ended with exit code 3"),
        ("interrupt", "ended with exit code 130"),
    ],
)
def test_the_end_of_the_failing_rank_is_described(how: str, text: str) -> None:
    with pytest.raises((ProcessRaisedError, ProcessExitedError), match=text) as info:
        spawn(fail, (how,), nprocs=2)
    assert info.value.rank == (0 if how == "alone" else 1)
    codes = {"kill": -9, "exit": 3, "interrupt": 130}
    assert getattr(info.value, "exit_code", None) == codes.get(how)


def test_the_cause_is_named_before_what_follows_from_it() -> None:
    context = start(fail, "follow")
    for process in context.processes:
        process.join(LIMIT)
    with pytest.raises(ProcessRaisedError, match="ValueError: the cause"):
        context.join()
    with pytest.raises(ProcessRaisedError):
        context.join()


def test_the_cause_is_named_though_its_rank_has_not_ended_yet(tmp_path: Path) -> None:
    with pytest.raises(ProcessRaisedError, match="ValueError: the cause") as info:
        spawn(linger, (tmp_path / "raised",), nprocs=2)
    assert info.value.rank == 1


def start(function: object, *args: object, nprocs: int = 2) -> SpawnContext:
    context = spawn(function, args, nprocs=nprocs, join=False)  # type: ignore[arg-type]
    assert context is not None
    return context


def test_join_with_a_timeout() -> None:
    context = start(fail, "sleep")
    assert context.pids() == [process.pid for process in context.processes]
    assert context.join(0.01) is False
    assert all(process.is_alive() for process in context.processes)
    context.end()
    assert [process.exitcode for process in context.processes] == [-signal.SIGTERM] * 2
    context.end()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    context = start(ignore_sigterm, tmp_path / "ready", nprocs=1)
    while not (tmp_path / "ready").exists():
        assert context.join(0.01) is False
    context.end(grace=0.05)
    assert [process.exitcode for process in context.processes] == [-signal.SIGKILL]


def show_and_stay(rank: int) -> None:
    print(os.getpid(), flush=True)
    time.sleep(1000)


def test_the_processes_die_with_their_parent() -> None:
    code = f"from fastcoll.launch.spawn import spawn; import {__name__} as tests; spawn(tests.show_and_stay)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    assert has_ended(child)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"fn": 3}, r"fn must be a function fn\(rank, \*args\), got int"),
        ({"args": 5}, r"args must be a tuple or list of arguments, got int; give \(x,\)"),
        ({"nprocs": 0}, "nprocs must be an int from 1 up, got 0"),
        ({"nprocs": 2.0}, "nprocs must be an int from 1 up, got 2.0"),
        ({"start_method": "thread"}, "start_method must be one of .*, got 'thread'"),
        ({"fn": lambda rank: None}, "define it at the top level of its module, or give start_method='fork'"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, object], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        spawn(**{"fn": write, **arguments})  # type: ignore[arg-type]


@pytest.mark.parametrize("begin", [run, spawn])
def test_a_process_that_ignores_sigchld_is_refused(begin: Callable[..., object]) -> None:
    """It could not read the exit codes of ranks."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(UsageError, match="this process ignores SIGCHLD"):
            begin(show_and_stay)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_functions_of_an_interactive_session_are_refused_with_what_to_do() -> None:
    """As in a notebook: `__main__` has no file that ranks could import."""
    code = "import fastcoll\ndef main(rank): pass\nfastcoll.spawn(main, nprocs=2)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT)
    assert "UsageError: spawn: main is of a notebook or an interactive session" in done.stderr
    assert "use fastcoll.run" in done.stderr
