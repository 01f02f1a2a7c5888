"""Profiles: the log of a process, how logs are merged over ranks, `fastcoll.profile()`, and the command."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from programs import LIMIT, python, until

import fastcoll as dist
from fastcoll.core import signature
from fastcoll.core.work import Work
from fastcoll.profiling import command
from fastcoll.profiling.merging import Profile, ProfileEntry, RankLog, merge
from fastcoll.profiling.report import text_of
from fastcoll.record import call_log as log
from fastcoll.record.call_log import CallLog, add_sums, kept, sums
from fastcoll.record.record import RING, read

REDUCE = signature.encode("all_reduce", np.dtype(np.float32), op=dist.ReduceOp.SUM)
BROADCAST = signature.encode("broadcast", np.dtype(np.float32))
MS = 1_000_000

# ---- the log ---------------------------------------------------------------------------------------------


def test_a_full_log_keeps_counts_bytes_and_times_exact():
    written = CallLog({}, most=256)
    for number in range(1, 5001):
        written.add(1, log.SYNC, number, REDUCE, 64, 1000, 1000 + number, -1)
    about, rows = written.content()
    assert len(rows) <= 256
    assert about["level"] > 0
    totals = {tuple(each[:4]): each[4:] for each in about["removed"]}
    add_sums(totals, sums(rows))
    (found,) = totals.values()
    assert found == [5000, 5000 * 64, 5000 * 5001 // 2, 5000]


def test_a_log_on_a_full_disk_is_thinned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def allocate(fd: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > 512 * 64:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocated(fd, offset, nbytes)

    allocated = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", allocate)
    monkeypatch.setattr(log, "_ROOM_STEP", 256)
    written = CallLog({}, str(tmp_path / "rank-0"), most=1024)
    for number in range(1, 2001):
        written.add(1, log.SYNC, number, REDUCE, 64, 1000, 1000 + number, -1)
    written.end()
    assert [record.message for record in caplog.records] == [
        "the profile of this rank has room for 512 calls: [Errno 28] No space left on device"
    ]
    about, rows = log.load(str(tmp_path / "rank-0"))
    assert len(rows) <= 512
    assert sum(each[4] for each in about["removed"]) + len(rows) == 2000


def test_a_log_without_any_room_is_refused_and_leaves_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "full")))
    with pytest.raises(OSError, match="full"):
        CallLog({}, str(tmp_path / "rank-0"))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_log_has_no_rows_of_an_earlier_process_with_its_name(tmp_path: Path):
    for number in (3, 1):
        written = CallLog({}, str(tmp_path / "rank-0"))
        for each in range(1, number + 1):
            written.add(1, log.SYNC, each, REDUCE, 64, 10, 20, -1)
        written.end()
    _, rows = log.load(str(tmp_path / "rank-0"))
    assert rows[:, log.NUMBER].tolist() == [1]


def test_ranks_with_logs_of_any_length_keep_the_same_calls():
    numbers = np.zeros((1000, log.WORDS), np.int64)
    numbers[:, log.NUMBER] = np.arange(1, 1001)
    coarse, fine = kept(numbers, 3), kept(numbers, 1)
    assert 100 < coarse.sum() < 150
    assert 450 < fine.sum() < 550
    assert not (coarse & ~fine).any()


def test_a_log_in_a_file_is_read_though_its_process_never_ended_it(tmp_path: Path):
    written = CallLog({"rank": 2}, str(tmp_path / "rank-2"))
    written.add_group("WORLD", [0, 1, 2], 2)
    written.add(1, log.SYNC, 1, REDUCE, 64, 10, 20, -1)
    about, rows = log.load(str(tmp_path / "rank-2"))
    assert (about["rank"], about["ended"], about["groups"][0]["rank"]) == (2, 0, 2)
    assert rows.tolist() == [[1, log.SYNC, 1, REDUCE, 64, 10, 20, -1]]


def test_a_log_whose_folder_is_removed_ends_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "profile"
    folder.mkdir()
    written = CallLog({"rank": 2}, str(folder / "rank-2"))
    shutil.rmtree(folder)
    written.end()
    (record,) = caplog.records
    assert (
        f"the profile of this rank is incomplete: [Errno 2] No such file or directory: '{folder}"
        in record.message
    )


# ---- merging ---------------------------------------------------------------------------------------------


def rank_log(
    rank: int, rows: list[tuple[int, ...]], size: int = 2, ended: int = 1000 * MS, **more: object
) -> RankLog:
    groups = [{"name": "WORLD", "ranks": list(range(size)), "rank": rank}]
    about = {
        "rank": rank,
        "world_size": size,
        "host": "vm",
        "pid": 7 + rank,
        "machine": "one",
        "began": 1,
        "epoch": 0,
    }
    about |= {"level": 0, "dropped": 0, "removed": [], "groups": groups, "ended": ended}
    return RankLog(about | more, np.array(rows, np.int64).reshape(-1, log.WORDS))


def call(number: int, began: int, ended: int, word: int = REDUCE, flavour: int = log.SYNC) -> tuple[int, ...]:
    return 1, flavour, number, word, 4096, began * MS, ended * MS, -1


def message(
    flavour: int, number: int, peer: int, began: int, ended: int, nbytes: int = 64
) -> tuple[int, ...]:
    return 1, flavour, number, 3, nbytes, began * MS, ended * MS, peer


def only(profile: Profile, operation: str) -> ProfileEntry:
    (found,) = [entry for entry in profile.entries if entry.operation == operation]
    return found


def test_a_rank_waits_until_the_last_one_enters_the_call():
    first = rank_log(0, [call(1, 10, 22), call(2, 30, 35)])
    second = rank_log(1, [call(1, 20, 23), call(2, 30, 36)])
    found = merge([first, second])
    entry = only(found, "all_reduce")
    assert (entry.calls, entry.nbytes) == ({0: 2, 1: 2}, {0: 8192, 1: 8192})
    assert (entry.waits, entry.awaited) == (pytest.approx({0: 0.010, 1: 0.0}), pytest.approx({1: 0.010}))
    assert (entry.p50_us, entry.spread_us) == (5500, 5000)
    assert found.waits == pytest.approx({(0, 1): 0.010})
    transfer = [each.transfer for each in found.ranks]
    assert (transfer, found.ranks[1].awaited) == (pytest.approx([0.007, 0.009]), pytest.approx(0.010))
    assert found.share(entry) == pytest.approx(0.026 / 2, rel=1e-3)
    assert "100% of the waiting was for rank 1" in text_of(found)


def test_a_root_that_leaves_before_the_others_enter_has_not_waited():
    root = rank_log(0, [call(1, 10, 12, BROADCAST)])
    late = rank_log(1, [call(1, 30, 31, BROADCAST)])
    assert only(merge([root, late]), "broadcast").waits == {0: 0.0, 1: 0.0}


def test_calls_that_some_rank_lacks_are_counted_and_not_divided():
    entry = only(
        merge([rank_log(0, [call(1, 10, 22), call(2, 30, 35)]), rank_log(1, [call(1, 20, 23)])]), "all_reduce"
    )
    assert entry.calls == {0: 2, 1: 1}
    assert entry.waits == pytest.approx({0: 0.010, 1: 0.0})
    assert entry.attributed == pytest.approx(15 / 20)


def test_a_receiver_waits_for_the_sender():
    sender = rank_log(0, [message(log.SEND, 1, 1, 20, 21), message(log.ISEND, 2, 1, 40, 41)])
    receiver = rank_log(1, [message(log.RECV, 1, 0, 5, 22), message(log.RECV, 2, 0, 30, 42)])
    found = merge([sender, receiver])
    assert only(found, "recv").waits == pytest.approx({1: 0.025})
    assert only(found, "send").waits == pytest.approx({0: 0.0})
    assert found.waits == pytest.approx({(1, 0): 0.025})
    assert not only(found, "isend").blocks


def test_messages_whose_ends_do_not_match_are_not_divided():
    sender = rank_log(0, [message(log.SEND, 1, 1, 20, 21, nbytes=128)])
    receiver = rank_log(1, [message(log.RECV, 1, 0, 5, 22)])
    assert only(merge([sender, receiver]), "recv").attributed == 0.0


def test_clocks_of_machines_are_shifted_to_what_the_calls_prove():
    """The second machine's clock is 500 ms ahead, and its time of day 3 ms."""
    here = rank_log(0, [call(1, 10, 21), call(2, 40, 42), call(3, 50, 71)])
    there = [call(1, 520, 521), call(2, 541, 542), call(3, 570, 571)]
    found = merge([here, rank_log(1, there, ended=1500 * MS, machine="two", epoch=-497 * MS, host="b")])
    assert found.skew_us == 1500  # the calls prove that the shift is from -502 to -499 ms
    assert only(found, "all_reduce").waits[0] == pytest.approx(0.0295)
    apart = merge([here, rank_log(1, [], machine="two", host="b")])
    assert "the time of day only" in text_of(apart)


