"""The dumps of ranks after errors, and the report of `python -m fastcoll trace`."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from programs import python, until

import fastcoll as dist
from fastcoll import config
from fastcoll.core import signature
from fastcoll.launch.nodes import free_port
from fastcoll.record import dump as core_dump
from fastcoll.record.dump import FORMAT
from fastcoll.record.record import CallRecord, GroupRecord, MemberRecord, Record, Waiting, read
from fastcoll.tools import divergence
from fastcoll.tools.dumps import Dump, Reason, load
from fastcoll.tools.timeline import picture, timeline

REDUCE = signature.encode("all_reduce", np.dtype(np.float32), op=dist.ReduceOp.SUM)
BARRIER = signature.encode("barrier")
SECOND = 10**9


def call(number: int, word: int = REDUCE, state: str = "done", began: int = 0, ended: int = 0) -> CallRecord:
    return CallRecord(number, word, 0 if word == BARRIER else 16, state, began, ended)


def group(
    rank: int, ring: list[CallRecord], size: int = 3, name: str = "WORLD", **more: object
) -> GroupRecord:
    last = ring[-1] if ring else None
    under_way = last if last and last.state == "under way" else None
    finished = len(ring) - (1 if last and last.state != "done" else 0)
    plain = {
        "backend": "shm", "members": tuple(MemberRecord(r, "node", 100 + r) for r in range(size)),
        "pending": 0, "late": -1, "waits": (), "failure": "", "since": 50 * SECOND if under_way else 0, "serial": 1,
    }  # fmt: skip
    found = {"name": name, "rank": rank, "calls": len(ring), "finished": finished, "ring": tuple(ring)}
    return GroupRecord(**(found | {"under_way": under_way} | plain | more))


def dump(rank: int, *groups: GroupRecord, why: str = "", state: str = "", place: str = "") -> Dump:
    record = Record("job", rank, len(groups[0].members), "node", 100 + rank, 1, 0.0, "1", groups)
    stacks = f'Thread 0x10 (most recent call first):\n  File "{place}", line 7 in step\n' if place else ""
    reasons = (Reason(60.0, why or "SIGQUIT", stacks),) if why or place else ()
    return Dump(Path("x"), record, reasons, {16: "MainThread"}, 60.0, 0 if state else None, state)


DONE = [call(1), call(2)]


def test_ranks_with_different_calls_are_named() -> None:
    dumps = [
        dump(rank, group(rank, [*DONE, call(3, BARRIER if rank == 1 else REDUCE, "mismatch")]))
        for rank in range(3)
    ]
    found = divergence.summary(dumps)
    first = "At call 3 of group 'WORLD' the ranks diverged: rank 1 called barrier(), where ranks 0, 2 called"
    assert found.startswith(first)
    assert "all_reduce(float32, 4 elements, op=SUM)" in found


def test_a_mismatch_that_the_program_has_handled_is_not_reported() -> None:
    dumps = []
    for rank in range(3):
        ring = [*DONE, call(3, BARRIER if rank == 1 else REDUCE, "mismatch"), *map(call, range(4, 12))]
        ring += [call(12, REDUCE, "under way")] if rank != 2 else []
        dumps.append(dump(rank, group(rank, ring)))
    assert "Ranks 0, 1 waited" in divergence.summary(dumps)
    assert "which rank 2 never called" in divergence.summary(dumps)


def test_a_rank_that_never_called_and_where_it_is() -> None:
    waiting = [dump(rank, group(rank, [*DONE, call(3, BARRIER, "under way")])) for rank in (0, 2)]
    late = dump(1, group(1, DONE), place="/home/me/train.py")
    (found,) = divergence.divergences([*waiting, late])
    assert (found.number, found.late, found.silent) == (3, [1], [])
    assert (found.is_mismatch, found.since) == (False, 50.0)
    found = divergence.summary([*waiting, late])
    assert (
        "Ranks 0, 2 waited for 10 s in barrier(), call 3 of group 'WORLD', which rank 1 never called" in found
    )
    assert "its last call in this group was 2, all_reduce(float32, 4 elements, op=SUM)" in found
    assert "it is in step (train.py:7)" in found
    stopped = dump(1, group(1, DONE), state="T")
    assert "its process was stopped (SIGSTOP) when rank 0 looked" in divergence.summary([*waiting, stopped])
    assert "Rank 1 (pid 101 on node) left no file" in divergence.summary(waiting)
    edges = {(wait.waiter, wait.awaited) for wait in divergence.waits([*waiting, late])}
    assert edges == {(0, 1), (2, 1)}


@pytest.mark.parametrize(
    "end", ["died", "left: ValueError: bad data (train.py:7)", "left (its program ended)"]
)
def test_how_a_rank_without_a_file_ended_is_known_from_other_ranks(end: str) -> None:
    why = f"AbortedError: rank 1 (pid 101 on node) {end}; barrier(), call 3 of group 'WORLD'"
    waiting = dump(0, group(0, [*DONE, call(3, BARRIER, "under way")], 2))
    found = divergence.summary([replace(waiting, reasons=(Reason(60.0, why, ""),))])
    assert "Rank 1 (pid 101 on node) left no file. " in found
    assert f"Other ranks saw that rank 1 (pid 101 on node) {end}." in found


def test_of_several_ranks_without_a_file_each_has_its_own_end() -> None:
    ends = [
        "rank 1 (pid 101 on node) left (its program ended)",
        "rank 2 (pid 102 on node) left: ValueError: bad, data",
    ]
    waiting = dump(0, group(0, [*DONE, call(3, BARRIER, "under way")], 3))
    reason = Reason(60.0, f"AbortedError: {', '.join(ends)}; barrier(), call 3 of group 'WORLD'", "")
    found = divergence.summary([replace(waiting, reasons=(reason,))])
    assert f"Other ranks saw that {ends[0]}, and that {ends[1]}." in found
    assert "stopped, killed" not in found


@pytest.mark.parametrize("file", ["record/dump.py", "api/collectives.py", "job/groups.py", "shm/calls.py"])
def test_the_place_in_the_program_is_found_in_files_of_another_installation(file: str) -> None:
    frame = f'  File "/there/site-packages/fastcoll/{file}", line 140 in inner\n'
    stacks = f'Thread 0x10 (most recent call first):\n{frame}  File "/there/train.py", line 7 in step\n'
    there = replace(dump(1, group(1, DONE)), reasons=(Reason(60.0, "SIGQUIT", stacks),))
    assert there.program_line() == "step (train.py:7)"


def test_of_ranks_that_are_stuck_at_different_calls_the_first_call_is_named() -> None:
    dumps = [
        dump(0, group(0, [*DONE, call(3, BARRIER, "under way")])),
        dump(1, group(1, [*DONE, call(3, BARRIER), call(4, BARRIER, "under way")])),
        dump(2, group(2, DONE)),
    ]
    (found,) = divergence.divergences(dumps)
    assert (found.number, found.late) == (3, [2])


def test_ranks_in_two_groups_that_wait_for_one_another() -> None:
    one = dump(0, group(0, DONE), group(0, [call(1, BARRIER, "under way")], 3, "a", serial=2))
    two = dump(1, group(1, [*DONE, call(3, REDUCE, "under way")]), group(1, [], 3, "a", serial=2))
    wait = Waiting(0, "recv from rank 1", 50 * SECOND, (1,), 1)
    three = dump(2, group(2, [*DONE, call(3, REDUCE, "under way")], waits=(wait,)))
    found = divergence.summary([one, two, three])
    ring = "rank 0 for rank 1 (call 1 of a), rank 1 for rank 0 (call 3 of WORLD)"
    assert f"Ranks wait for one another in a ring: {ring}" in found
    found = divergence.waits([one, two, three])
    drawn = ElementTree.fromstring(picture(found, 3, []))
    assert sum(each.tag.endswith("circle") for each in drawn.iter()) == 3
    assert sum(each.tag.endswith("line") for each in drawn.iter()) == len(found)
    assert any(each.text == "rank 2 waits for rank 1: recv from rank 1" for each in drawn.iter())


def test_a_message_that_no_rank_sends() -> None:
    waits = (Waiting(0, "recv from rank 1, tag 3", 50 * SECOND, (1,), 1),)
    late = dump(1, group(1, DONE), place="/home/me/train.py")
    dumps = [dump(0, group(0, DONE, waits=waits)), late, dump(2, group(2, DONE))]
    where = "which is in step (train.py:7)"
    assert divergence.summary(dumps) == f"Rank 0 waits for rank 1, {where}: recv from rank 1, tag 3."


def test_the_timeline_spreads_calls_that_were_not_timed() -> None:
    ring = [call(1, began=1000, ended=2000), call(2), call(3), call(4, began=5000, ended=6000)]
    ring += [call(5, REDUCE, "under way")]
    events = [each for each in timeline([dump(0, group(0, ring))])["traceEvents"] if each["ph"] == "X"]
    assert [each["args"]["number"] for each in events] == [1, 2, 3, 4, 5]
    assert [each["args"]["timed"] for each in events] == [True, False, False, True, True]
    assert [(each["ts"], each["dur"]) for each in events][:4] == [(1, 1), (2, 1.5), (3.5, 1.5), (5, 1)]
    assert events[4]["ts"] + events[4]["dur"] == 60e6


def test_the_timeline_shows_for_how_long_a_call_waited_that_failed() -> None:
    """The ring does not have when the wait began, since only the end of a call in shared memory may be timed."""
    ring = [call(1, began=1000, ended=2000), call(2, state="failed", ended=9000)]
    waits = (Waiting(2, "all_reduce", 4000, (1,), 1),)
    events = [
        each for each in timeline([dump(0, group(0, ring, waits=waits))])["traceEvents"] if each["ph"] == "X"
    ]
    assert [(each["ts"], each["dur"], each["args"]["timed"]) for each in events] == [
        (1, 1, True),
        (4, 5, True),
    ]


# ---- real processes --------------------------------------------------------------------------------------

# Rank 0 calls last, when the others have reached their calls, and with its own timeout, so its timeout ends first.
PROGRAM = """
import collections, itertools, os, signal, sys, time
import numpy as np
import fastcoll as dist
from fastcoll.system.processes import status_of
from fastcoll.record.record import read

