"""`top`: its rates and samples against oracles, its views in rich's own console, and the command on real ranks."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
from bisect import bisect_right
from dataclasses import replace
from itertools import islice, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from programs import last_table, python, until
from rich.console import Console

import fastcoll as dist
from fastcoll.core import signature
from fastcoll.core.reduce_op import ReduceOp
from fastcoll.record.record import RING, CallRecord, GroupRecord, MemberRecord, Record
from fastcoll.record.recorder import own
from fastcoll.tools import top
from fastcoll.tools.blame import GONE, HAS_LEFT, Process, Rank
from fastcoll.tools.jobs_here import ProcessMemory, RunningJob, glance, look
from fastcoll.tools.rates import (
    ENDED,
    RankRates,
    Reading,
    Sample,
    View,
    end_of,
    prompt,
    rates,
    sample_of,
    slowest,
)
from fastcoll.tools.top import Watch, main, view_of, views
from fastcoll.tools.top_view import COLUMNS, cells, count_of, doing, render

REDUCE = signature.encode("all_reduce", np.dtype(np.float32), op=ReduceOp.SUM)
GATHER = signature.encode("all_gather", np.dtype(np.float32))
BARRIER = signature.encode("barrier")
MIB = 1 << 20


# ---- made-up records ---------------------------------------------------------------------------------------


def group(
    calls: list[tuple[int, int]], finished: int, *, serial: int = 1, size: int = 2, **more
) -> GroupRecord:
    """Return the record of a group whose calls have these words and sizes, of which `finished` are complete."""
    numbers = range(max(1, len(calls) - RING + 1), len(calls) + 1)
    ring = tuple(
        CallRecord(n, *calls[n - 1], "done" if n <= finished else "under way", 0, 0) for n in numbers
    )
    under_way = ring[-1] if len(calls) > finished else None
    members = tuple(MemberRecord(rank, "a", 100 + rank) for rank in range(size))
    given = {
        "name": "WORLD",
        "rank": 0,
        "failure": "",
        "waits": (),
        "late": -1,
        "pending": 0,
        "since": 0,
        **more,
    }
    return GroupRecord(
        serial=serial, backend="shm", members=members, calls=len(calls), finished=finished, ring=ring,
        under_way=under_way, **given,
    )  # fmt: skip


def rank(number: int, *groups: GroupRecord, state: str = "S", pid: int = 0) -> Rank:
    record = Record("a:100:1", number, 2, "a", 100 + number, 1, 0.0, "1", groups)
    return Rank(record, Process(pid or 100 + number, state, cores=0.5))


def reading(time: float, *ranks: Rank, gone: tuple[Record, ...] = ()) -> Reading:
    memory = {each.rank: ProcessMemory(3 * MIB, MIB) for each in ranks}
    return Reading(time, {each.rank: each for each in ranks}, memory, {each.rank: each for each in gone})


# ---- rates -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_rates_are_those_of_the_calls_that_completed_between_the_readings(seed):
    random = np.random.default_rng(seed)
    calls = [(REDUCE, 4 * int(n)) for n in random.integers(0, 1000, 900)]
    for _ in range(20):
        first, last = sorted(map(int, random.integers(0, len(calls), 2)))
        seconds = float(random.uniform(0.1, 3))
        before = rank(0, group(calls[: first + 1], first))
        after = rank(0, group(calls[: last + 1], last))
        (row,) = rates(reading(10, before), reading(10 + seconds, after), [])
        assert row.calls == pytest.approx((last - first) / seconds)
        assert row.nbytes == pytest.approx(sum(nbytes for _, nbytes in calls[first:last]) / seconds)
        assert not row.is_estimate
        assert (row.number, row.is_in, row.waits) == (last + 1, True, None)
        assert row.call.startswith("all_reduce(float32, ")


def test_bytes_of_more_calls_than_the_ring_has_are_an_estimate():
    calls = [(REDUCE, 400)] * (3 * RING)
    before, after = rank(0, group(calls[:10], 10)), rank(0, group(calls, len(calls)))
    (row,) = rates(reading(0, before), reading(2, after), [])
    assert (row.calls, row.nbytes, row.is_estimate) == (len(calls) / 2 - 5, 400 * (len(calls) / 2 - 5), True)


@pytest.mark.parametrize("unknown", [(GATHER, 100), (REDUCE, -5)], ids=["blocks", "different sizes"])
def test_bytes_are_unknown_if_the_record_does_not_have_the_size_of_a_call(unknown):
    calls = [(REDUCE, 400), unknown, (BARRIER, 0)]
    before = reading(0, rank(0, group(calls[:1], 1)))
    (row,) = rates(before, reading(1, rank(0, group(calls, 3))), [])
    assert (row.calls, row.nbytes) == (2, None)
    before = reading(0, rank(0, group(calls[:2], 2)))
    (row,) = rates(before, reading(1, rank(0, group(calls, 3))), [])
    assert (row.calls, row.nbytes, row.is_estimate) == (1, 0, False)


def test_a_rank_or_group_that_the_first_reading_lacks_has_no_rates():
    calls = [(REDUCE, 4)] * 3
    new = reading(
        1, rank(0, group(calls, 3), group(calls, 3, serial=2, name="pair")), rank(1, group(calls, 3))
    )
    old = reading(0, rank(0, group(calls, 1)), rank(1, group(calls, 1), pid=7))
    shown = [(row.rank, row.group, row.calls, row.cores) for row in rates(old, new, [])]
    assert shown == [(0, "WORLD", 2, 0.5), (0, "pair", None, 0.5), (1, "WORLD", None, None)]


def test_ranks_that_have_ended_or_left_are_shown_with_their_last_call():
    calls = [(REDUCE, 4)] * 3
    dead, left = rank(0, group(calls, 2)).record, rank(2).record
    rows = rates(reading(0), reading(1, rank(1, group(calls, 3)), gone=(dead, left)), [])
    shown = [(row.rank, row.state, row.number, row.is_in, row.calls) for row in rows]
    assert shown == [(0, ENDED, 3, True, None), (1, "sleeping", 3, False, None), (2, "", 0, False, None)]
    assert rows[2].call == HAS_LEFT
    assert doing(rows[0], True) == "ended, in all_reduce(float32, 1 elements, op=SUM)"


# ---- samples -----------------------------------------------------------------------------------------------


def at(times: tuple[list[float], list[float]], number: int, time: float) -> Rank:
    """Return a rank as it is at a time, given when it begins and ends each of its calls."""
    begun, ended = (bisect_right(each, time) for each in times)
    return rank(number, group([(REDUCE, 4)] * begun, ended))


@pytest.mark.parametrize("seed", range(10))
def test_a_sample_never_contradicts_what_happened(seed):
    """Two ranks compute for random times before each call; a call ends when both have begun it."""
    random = np.random.default_rng(seed)
    begins, ends = ([], []), ([], [])
    now = np.zeros(2)
    for _ in range(200):
        began = now + random.exponential(1.0, 2)
        now = began.max() + random.exponential(0.2, 2)
        for each in range(2):
            begins[each].append(float(began[each]))
            ends[each].append(float(now[each]))
    decided = 0
    for start in random.uniform(0, ends[0][-1], 500):
        times = start + np.cumsum(random.exponential(0.05, 6))
        before, ranks, after = (
            {each: at((begins[each], ends[each]), each, times[2 * k + each]) for each in range(2)}
            for k in range(3)
        )
        sample = sample_of(before, ranks, after, lambda peer: GONE, 0.0)
        for each in range(2):
            time = times[2 + each]
            number = bisect_right(begins[each], time)
            waits = number > bisect_right(ends[each], time) and bisect_right(begins[1 - each], time) < number
            late = sample.late.get((each, 1), frozenset())
            assert late in (None, frozenset({1 - each}) if waits else frozenset())
            decided += late is not None
    assert decided > 900  # of 1,000


def test_the_share_of_waits_is_that_of_the_decided_samples():
    calls = [(REDUCE, 4)] * 3
    both = frozenset({0, 1})
    late = [{1}, {1}, {1}, set(), None] * 2
    samples = [Sample(both, {} if ranks == set() else {(0, 1): ranks and frozenset(ranks)}) for ranks in late]
    before, after = (reading(time, rank(0, group(calls, 3)), rank(1, group(calls, 3))) for time in (0, 1))
    rows = rates(before, after, samples)
    assert [(row.waits, row.late) for row in rows] == [(0.75, 1), (0.0, -1)]
    assert [row.waits for row in rates(before, after, samples + [samples[-1]] * 4)] == [None, 0.0]
    assert slowest(samples) == (1, 0.75)
    assert slowest(samples + [samples[-1]] * 4) is None


def test_a_few_samples_are_no_verdict():
    waits = Sample(frozenset({0, 1}), {(0, 1): frozenset({1})})
    before, after = (reading(time, rank(0, group([(REDUCE, 4)], 0))) for time in (0, 1))
    for number, share in (4, None), (5, 1.0):
        assert [row.waits for row in rates(before, after, [waits] * number)] == [share]
        assert slowest([waits] * number) == (share and (1, share))


def test_ranks_that_are_late_in_turn_are_not_the_slowest():
    everyone = frozenset(range(3))
    for_0, for_1 = (Sample(everyone, {(2, 1): frozenset({late})}) for late in (0, 1))
    assert slowest([for_0] * 12 + [for_1] * 9) == (-1, 0.0)
    assert slowest([for_0] * 18 + [for_1] * 3) == (0, 18 / 21)


def test_groups_without_a_call_have_no_row_if_the_rank_has_another():
    call, empty = group([(REDUCE, 4)], 1), group([], 0, serial=2, name="WORLD/node0")
    failed = group([], 0, serial=3, name="pair", failure="rank 1 died")
    ranks = rank(0, call, empty, failed), rank(1, empty)
    shown = [(row.rank, row.group) for row in rates(reading(0, *ranks), reading(1, *ranks), [])]
    assert shown == [(0, "WORLD"), (0, "pair"), (1, "WORLD/node0")]


def test_a_rank_that_waits_itself_is_not_the_slowest():
    chain = Sample(frozenset(range(3)), {(0, 1): frozenset({1}), (1, 1): frozenset({2})})
    assert slowest([chain] * 5) == (2, 1.0)
    circle = Sample(frozenset(range(2)), {(0, 1): frozenset({1}), (1, 1): frozenset({0})})
    assert slowest([circle] * 5) == (-1, 0.0)
    assert slowest([]) is None


@pytest.mark.parametrize(
    ("slow", "text"),
    [
        ((1, 0.8), "slowest is rank 1: others waited for it 80% of the time"),
        ((-1, 0.0), "no single rank held others up"),
        (None, "the samples do not show which rank is the slowest"),
    ],
)
def test_the_summary_names_the_slowest_rank(slow, text):
    assert VIEW._replace(slow=slow, samples=1).summary == f"{text} (1 sample in 0.5 s)"


def test_a_stopped_rank_does_not_wait_and_others_wait_for_it_inside_the_call():
    inside = group([(REDUCE, 4)] * 2, 1)
    ranks = {0: rank(0, inside), 1: rank(1, inside, state="T")}
    sample = sample_of(ranks, ranks, ranks, lambda peer: GONE, 0.0)
    assert sample.late == {(0, 1): frozenset({1})}
    ranks = {0: rank(0, inside, state="T"), 1: rank(1, group([(REDUCE, 4)], 1))}
    assert sample_of(ranks, ranks, ranks, lambda peer: GONE, 0.0).late == {}


def test_an_asynchronous_call_is_no_wait_of_a_rank_that_computes():
    posted = group([(REDUCE, 4)] * 2, 1, pending=1)
    ranks = {0: rank(0, posted, state="R"), 1: rank(1, group([(REDUCE, 4)], 1))}
    assert sample_of(ranks, ranks, ranks, lambda peer: GONE, 0.0).late == {}
    ranks[0] = replace(ranks[0], process=Process(100, "S", "futex_wait"))
    assert sample_of(ranks, ranks, ranks, lambda peer: GONE, 0.0).late == {(0, 1): frozenset({1})}


def test_whether_a_rank_waits_for_one_on_another_machine_is_unknown():
    ranks = {0: rank(0, group([(REDUCE, 4)] * 2, 1))}
    assert sample_of(ranks, ranks, ranks, lambda peer: "elsewhere", 0.0).late == {(0, 1): None}
    assert sample_of(ranks, ranks, ranks, lambda peer: GONE, 0.0).late == {(0, 1): frozenset({1})}


def test_samples_that_took_long_are_left_out():
    samples = [Sample(frozenset(), {}, took) for took in (0.002, 0.001, 0.0041, 0.004)]
    assert [sample.took for sample in prompt(samples)] == [0.002, 0.001, 0.004]
    assert prompt([]) == []


def test_a_view_has_the_samples_of_the_last_five_seconds_and_more_if_it_shows_more(monkeypatch):
    clock = SimpleNamespace(now=100.0, thread_time=lambda: 0.0, time=lambda: 0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(top, "time", clock)
    job = SimpleNamespace(unseen=lambda: [], diagnoses=lambda now: [], title=lambda now: "")
    watch = SimpleNamespace(job=job, whole=job, sample=lambda: Sample(frozenset({0}), {}))
    watch.read = lambda: reading(clock.now, rank(0, group([(REDUCE, 4)], 1)))

    def wait(seconds: float) -> None:
        clock.now += max(seconds, 0.001)

    for interval, last in (0.5, 5.0), (7.0, 7.0):
        shown = [view.seconds for view in islice(views(watch, interval, wait), 20)]
        assert shown[0] == pytest.approx(interval, abs=0.1)
        assert shown[-1] == pytest.approx(last, abs=0.1)
        # The pauses between samples have random lengths.
        assert all(later > earlier - 0.1 for earlier, later in pairwise(shown))


# ---- views -------------------------------------------------------------------------------------------------

ROWS = [
    RankRates(0, 100, "running", 0.98, "WORLD", "all_reduce(float32, 1024 elements, op=SUM)", 123456, True, "",
              9876.0, 3.1 * MIB, True, 0.8, 1, ProcessMemory(180 * MIB, 16 * MIB)),
    RankRates(0, 100, "running", 0.98, "a_group_with_a_long_name", "broadcast(float32, 8 bytes, root=0)", 7, False,
              "", 0.0, 0.0, False, None, -1, ProcessMemory(180 * MIB, 16 * MIB)),
    RankRates(1, 101, "stopped", 0.0, "WORLD", "barrier()", 123455, False),
    RankRates(2, 102, "", call="on node17"),
]  # fmt: skip
VIEW = View(
    "4 ranks, for 12 s, job a:100:1: " + "python train.py " * 12,
    ROWS,
    20,
    0.5,
    (1, 0.8),
    ["rank 1 is stopped"],
)


def lines(view: View, width: int, height: int | None = None) -> list[str]:
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    console.print(render(view, width, height))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 80, 119, 120, 160])
def test_a_view_fits_into_a_terminal(width):
    shown = lines(VIEW, width)
    assert max(map(len, shown)) <= width
    if width >= 80:
        assert shown[1].startswith(
            "slowest is rank 1: others waited for it 80% of the time (20 samples in 0.5 s)"[:width]
        )
        text = "\n".join(shown)
        names = [column.name for column in COLUMNS if width >= 120 or not column.wide]
        (head,) = (line for line in shown if line.startswith("rank group") or line.startswith("rank host"))
        assert head.split() == names
        for part in (
            "rank 1 is stopped",
            "123456",
            "9876",
            "~3.1 MiB",
            "80%",
            "180 MiB",
            "16 MiB",
            "on node17",
        ):
            assert part in text
        assert text.count("180 MiB") == 1  # in the first row of the rank


def test_wide_views_have_the_arguments_of_calls_and_all_have_the_number():
    assert cells(ROWS[0], True) == [
        "0", "-", "100", "running", "0.98", "WORLD", "in all_reduce(float32, 1024 elements, op=SUM)", "123456", "9876",
        "~3.1 MiB", "80%", "1", "180 MiB", "16 MiB",
    ]  # fmt: skip
    assert cells(ROWS[1], False) == [
        "0", "a_group_with_a_long_name", "after broadcast", "7", "0", "0 B", "-", "-", "180 MiB", "16 MiB"
    ]  # fmt: skip
    assert cells(ROWS[2], False)[2:6] == ["stopped, after barrier", "123455", "-", "-"]
    assert doing(ROWS[0]._replace(failure="rank 1 died"), False) == "failed: rank 1 died"
    assert doing(RankRates(0, 1, "running", group="WORLD"), False) == "no call yet"


def test_rows_for_which_a_terminal_has_no_room_are_counted():
    many = VIEW._replace(rows=[ROWS[2]._replace(rank=rank) for rank in range(100)])
    shown = lines(many, 80, 24)
    assert len(shown) <= 24
    (more,) = (line for line in shown if "rows more" in line)
    assert int(more.split()[1]) == 100 - sum("barrier" in line for line in shown)
    render(many, 0, 24)  # a terminal that does not know its size


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.44, "0.4"),
        (87, "87"),
        (9999, "9999"),
        (12345, "12.3k"),
        (234567, "235k"),
        (4.2e6, "4.2M"),
    ],
)
def test_numbers_are_short(value, text):
    assert count_of(value) == text


def test_the_end_of_a_job_names_the_ranks_that_died_first():
    call = "barrier()"
    rows = [
        RankRates(0, 100, ENDED, group="WORLD", call=call, number=8, failure="rank 1 (pid 101) died"),
        RankRates(0, 100, ENDED, group="pair", call=call, number=3),
        RankRates(1, 101, ENDED, group="pair", call=call, number=4, is_in=True),
        RankRates(1, 101, ENDED, group="WORLD", call=call, number=7),
        RankRates(2, 102, "", call=HAS_LEFT),
    ]
    assert end_of(rows) == (
        "the job has ended: rank 1 (pid 101) ended in barrier(), call 4 of group pair; "
        "rank 0 failed: rank 1 (pid 101) died; rank 2 left it"
    )


# ---- real ranks --------------------------------------------------------------------------------------------


def watch_own() -> Watch:
    (job,) = look(own().job)[0]
    return Watch(job)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_the_rank_that_another_one_waits_for_is_named_and_its_calls_are_counted(rank, backend, tmp_path):
    """Rank 2 watches; rank 0 is in a call of the pair that rank 1 begins when rank 2 has seen that."""
    pair, go, x = dist.new_group([0, 1], backend=backend), tmp_path / "go", np.ones(100, np.float32)
    if rank < 2:
        dist.all_reduce(x, group=pair)
    dist.barrier()
    if rank == 1:
        until(go.exists)
    if rank < 2:
        for _ in range(50):
            dist.all_reduce(x, group=pair)
    else:
        with watch_own() as watch:
            before = watch.read()
            until(lambda: 1 in {late for each in watch.sample().late.values() for late in each or ()})
            waiting = [watch.sample() for _ in range(10)]
            stuck = view_of(watch, before, watch.read(), waiting, 1.0)
            assert stuck.slow == (1, 1.0)
            (row,) = (row for row in stuck.rows if row.rank == 0 and row.group != "WORLD")
            assert (row.is_in, row.number, row.waits, row.late, row.calls) == (True, 2, 1.0, 1, 0)
            assert row.call == "all_reduce(float32, 100 elements, op=SUM)"
            assert row.memory.resident > row.memory.shared > 0
            (row,) = (row for row in stuck.rows if row.rank == 1 and row.group != "WORLD")
            assert (row.is_in, row.number, row.waits, row.late) == (False, 1, 0.0, -1)
            before = watch.read()
            go.touch()
            until(
                lambda: [watch.read().ranks[each].record.groups[-1].finished for each in (0, 1)] == [51, 51]
            )
            after = watch.read()
            rows = [row for row in rates(before, after, []) if row.group != "WORLD"]
            seconds = after.time - before.time
            assert [round(row.calls * seconds, 6) for row in rows] == [50, 50]
            assert [round(row.nbytes * seconds, 6) for row in rows] == [50 * 400, 50 * 400]
    dist.barrier()
    dist.destroy_process_group(pair)


@pytest.mark.ranks(3)
def test_a_stopped_rank_is_shown_as_stopped_and_never_stops_top(rank, tmp_path):
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    pair, x = dist.new_group([0, 1]), np.ones(4)
    if rank < 2:
        dist.all_reduce(x, group=pair)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank < 2:
        dist.all_reduce(x, group=pair)
    else:
        try:
            with watch_own() as watch:

                def stuck() -> View | None:
                    before, samples = watch.read(), [watch.sample() for _ in range(5)]
                    view = view_of(watch, before, watch.read(), samples, 1.0)
                    states = {row.rank: row.state for row in view.rows}
                    return view if (states.get(1), view.slow) == ("stopped", (1, 1.0)) else None

                shown = "\n".join(lines(until(stuck), 160))
                assert "stopped, after all_reduce(float64, 4 elements, op=SUM)" in shown
        finally:
            until(lambda: glance(pids[1]).state == "T")  # a SIGCONT before that would do nothing
            os.kill(pids[1], signal.SIGCONT)
    dist.barrier()
    dist.destroy_process_group(pair)


PROGRAM = """
import time
import numpy as np
import fastcoll as dist
dist.init_process_group(backend="shm", timeout=600)
x = np.ones(4, np.float32)
dist.barrier()
print("up", flush=True)
while True:
    dist.all_reduce(x)
    x[:] = 1
    time.sleep(0.005)  # leaves the processors to `top`