def test_what_a_profile_lacks_is_said():
    removed = [[1, log.SYNC, REDUCE & log.KIND, 12, 30, 30 * 4096, 60 * MS, 30]]
    text = text_of(
        merge([rank_log(0, [call(4, 10, 12)], size=3, ended=0, level=3, dropped=5, removed=removed)])
    )
    for sentence in (
        "no profile of ranks 1, 2", "until their last call: ranks 0", "5 calls of compiled code",
        "percentiles are of one call in 8",
    ):  # fmt: skip
        assert sentence in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("all_reduce")]
    assert row[:6] == ["all_reduce", "<=", "4", "KiB", "31", "124"]


# ---- fastcoll.profile() ----------------------------------------------------------------------------------


@pytest.mark.ranks(2)
def test_a_block_counts_every_call_and_finds_the_late_rank():
    rank, x = dist.get_rank(), np.ones(1000, np.float32)
    world = dist.group.WORLD
    plain = world.fast.all_reduce
    pids = np.zeros(2, np.int64)
    dist.all_gather_single(pids, np.array([os.getpid()]))
    with dist.profile() as profile:
        assert world.fast.all_reduce is not plain
        for _ in range(5):
            dist.all_reduce(x)
        if rank == 1:  # until rank 0 is in the barrier
            until(lambda: read(int(pids[0])).groups[0].calls > read(os.getpid()).groups[0].calls)
        dist.barrier()
        dist.all_reduce(x, async_op=True).wait()
        pair = dist.new_group([0, 1])
        dist.broadcast(x, 0, group=pair)
        dist.send(x, 1, tag=4) if rank == 0 else dist.recv(x, 0, tag=4)
        (dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0)).wait()
    assert world.fast.all_reduce is plain
    dist.all_reduce(x)  # is not in the profile
    found = profile.merged().as_dict()
    entries = {entry["operation"]: entry for entry in found["entries"] if entry["calls"]}
    calls = {operation: entry["calls"] for operation, entry in entries.items()}
    assert calls["all_reduce"] == {0: 5, 1: 5}
    assert calls["barrier"] == calls["wait for all_reduce"] == {0: 1, 1: 1}
    assert calls["broadcast"] == {0: 1, 1: 1}
    assert (calls["send"], calls["recv"], calls["isend"], calls["irecv"]) == ({0: 1}, {1: 1}, {0: 1}, {1: 1})
    assert entries["all_reduce"]["nbytes"] == {0: 20000, 1: 20000}
    assert entries["broadcast"]["group"] != "WORLD"
    assert entries["barrier"]["waits"][0] > 0
    assert entries["barrier"]["awaited"].keys() == {1}
    assert [each["is_complete"] for each in found["ranks"]] == [True, True]
    assert "barrier" in str(profile.own())