kind, backend = sys.argv[1:]
dist.init_process_group(backend, timeout=120)
rank, size = dist.get_rank(), dist.get_world_size()
x = np.ones(1000, np.float32)
for step in range(3):
    dist.all_reduce(x)
mine, odd = read(os.getpid()).groups[0], rank == size - 1
def wait_for(ranks, so):
    for pid in [mine.members[each].pid for each in ranks]:
        while not so(pid): time.sleep(0.01)
def waits(pid):
    group = read(pid).groups[0]
    return group.calls > mine.calls or group.waits
if kind == "skip" and not odd:
    dist.barrier()
if kind == "loop" and odd:
    def spin():
        open("in the loop", "w")
        while True:
            time.sleep(0.01)
    spin()
if kind == "stop" and odd:
    os.kill(os.getpid(), signal.SIGSTOP)
if kind == "die" and odd:
    wait_for(range(size - 1), waits)
    os.kill(os.getpid(), signal.SIGKILL)
if kind == "stuck" and odd:
    print("stuck", os.getpid(), flush=True)
    collections.deque(itertools.repeat(0, 10**12), maxlen=0)  # with the GIL, whatever signals come
if rank == 0 and kind in ("loop", "stop", "recv"):
    wait_for(range(1, size - (kind != "recv")), waits)
    if kind == "loop":
        wait_for([0], lambda pid: os.path.exists("in the loop"))
    if kind == "stop":
        wait_for([size - 1], lambda pid: status_of(pid)[0] == b"T")
    dist.group.WORLD.timeout = 0.5
