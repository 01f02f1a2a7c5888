"""How much other processes use the cores, from given texts of /proc/stat."""

from __future__ import annotations

import os

import pytest

from fastcoll.system import load

TICKS = os.sysconf("SC_CLK_TCK")


def stat(*busy: float, idle: float = 1000) -> str:
    """Return /proc/stat of cores that have worked for `busy` seconds; half of that for users, half in the kernel."""
    total = f"cpu  {int(sum(busy) * TICKS)} 0 0 {int(idle * TICKS)} 0 0 0 0 0 0"
    halves = [int(seconds * TICKS / 2) for seconds in busy]
    lines = [f"cpu{k} {half} 0 {half} {int(idle * TICKS)} 7 0 0 0 {half} 0" for k, half in enumerate(halves)]
    return "\n".join([total, *lines, "intr 123 4 5", "ctxt 99", ""])


def test_only_the_given_cores_count_and_guests_count_once():
    assert load.busy_seconds(stat(2, 4, 8), {0, 2}) == pytest.approx(10)


@pytest.mark.parametrize(
    ("own", "used"),
    [(0.0, 1.5), (1.0, 1.0), (3.0, 0.0), (9.0, 0.0)],  # CPU seconds of our own in 2 s
)
def test_own_time_is_subtracted(own, used):
    assert load.used_by_others(stat(10, 20), stat(11, 22), {0, 1}, own, 2.0) == pytest.approx(used)


def test_others_use_no_more_than_all_cores_and_nothing_in_no_time():
    assert load.used_by_others(stat(0, 0), stat(9, 9), {0, 1}, 0.0, 2.0) == 2.0
    assert load.used_by_others(stat(0, 0), stat(9, 9), {0, 1}, 0.0, 0.0) == 0.0
    assert load.used_by_others("", "", {0, 1}, 0.0, 1.0) == 0.0


def test_this_machine_has_such_a_text():
    assert load.busy_seconds(load.read(), os.sched_getaffinity(0)) > 0
