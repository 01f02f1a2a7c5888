"""Footprints: what is new is named, what goes away in time is not."""

from __future__ import annotations

import _thread
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from fastcoll.core.processes import session
from fastcoll.testing import worker
from fastcoll.testing.worker import Footprint, lasting, shm_names

PIPES: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}


def test_nothing_is_new() -> None:
    assert Footprint.now().growth() == []


def test_each_kind_is_named() -> None:
    before = Footprint.now()
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="some-thread")
    thread.start()
    with open("/dev/zero") as file, subprocess.Popen(["cat"], **PIPES) as child:
        child.stdin.write("here\n")
        child.stdin.flush()
        assert child.stdout.readline() == "here\n"  # before that, its command line may be missing
        grown = before.growth()
        expected = [
            "thread 'some-thread'",
            f"descriptor {file.fileno()} (/dev/zero)",
            f"child {child.pid} (cat)",
        ]
    stop.set()
    thread.join()
    assert [line for line in grown if "pipe" not in line] == expected
    assert before.growth() == []


def test_a_thread_that_python_has_not_started_is_nobodys() -> None:
    before, seen, stop = Footprint.now(), threading.Event(), threading.Event()

    def as_xla() -> None:
        threading.current_thread()  # which enters it among Python's, for good
        seen.set()
        stop.wait(20)

    _thread.start_new_thread(as_xla, ())
    assert seen.wait(20)
    assert any(thread.name.startswith("Dummy-") for thread in threading.enumerate())
    assert before.growth() == []
    stop.set()


def test_a_descriptor_that_changes_hands_is_new() -> None:
    first = os.open("/dev/zero", os.O_RDONLY)
    before = Footprint.now()
    os.close(first)
    second = os.open("/dev/full", os.O_RDONLY)
    assert second == first
    assert before.growth() == [f"descriptor {first} (/dev/full)"]
    os.close(second)


def test_what_ends_in_time_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PATIENCE", 0.1)
    looks = iter([["a thread"], ["a thread"], []])
    assert lasting(lambda: next(looks)) == []
    assert lasting(lambda: ["a thread"]) == ["a thread"]


def test_only_our_own_segments_count() -> None:
    ours, *others = (
        Path(f"/dev/shm/{name}-{os.getpid()}-{mark}")
        for name, mark in (
            ("fastcoll-leaks", session()),
            ("fastcoll-leaks", "another's"),
            ("other", session()),
        )
    )
    for path in (ours, *others):
        path.touch()
    found = shm_names()
    for path in (ours, *others):
        path.unlink()
    assert ours.name in found
    assert not found.intersection(path.name for path in others)
