"""Segments: access rights, nonce, unlinked names, and the sweep of dead makers' names."""

from __future__ import annotations

import dataclasses
import mmap
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from programs import DIES_WITH_A_SEGMENT

from fastcoll.errors import ResourceError
from fastcoll.shm import segment as shared
from fastcoll.shm.layout import plan
from fastcoll.shm.segment import Segment
from fastcoll.system.processes import SESSION, this_process

LAYOUT = plan(2, 1 << 17)


@pytest.fixture
def name():
    name = shared.new_name()
    yield name
    shared.unlink(name)


def test_two_mappings_are_one_memory_that_only_its_owner_may_open(name: str) -> None:
    ours = Segment.create(name, LAYOUT)
    status = os.stat(f"/dev/shm/{name}")
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == LAYOUT.nbytes
    assert status.st_blocks * 512 == LAYOUT.header + 2 * sum(nbytes for _, nbytes in LAYOUT.always_there(0))
    theirs = Segment.attach(name, LAYOUT)
    shared.unlink(name)
    assert theirs.nonce == ours.nonce != 0
    theirs.publish_attached(1)
    assert ours.missing() == [0]
    ours.publish_attached(0)
    assert ours.missing() == theirs.missing() == []
    for segment in (theirs, ours, ours):
        segment.close()


@pytest.mark.parametrize("every", [True, False])
def test_pages_are_mapped_ahead(name: str, every: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not every:
        monkeypatch.setattr(shared, "_PREFAULT_BYTES", 0)
    Segment.create(name, LAYOUT).close()
    segment = Segment.attach(name, LAYOUT)
    before = resident(name)
    segment.prefault(1)
    a_rank = sum(nbytes for _, nbytes in LAYOUT.always_there(1))
    grown, expected = resident(name) - before, a_rank * (2 if every else 1)
    assert expected - 2 * mmap.PAGESIZE <= grown <= expected
    segment.close()


def test_memory_is_allocated_when_a_rank_needs_it(name: str) -> None:
    segment = Segment.create(name, LAYOUT)
    before = os.stat(f"/dev/shm/{name}").st_blocks
    segment.allocate(*LAYOUT.slots_of(1))
    head, _, ring = LAYOUT.ring_of(1, 0)
    segment.allocate(ring + 100, 100)  # the page around it
    grown = (os.stat(f"/dev/shm/{name}").st_blocks - before) * 512
    assert grown == LAYOUT.slots_of(1)[1] + mmap.PAGESIZE
    segment.close()
    segment.allocate(head, 1)


def test_an_old_kernel_allocates_everything_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux before 5.14 has no MADV_POPULATE_WRITE, and rejects a number that it does not know."""
    monkeypatch.setattr(shared, "_MADV_POPULATE_WRITE", 9999)
    shared.allocates_later.cache_clear()
    try:
        assert not shared.allocates_later()
        segment = Segment.create(name, LAYOUT)
        assert os.stat(f"/dev/shm/{name}").st_blocks * 512 == LAYOUT.nbytes
        segment.prefault(0)
        segment.allocate(*LAYOUT.slots_of(0))
        segment.close()
    finally:
        shared.allocates_later.cache_clear()


def resident(name: str) -> int:
    """Bytes of a segment in this process's page table."""
    maps = Path("/proc/self/smaps").read_text().split(name)[1]
    return int(maps.split("Rss:")[1].split()[0]) << 10


def test_a_segment_other_than_the_announced_one_is_rejected(name: str) -> None:
    with pytest.raises(ResourceError, match="cannot attach"):
        Segment.attach(name, LAYOUT)
    Segment.create(name, LAYOUT).close()
    with pytest.raises(ResourceError, match="cannot create"):
        Segment.create(name, LAYOUT)
    with pytest.raises(ResourceError, match="expected"):
        Segment.attach(name, plan(2, 1 << 18))
    with open(f"/dev/shm/{name}", "r+b") as file:
        file.write(bytes(8))
    with pytest.raises(ResourceError, match="not a segment"):
        Segment.attach(name, LAYOUT)


def test_sweep_removes_only_names_of_dead_makers(name: str) -> None:
    """A killed process counts as dead before its parent has reaped it."""
    Segment.create(name, LAYOUT).close()
    with subprocess.Popen(
        [sys.executable, "-c", DIES_WITH_A_SEGMENT], stdout=subprocess.PIPE, text=True
    ) as dying:
        assert dying.stdout
        dead = dying.stdout.read().strip()  # until the pipe closes, when the process ends
        os.waitid(os.P_PID, dying.pid, os.WEXITED | os.WNOWAIT)
        assert os.path.exists(f"/dev/shm/{dead}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(SESSION, "another")
            assert dead not in shared.sweep()
        assert dead in shared.sweep()
    assert not os.path.exists(f"/dev/shm/{dead}")
    assert os.path.exists(f"/dev/shm/{name}")


def test_sweep_removes_names_whose_pid_was_reused(name: str) -> None:
    before = name.replace(f"-{this_process().start_time}-", "-1-")
    assert before != name
    Segment.create(before, LAYOUT).close()
    assert before in shared.sweep()


def test_sweep_removes_names_of_makers_that_peers_reported_as_ended(name: str) -> None:
    """A killed process closes its connections some time before it counts as ended."""
    Segment.create(name, LAYOUT).close()
    other = dataclasses.replace(this_process(), start_time=1)
    assert name not in shared.sweep([other])
    assert name in shared.sweep([this_process()])
    assert not os.path.exists(f"/dev/shm/{name}")