@pytest.mark.ranks(2)
def test_calls_that_python_does_not_make_are_counted_or_reported():
    x = np.ones(4, np.float32)
    plain, many = dist.group.WORLD.fast.all_reduce, 2 * RING
    with dist.profile() as profile:
        dist.barrier()
        for _ in range(many):
            plain(x)
        dist.barrier()
    found = profile.merged().as_dict()
    (beside,) = [entry for entry in found["entries"] if entry["operation"] == "all_reduce (beside)"]
    assert sum(beside["calls"].values()) + found["dropped"] == 2 * many
    assert beside["calls"][0] >= RING - 2
    assert f"{found['dropped']} calls of compiled code" in str(profile.merged())


@pytest.mark.ranks(1)
def test_works_are_waited_for_by_the_plain_method_when_no_profile_is_on():
    before = Work.wait
    with dist.profile() as outer:
        dist.barrier()
        with dist.profile() as inner:
            assert Work.wait is not before
            dist.barrier()
        dist.barrier()
        assert Work.wait is not before
    assert Work.wait is before
    counts = [each.own().as_dict()["entries"][0]["calls"][0] for each in (outer, inner)]
    assert counts == [3, 1]


def test_a_report_is_refused_while_the_block_runs():
    with dist.profile() as profile, pytest.raises(dist.UsageError, match="until its `with` block ends"):
        profile.own()
    assert "0 calls a rank" in str(profile.own())


# ---- the command -----------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
import numpy as np
import fastcoll as dist

dist.init_process_group()
x = np.ones(1000)
for _ in range(7):
    dist.all_reduce(x)
print("ready", flush=True)
{then}
"""


def profiled(
    tmp_path: Path, then: str, *options: str
) -> tuple[subprocess.CompletedProcess[str], dict[str, dict]]:
    """Profile two ranks of PROGRAM; return the end of the command, and the JSON's entries by operation."""
    (tmp_path / "train.py").write_text(PROGRAM.format(then=then))
    words = [
        "profile",
        "--json",
        tmp_path / "out.json",
        *options,
        "--",
        sys.executable,
        "-m",
        "fastcoll.launch",
    ]
    done = python("-m", "fastcoll", *words, "-n", "2", tmp_path / "train.py")
    entries = json.loads((tmp_path / "out.json").read_text())["entries"]
    return done, {entry["operation"]: entry for entry in entries}


