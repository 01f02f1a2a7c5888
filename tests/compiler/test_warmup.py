"""Compiling ahead: everything is compiled once, and later processes load it."""

from __future__ import annotations

import ast
import contextlib
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import LIMIT, python

import fastcoll
from fastcoll import warmup
from fastcoll.compiler.jit import NJIT
from fastcoll.net.mpi import compiled as mpi
from fastcoll.net.tcp import entries as tcp
from fastcoll.shm import backend as shm
from fastcoll.shm import callers

PACKAGE = Path(fastcoll.__file__).parent


def run(*arguments: str, cache: Path, **settings: str) -> str:
    environ = {"NUMBA_CACHE_DIR": str(cache), **settings}
    done = python("-m", "fastcoll.warmup", *arguments, environ=environ, check=True)
    assert not done.stderr
    return done.stdout


@pytest.mark.long
def test_compiled_code_is_found_the_next_time(tmp_path):
    first = run("--ops", "seize,retire", "-j", "2", cache=tmp_path)
    assert first.startswith("3 kernels: what is not on the disk is compiled, in 2 processes\n  1/3 seize ")
    assert "  3/3 " in first
    assert "retire " in first
    assert "reductions of float32 " in first
    assert "3 kernels compiled" in first
    assert run("--ops", "seize,retire", cache=tmp_path).splitlines()[1:] == ["all 3 kernels are there"]
    more = run("--ops", "retire", "--dtypes", "float32,bool", cache=tmp_path)
    assert "reductions of bool " in more
    assert "1 kernels compiled" in more
    assert "2 were there" in more


@pytest.mark.long
def test_a_level_without_optimization_is_for_users_functions(tmp_path):
    assert "2 kernels compiled" in run("--ops", "tcp.poll", "-j", "1", cache=tmp_path, NUMBA_OPT="0")


@pytest.mark.long
def test_every_entry_is_in_the_list():
    found = sorted(
        node.name
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(
            isinstance(mark, ast.Name) and mark.id in ("entry", "locked_entry")
            for mark in node.decorator_list
        )
    )
    assert found == sorted(entry.name for entry in (*shm.ENTRIES, *tcp.ENTRIES, *mpi.ENTRIES))


def test_code_for_compiled_callers_is_compiled_on_request(monkeypatch):
    todo: list[set[str]] = []
    monkeypatch.setattr(warmup, "_warm_up", lambda names, processes: todo.append(set(names)) or 0)
    for arguments in ([], NJIT.split()):
        assert warmup.main(arguments) == 0
    assert todo[1] - todo[0] == {
        "njit.c_entry",
        "jax.c_entry",
        *(f"njit.{name}" for name in callers.MESSAGES.values()),
    }
    where = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and any(isinstance(x, ast.Name) and x.id == "NJIT" for x in node.args)
    }
    assert where == {"kernels/c_entries.py", "kernels/call_frames.py", "shm/callers.py"}


@pytest.mark.parametrize("name", ["njit.c_entry", pytest.param("njit.post_receive", marks=pytest.mark.long)])
def test_code_for_compiled_callers_is_found_the_next_time(name, tmp_path):
    code = f"from fastcoll import warmup; print(warmup._make('{name}').new)"
    for new in (True, False):
        done = python("-c", code, environ={"NUMBA_CACHE_DIR": str(tmp_path)}, check=True)
        assert done.stdout.split("\n")[0] == str(new)


def test_code_that_cannot_be_kept_is_a_failure_here(monkeypatch, capsys):
    monkeypatch.setattr(warmup, "_make", lambda name: warmup._Made(name, 0.1, True, "the disk is full"))
    assert warmup._warm_up(["all_reduce"], 1) == 1
    assert "nothing is done ahead: the disk is full" in capsys.readouterr().err


# Each process of the pool prints its pid and compiles for ever.
COMPILING = """
import os, signal, time
from fastcoll import warmup

def make(name):
    if name == "first":
        return warmup._Made(name, 0.0, False, "")
    os.write(1, f"{os.getpid()}\\n".encode())
    while True:
        try: time.sleep(1000)
        except KeyboardInterrupt: pass

signal.signal(signal.SIGINT, signal.default_int_handler)
warmup._make = make
warmup._warm_up(["first", "second", "third"], 2)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_end_all_processes(number):
    """Ctrl-C is sent to the process group, SIGTERM to the command alone."""
    command = [sys.executable, "-c", COMPILING]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as parent:
        parent.stdout.readline()
        pidfds = [os.pidfd_open(int(parent.stdout.readline())) for _ in range(2)]
        send = os.killpg if number == signal.SIGINT else os.kill
        send(parent.pid, number)
        try:
            assert parent.wait(LIMIT) == -number
            assert all(select.select([pidfd], [], [], LIMIT)[0] for pidfd in pidfds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(parent.pid, signal.SIGKILL)
            for pidfd in pidfds:
                os.close(pidfd)


@pytest.mark.parametrize(("option", "word"), [("--ops", "all_reduced"), ("--dtypes", "float31")])
def test_unknown_names_are_refused(option, word, capsys):
    with pytest.raises(SystemExit) as error:
        warmup.main([option, word])
    assert error.value.code == 2
    assert word in capsys.readouterr().err