"""


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The launcher of a job of two ranks that make calls until they are killed."""
    program = tmp_path_factory.mktemp("job") / "calls.py"
    program.write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "fastcoll",
        "launch",
        "-n",
        "2",
        "--grace",
        "1",
        str(program),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as launcher:
        try:
            assert all("up" in launcher.stdout.readline() for _ in range(2))
            yield launcher
        finally:
            launcher.terminate()
            launcher.communicate()


@pytest.mark.parametrize("end", [b"q", signal.SIGINT, signal.SIGTERM], ids=["q", "Ctrl-C", "SIGTERM"])
def test_on_a_terminal_it_ends_with_q_and_signals_and_restores_the_terminal(job, end):
    ours, theirs = pty.openpty()
    try:
        subprocess.run(["stty", "rows", "24", "cols", "80"], stdin=theirs, check=True)
        settings = subprocess.run(["stty", "-g"], stdin=theirs, capture_output=True, check=True).stdout
        command = [sys.executable, "-m", "fastcoll", "top", str(job.pid)]
        environ = {**os.environ, "TERM": "xterm"}
        streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": environ}
        with subprocess.Popen(command, start_new_session=True, **streams) as command:
            shown = b""
            while b"q: end" not in shown:
                shown += os.read(ours, 1 << 16)
            os.write(ours, end) if isinstance(end, bytes) else command.send_signal(end)
            while command.poll() is None:  # so that the terminal always has room
                if select.select([ours], [], [], 0.01)[0]:
                    shown += os.read(ours, 1 << 16)
        while select.select([ours], [], [], 0)[0]:
            shown += os.read(ours, 1 << 16)
        assert command.returncode == (128 + signal.SIGTERM if end == signal.SIGTERM else 0)
        assert b"\x1b[?1049h" in shown
        assert b"\x1b[?1049l" in shown  # the screen as it was
        assert subprocess.run(["stty", "-g"], stdin=theirs, capture_output=True).stdout == settings
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_terminal_without_controls_gets_one_view_after_another(job):
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": {**os.environ, "TERM": "dumb"}}
    try:
        command = [sys.executable, "-m", "fastcoll", "top", str(job.pid)]
        with subprocess.Popen(command, start_new_session=True, **streams) as command:
            shown = b""
            while shown.count(b"all_reduce") < 4:
                shown += os.read(ours, 1 << 16)
            command.kill()
        assert b"\x1b" not in shown
    finally:
        os.close(ours)
        os.close(theirs)


