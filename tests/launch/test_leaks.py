"""Footprints: new threads, descriptors and children are leaks unless they end in time.

testing/test_ranks_plugin.py has tests that leak.
"""

from __future__ import annotations

import _thread
import os
import threading

import pytest
from launch.launching import LIMIT

from fastcoll.testing import worker
from fastcoll.testing.worker import Footprint, lasting


def test_a_thread_that_python_has_not_started_is_no_leak() -> None:
    before, seen, stop = Footprint.now(), threading.Event(), threading.Event()

    def as_xla() -> None:
        threading.current_thread()  # which registers the thread with Python permanently
        seen.set()
        stop.wait(LIMIT)

    _thread.start_new_thread(as_xla, ())
    assert seen.wait(LIMIT)
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


def test_threads_and_children_that_end_in_time_are_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([["a thread"], ["a thread"], []])
    monkeypatch.setattr(worker, "_GONE_SECONDS", LIMIT)
    assert lasting(lambda: next(looks)) == []
    monkeypatch.setattr(worker, "_GONE_SECONDS", 0.0)
    assert lasting(lambda: ["a thread"]) == ["a thread"]
