"""Which processes may run on the cores of others."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from fastcoll.system import processes
from fastcoll.system.processes import ProcessId


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> list[ProcessId]:
    """Processes that may run on cores 0 and 1, 0 and 1, 1 and 2, 3, and 4; one that has ended; one out of sight."""
    cores = {1: {0, 1}, 2: {0, 1}, 3: {1, 2}, 4: {3}, 5: {4}, 7: {0}}

    def affinity(pid: int) -> set[int]:
        if pid not in cores:
            raise ProcessLookupError
        return cores[pid]

    monkeypatch.setattr(os, "sched_getaffinity", affinity)
    me = processes.this_process()
    return [*(replace(me, pid=pid) for pid in range(1, 7)), replace(me, pid=7, boot_id="another machine")]


@pytest.mark.parametrize(
    ("members", "neighbours", "own"),
    [
        ([0], 2, False),
        ([0, 1], 1, False),
        ([2], 2, False),
        ([0, 1, 2], 0, True),
        ([3], 0, True),
        ([3, 4], 0, True),
    ],
)
def test_neighbours_are_other_processes_on_the_same_cores(
    five: list[ProcessId], members: list[int], neighbours: int, own: bool
) -> None:
    chosen = [five[number] for number in members]
    assert processes.neighbours_of(chosen, [*five, *five]) == neighbours  # each counts once
    assert processes.have_own_cores(chosen, five) is own
    assert processes.have_own_cores(chosen)  # nobody else uses their cores
    assert processes.neighbours_of(chosen, [], len(chosen) + 3) == 3  # ranks that this one does not know