if kind == "recv":
    dist.recv(x, (rank + 1) % size)
dist.all_reduce(x[:10])
dist.destroy_process_group()
"""


BACKENDS = ["shm", pytest.param("tcp", marks=pytest.mark.long)]


def job(
    tmp_path: Path, kind: str, backend: str = "shm", *options: str, text: str = PROGRAM, **env: str
) -> Path:
    """Return the folder with the dumps of three ranks of a job that fails."""
    program, folder = tmp_path / "program.py", tmp_path / "traces"
    program.write_text(text)
    words = ["-m", "fastcoll.launch", "-n3", *options, program, kind, backend]
    environ = {"FASTCOLL_TRACE_DIR": str(folder)}
    done = python(*words, environ=environ | env, cwd=tmp_path)
    assert done.returncode != 0, done.stderr
    return folder


def trace(folder: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = python("-m", "fastcoll", "trace", folder)
    assert done.returncode == code, done.stderr
    return done


def report(folder: Path) -> str:
    found = trace(folder).stdout
    ElementTree.parse(folder / "waits.svg")
    assert json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_skipped_call(tmp_path: Path, backend: str) -> None:
    folder = job(tmp_path, "skip", backend, FASTCOLL_TRACE_SITES="1")
    # A symbolic link, which must not be followed.
    (folder / "timeline.json").symlink_to(tmp_path / "program.py")
    found = report(folder)
    assert (tmp_path / "program.py").read_text() == PROGRAM
    diverged = "rank 2 called all_reduce(float32, 10 elements, op=SUM) at"
    assert f"At call 4 of group 'WORLD' the ranks diverged: {diverged}" in found
    lines = PROGRAM.splitlines()
    barrier, all_reduce = (
        lines.index(line) + 1 for line in ("    dist.barrier()", "dist.all_reduce(x[:10])")
    )
    assert f"program.py:{all_reduce}, where ranks 0, 1 called barrier() at" in found
    assert f"program.py:{barrier}." in found


RAISES = """
import numpy as np
import fastcoll as dist
dist.init_process_group()
dist.barrier()
if dist.get_rank() == 1:
    raise ValueError("bad data")