def test_once_and_until_the_job_has_ended_in_a_pipe(job):
    """This ends the job, so it is the last test that uses it."""
    done = python("-m", "fastcoll", "top", "--once", job.pid)
    assert (done.returncode, done.stderr) == (0, "")
    rows = last_table(done.stdout)
    assert [row["rank"] for row in rows] == ["0", "1"]
    for row in rows:
        assert row["group"] == "WORLD"
        assert row["call"].startswith(("in a", "after all_reduce(float32, 4 elements, op=SUM)"))
        assert row["bytes/s"] != "-"
        assert row["calls/s"] not in ("-", "0")
    command = [sys.executable, "-m", "fastcoll", "top", str(job.pid), "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as shown:
        while not shown.stdout.readline().startswith("1\t"):
            assert shown.poll() is None
        os.kill(int(rows[1]["pid"]), signal.SIGKILL)
        rest = shown.communicate()[0]
    assert shown.returncode == 0
    last = rest.splitlines()[-1]
    assert last.startswith("the job has ended: ")
    assert f"rank 1 (pid {rows[1]['pid']}) ended " in last
    assert [row["state"] for row in last_table(rest) if row["rank"] == "1"] == ["ended"]


def test_without_a_job_and_with_a_wrong_interval_it_ends(capsys):
    assert main(["none-of-that-name"]) == 1
    assert "there is no job 'none-of-that-name'" in capsys.readouterr().out
    for interval in ("0", "inf", "nan", "-1"):
        with pytest.raises(SystemExit) as ended:
            main(["--interval", interval])
        assert ended.value.code == 2
        assert "--interval is a number of seconds above 0" in capsys.readouterr().err


def test_of_several_jobs_a_list_is_shown(monkeypatch, capsys):
    jobs = [
        RunningJob(name, {0: Rank(rank(0).record, Process(1, "S", command=name))})
        for name in ("a.py", "b.py")
    ]
    monkeypatch.setattr(top, "look", lambda name: (jobs, []))
    assert main([]) == 1
    shown = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1], row[3]) for row in shown[1:3]] == [("a.py", "2", "a.py"), ("b.py", "2", "b.py")]
    assert shown[-1] == ["top shows one job: python -m fastcoll top JOB"]


def test_without_rich_the_error_names_the_cure():
    code = "import sys; sys.modules['rich'] = None; from fastcoll.tools.command import main; sys.exit(main(['top']))"
    done = python("-c", code)
    assert done.returncode == 1
    assert "pip install rich, or pip install '.[top]'" in done.stderr