def test_the_command_shows_the_profile_and_leaves_the_output_alone(tmp_path: Path):
    done, entries = profiled(tmp_path, "dist.destroy_process_group()", "--html", str(tmp_path / "out.html"))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["[0] ready", "[1] ready"])
    assert entries["all_reduce"]["calls"] == {"0": 7, "1": 7}
    assert "fastcoll profile: 2 ranks on" in done.stderr
    page = (tmp_path / "out.html").read_text()
    assert "<script src" not in page
    assert page.count("Plotly.newPlot(") >= 4


def test_a_killed_rank_and_the_ranks_that_it_fails_are_shown(tmp_path: Path):
    then = "if dist.get_rank():\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()"
    done, entries = profiled(tmp_path, then)
    assert entries["all_reduce"]["calls"] == {"0": 7, "1": 7}
    assert re.search("until their last call: ranks (0, )?1", done.stderr)
    assert done.returncode == 128 + signal.SIGKILL


def test_after_an_exception_the_exit_code_is_the_programs(tmp_path: Path):
    done, entries = profiled(tmp_path, "sys.exit(5)")
    assert entries["all_reduce"]["calls"] == {"0": 7, "1": 7}
    assert done.returncode == 5


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_signals_of_the_terminal_end_the_program_and_then_the_profile_is_shown(
    number: signal.Signals, tmp_path: Path
):
    (tmp_path / "train.py").write_text(PROGRAM.format(then="dist.barrier()\nsignal.pause()"))
    words = [sys.executable, "-m", "fastcoll", "profile", "--", sys.executable, str(tmp_path / "train.py")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(words, **pipes) as started:
        assert started.stdout.readline() == "ready\n"
        os.killpg(started.pid, number)
        _, errors = started.communicate(timeout=LIMIT)
    assert started.returncode == 128 + number
    assert "fastcoll profile: 1 rank on" in errors


def test_a_signal_that_is_ignored_stays_ignored():
    """As SIGHUP is under nohup."""
    print_them = "import signal; print([signal.getsignal(n) == signal.SIG_IGN for n in (1, 2, 3, 15)])"
    ignore = "import os, signal, sys; signal.signal(1, signal.SIG_IGN); signal.signal(3, signal.SIG_IGN); "
    ignore += "os.execv(sys.argv[1], sys.argv[1:])"
    words = (sys.executable, "-m", "fastcoll", "profile", "--", sys.executable, "-c", print_them)
    done = python("-c", ignore, *words)
    assert done.stdout == "[True, False, True, False]\n", done.stderr


def test_a_log_that_was_there_before_counts_only_if_it_was_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """In a container, the processes of two runs may have the same names."""
    monkeypatch.setattr(command, "merge", lambda logs: [each.rank for each in logs])
    path = tmp_path / f"rank-0.vm.5{log.SUFFIX}"

    def write() -> None:
        written = CallLog({"rank": 0, "began": 0, "epoch": 0}, str(tmp_path / "rank-0.vm.5"))
        written.add_group("WORLD", [0], 0)
        written.add(1, log.SYNC, 1, REDUCE, 64, 10, 20, -1)
        written.end()

    write()
    before = {path.name: command._identity(path)}
    assert command.read(tmp_path, before) is None
    path.unlink()
    write()
    assert command.read(tmp_path, before) == [0]


def test_a_program_that_makes_no_group_or_does_not_exist(tmp_path: Path):
    done = python("-m", "fastcoll", "profile", "--", sys.executable, "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert "no process made a group" in done.stderr
    done = python("-m", "fastcoll", "profile", "--", tmp_path / "nothing")
    assert (done.returncode, "cannot be run: No such file" in done.stderr) == (127, True)


@pytest.mark.parametrize("option", ["--html", "--json"])
def test_a_file_that_cannot_be_written_is_named_before_the_program_runs(tmp_path: Path, option: str):
    out, ran = tmp_path / "missing" / "out", tmp_path / "ran"
    done = python("-m", "fastcoll", "profile", option, out, "--", "touch", ran)
    assert (done.returncode, done.stderr) == (
        2, f"fastcoll profile: {out} cannot be written: there is no folder {out.parent}\n"
    )  # fmt: skip
    assert not ran.exists()


def test_a_folder_that_cannot_be_used_is_named_before_the_program_runs(tmp_path: Path, capsys):
    (tmp_path / "file").touch()
    for folder, said in (
        (tmp_path / "file", f"File exists: '{tmp_path / 'file'}'"),
        (Path("/proc"), "/.profile.json cannot be written"),
    ):
        assert command.main(["--folder", str(folder), "--", "touch", str(tmp_path / "ran")]) == 2
        assert said in capsys.readouterr().err
    assert not (tmp_path / "ran").exists()