dist.all_reduce(np.ones(10))
"""


def test_a_rank_that_raised_an_exception_has_the_first_error(tmp_path: Path) -> None:
    found = report(job(tmp_path, "", text=RAISES)).splitlines()[0]
    assert found.endswith('The first error was rank 1\'s: "ValueError: bad data (program.py:7)".')
    assert "left" not in found, found


LATE = "which rank 2 never called"
REDUCING = f"all_reduce(float32, 10 elements, op=SUM), call 4 of group 'WORLD', {LATE}."
TOLD = {
    # The launcher asks the rank in the loop for a dump before it ends it.
    "loop": ["Ranks 0, 1 waited", REDUCING, "it is in spin (program.py:", "CollectiveTimeoutError"],
    "stop": [LATE, "its process was stopped (SIGSTOP)"],
    # It dies while the others wait for it, and these exit by themselves: the launcher would end them at once. The call
    # is the fifth: with --min_ranks the ranks confirm their first meeting by a barrier.
    "die": ["Ranks 0, 1 waited", f"call 5 of group 'WORLD', {LATE}", "Other ranks saw that rank 2 (pid "],
    "recv": ["Ranks wait for one another in a ring: rank 0 for rank 1 (recv from rank 1"],
}


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("die", "shm"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("die", "tcp"), ("loop", "shm"), ("loop", "tcp"), ("stop", "shm"), ("recv", "shm")]
        ),
    ],
)
def test_dumps_show_which_rank_was_late_and_no_secret(tmp_path: Path, kind: str, backend: str) -> None:
    options, secret = ["--min_ranks=1"] * (kind == "die"), "tell-nobody-6d1f2a90"
    folder = job(tmp_path, kind, backend, *options, FASTCOLL_SECRET=secret)
    found = report(folder).splitlines()[0]
    assert [text for text in TOLD[kind] if text not in found] == [], found
    assert not [file for file in folder.iterdir() if secret in file.read_text()]


@pytest.mark.long
def test_the_first_call_over_connections_that_are_not_established(tmp_path: Path) -> None:
    """Rank 1 waits for rank 0 before the call."""
    text = (
        "import signal\nimport numpy as np\nimport fastcoll as dist\ndist.init_process_group('tcp', timeout=60)\n"
        "dist.group.WORLD.timeout = 0.5\nwhile dist.get_rank() == 0: signal.pause()\ndist.all_reduce(np.ones(4))\n"
    )
    found = report(job(tmp_path, "", "", "-n2", text=text))
    assert "waits for rank 0" in found or "which rank 0 never called" in found, found


def test_sigquit_writes_the_stacks_of_a_stuck_rank_and_others_read_its_record(tmp_path: Path) -> None:
    program, folder, port = tmp_path / "program.py", tmp_path / "traces", free_port()
    program.write_text(PROGRAM)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), "stuck", "shm"], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "FASTCOLL_TRACE_DIR": str(folder), "RANK": str(rank), "WORLD_SIZE": "2",
                 "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert ranks[1].stdout is not None
        assert ranks[1].stdout.readline().split() == ["stuck", str(ranks[1].pid)]

        def waits() -> bool:
            record = read(ranks[0].pid)
            return record is not None and record.groups[0].late == 1 and record.groups[0].waits != ()

        until(waits)
        (first,), (stuck,) = (read(rank.pid).groups for rank in ranks)
        assert signature.describe(*first.under_way.head) == "all_reduce(float32, 10 elements, op=SUM)"
        assert first.waits[0].ranks == (1,)
        assert (stuck.calls, stuck.under_way) == (3, None)
        for rank in ranks:
            rank.send_signal(signal.SIGQUIT)
        stacks = folder / f"rank-1-of-2.{os.uname().nodename}.{ranks[1].pid}.stacks"
        until(lambda: "program.py" in stacks.read_text())
        assert "most recent call first" in stacks.read_text()
        (mine,) = until(lambda: load(folder))
        assert (mine.rank, mine.reasons[0].why) == (0, "SIGQUIT")
        assert mine.program_line().startswith("<module> (program.py:")
        assert all(rank.poll() is None for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


HANDLES_SIGQUIT = """
import signal, sys
import fastcoll as dist
def quit(*_):
    if sys.stdin.readline():
        dist.dump()
signal.signal(signal.SIGQUIT, quit)
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that dumps after SIGQUIT once it has read a line, and the folder of its dumps."""
    monkeypatch.setenv("FASTCOLL_TRACE_DIR", str(tmp_path / "traces"))
    config.forget()
    command = [sys.executable, "-c", HANDLES_SIGQUIT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()
    monkeypatch.undo()
    config.forget()


def test_a_process_that_waits_for_a_core_has_more_time_to_dump(
    asked: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = itertools.count()

    def as_without_a_core(pid: int) -> list[bytes]:
        if next(looks) == 100:  # a second
            assert asked.stdin is not None
            print("go on", file=asked.stdin, flush=True)
        return [b"R", *[b"0"] * 40]

    monkeypatch.setattr(core_dump, "status_of", as_without_a_core)
    core_dump.ask([asked.pid])
    (file,) = (tmp_path / "traces").iterdir()
    assert file.name.endswith(f".{asked.pid}.json")


def test_a_process_that_could_have_dumped_and_has_not_is_not_waited_for(
    asked: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_dump, "_LONGEST_SECONDS", float("inf"))
    core_dump.ask([asked.pid])  # it waits for input
    assert not (tmp_path / "traces").exists()
    asked.kill()
    asked.wait()
    core_dump.ask([asked.pid])


def test_a_folder_of_traces_that_is_none_does_not_change_how_a_job_ends(tmp_path: Path) -> None:
    program, place = tmp_path / "fails.py", tmp_path / "file"
    program.write_text("import sys; sys.exit(3)")
    place.touch()
    words = ("-m", "fastcoll.launch", "-n", "1", program)
    done = python(*words, environ={"FASTCOLL_TRACE_DIR": str(place)})
    assert done.returncode == 3, done.stderr
    assert "cannot be run" not in done.stderr


def test_dump_writes_into_the_given_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FASTCOLL_TRACE_DIR", raising=False)
    with pytest.raises(dist.UsageError, match="give one, or set FASTCOLL_TRACE_DIR"):
        dist.dump()
    path = tmp_path / "here.json"
    assert dist.dump(path) == str(path)
    data = json.loads(path.read_text())
    assert data["record"] is None
    assert "test_dump_writes_into_the_given_folder" in data["reasons"][-1]["stacks"]
    assert oct(path.stat().st_mode)[-3:] == "600"
    with pytest.raises(dist.ResourceError, match="cannot be written"):
        dist.dump(tmp_path / "no" / "where.json")


def test_a_users_own_handler_of_sigquit_stays(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal\nimport fastcoll as dist\n"
        "signal.signal(signal.SIGQUIT, lambda *_: print('mine', flush=True))\n"
        "dist.init_process_group()\nos.kill(os.getpid(), signal.SIGQUIT)\ndist.destroy_process_group()\n"
        "os.kill(os.getpid(), signal.SIGQUIT)\n"
    )
    folder = tmp_path / "traces"
    environ = {"FASTCOLL_TRACE_DIR": str(folder)}
    done = python(program, environ=environ)
    assert (done.returncode, done.stdout) == (0, "mine\nmine\n"), done.stderr
    assert not folder.exists()
    # Without one, SIGQUIT dumps while there are groups, and ends the program as usual afterwards.
    program.write_text(program.read_text().replace("signal.signal(", "("))
    done = python(program, environ=environ)
    assert done.returncode == -signal.SIGQUIT
    (mine,) = load(folder)
    assert mine.reasons[0].why == "SIGQUIT"


def test_a_ranks_own_dump_has_precedence_over_a_later_one_by_another_rank(tmp_path: Path) -> None:
    records = [dump(rank, group(rank, DONE)).record.as_dict() for rank in range(3)]
    seen = [{"record": records[rank], "time": 70.0, "state": "T"} for rank in (1, 2)]
    for rank, others in ((0, seen), (1, [])):
        data = {"format": FORMAT, "record": records[rank], "reasons": [], "threads": {}, "time": 60.0}
        path = tmp_path / f"rank-{rank}-of-3.here.{100 + rank}.json"
        path.write_text(json.dumps({**data, "seen": others}))
    assert [(each.rank, each.seen_by) for each in load(tmp_path)] == [(0, None), (1, None), (2, 0)]


def test_unreadable_files_and_missing_files_are_reported(tmp_path: Path) -> None:
    (tmp_path / "rank-0-of-2.here.7.json").write_text("{")
    (tmp_path / "rank-1-of-2.here.8.json").write_text('{"format": 0}')
    done = trace(tmp_path, 1)
    assert re.findall(r"rank-(.)-of-2.here.*cannot be read", done.stderr) == ["0", "1"]
    assert "no rank has left a file" in done.stderr
