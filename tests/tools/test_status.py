"""`status` on real jobs that hang: four ranks under the launcher, all kinds of hangs; it names the culprit."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from programs import python, until

from fastcoll.record.record import MemberRecord, Record
from fastcoll.system.processes import status_of
from fastcoll.tools import jobs_here, running
from fastcoll.tools.blame import ELSEWHERE, GONE, LEFT, Process, Rank, condition
from fastcoll.tools.printing import Printer
from fastcoll.tools.waits import state_of

BEGIN = """
import os, signal, sys, time
import numpy as np
import fastcoll as dist
dist.init_process_group(backend="auto", timeout=600)  # longer than until a hang is seen
rank = dist.get_rank()
x = np.ones(4, np.float32)
"""
SKIPPED = """
pair = dist.new_group([0, 2])
for step in range(10):
    if rank in (0, 2) and not (rank == 2 and step == 7):
        dist.all_reduce(x, group=pair)
    dist.barrier()
"""
IN_A_LOOP = """
for step in range(10):
    dist.all_reduce(x)
    while rank == 1 and step == 5:
        pass
"""
STOPPED = """
for step in range(10):
    if rank == 2 and step == 6:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.all_reduce(x)
"""
UNSENT = """
dist.barrier()
if rank == 0:
    dist.recv(x, 1)
while rank == 1:
    pass
dist.barrier()
"""
ASYNCHRONOUS = """
pair = dist.new_group([0, 1])
if rank == 0:
    work = dist.all_reduce(x, group=pair, async_op=True)
    while True:
        pass
dist.barrier()
"""
POSTED = """
dist.barrier()
if rank == 0:
    work = dist.irecv(x, 1)
    while True:
        pass
dist.barrier()
"""
ON_ITS_OWN = """
dist.barrier()
if rank == 1:
    dist.destroy_process_group()
time.sleep(1000)
"""
LIMIT = 120  # s, which only ends a hang


def status(*words: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "fastcoll", "status", *words)


def look(*words: str) -> dict:
    """Return what `status --json` prints, which runs in this process."""
    with redirect_stdout(io.StringIO()) as out:
        code = running.main(["--json", *words])
    report = json.loads(out.getvalue())
    assert code == (bool(words) and not report["jobs"] and not report["in_no_group"])
    return report


@contextmanager
def job(folder: Path, program: str) -> Iterator[Callable[[Callable], dict]]:
    """Run a program on four ranks; yield a function that waits until `look` shows their job in a given state."""
    path = folder / "hangs.py"
    path.write_text(program)
    command = [sys.executable, "-m", "fastcoll", "launch", "-n", "4", "--grace", "1", str(path)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as launcher:

        def find(so: Callable[[dict], bool]) -> dict | None:
            assert launcher.poll() is None, launcher.stderr.read()
            jobs = look("--job", str(launcher.pid))["jobs"]
            assert all(str(path) in each["command"] for each in jobs)
            return next(filter(so, jobs), None)

        try:
            yield lambda so: until(lambda: find(so), look)
        finally:
            launcher.terminate()
            for each in look()["jobs"]:
                for rank in each["ranks"] if str(path) in each["command"] else ():
                    with suppress(ProcessLookupError):  # a stopped process does not handle SIGTERM
                        os.kill(rank["pid"], signal.SIGCONT)
            launcher.communicate(timeout=LIMIT)


def has_diagnosis(found: dict) -> bool:
    """Return whether all ranks are listed and some have waited for long."""
    held = (" waited in for ", " waited for ", "wait for one another")
    texts = [diagnosis["text"] for diagnosis in found["diagnoses"]]
    return len(found["ranks"]) == 4 and texts != [] and all(any(w in text for w in held) for text in texts)


HANGS = {  # the program; the ranks of the diagnosis, texts in it, and its end
    "a skipped call": (SKIPPED, [0, 2], ["ranks 0 and 2 wait for one another"], "call 8 of group "),
    "a loop of Python, over tcp": (
        IN_A_LOOP, [1], ["rank 1 (pid ", " has not called all_reduce("], "; it runs its own code"
    ),
}  # fmt: skip


def waits_of_rank(found: dict, rank: int) -> list[dict]:
    return [wait for group in found["ranks"][rank]["groups"] for wait in group["in"]]


@contextmanager
def hangs(
    folder: Path, program: str, texts: list[str], more: str, waiting: Sequence[int] = ()
) -> Iterator[dict]:
    """Yield a job whose diagnosis has these texts, as soon as all ranks have reached the hang.

    Args:
        waiting: ranks with one wait each, which appears later if a thread of theirs compiles first.
    """
    begin = BEGIN.replace("auto", "tcp") if program in (IN_A_LOOP, POSTED) else BEGIN
    with job(folder, begin + program) as await_job:
        yield await_job(
            lambda found: (
                has_diagnosis(found)
                and more in " ".join([found["diagnoses"][0]["text"], *found["diagnoses"][0]["more"]])
                and all(text in found["diagnoses"][0]["text"] for text in texts)
                and all(len(waits_of_rank(found, rank)) == 1 for rank in waiting)
            )
        )


@pytest.mark.parametrize("hang", HANGS)
def test_the_culprit_of_a_job_that_hangs_is_named(hang, tmp_path):
    program, culprits, texts, more = HANGS[hang]
    with hangs(tmp_path, program, texts, more) as found:
        (diagnosis,) = found["diagnoses"]
        assert diagnosis["ranks"] == culprits
        assert diagnosis["next"]


def test_a_stopped_rank_is_named_to_programs_and_to_people(tmp_path):
    texts = ["rank 2 (pid ", " has not called all_reduce(", "ranks 0, 1 and 3 have waited in for "]
    with hangs(tmp_path, STOPPED, texts, "; it is stopped, by SIGSTOP") as found:
        (diagnosis,) = found["diagnoses"]
        (rank,) = (each for each in found["ranks"] if each["rank"] == 2)
        assert (diagnosis["ranks"], rank["state"]) == ([2], "stopped")
        assert f"kill -CONT {rank['pid']}" in diagnosis["next"]
        of_this = "--job", str(tmp_path / "hangs.py")  # others may run on this machine
        shown = status(*of_this).stdout
        (same,) = look(*of_this)["jobs"]
        assert look("--job", same["job"])["jobs"][0]["job"] == same["job"] == found["job"]
    lines = shown.splitlines()
    (first,) = (n for n, line in enumerate(lines) if "hangs.py" in line and line.startswith("4 ranks"))
    assert lines[first + 1].startswith("  rank 2 (pid ")
    assert "next: kill -CONT " in lines[first + 3]
    (row,) = (line.split("\t") for line in lines if line.startswith("-->"))
    assert (row[1], row[3], row[5], row[6]) == ("2", "stopped", "WORLD", "6")
    waiting = [line.split("\t") for line in lines if "\t2\tall_reduce(" in line]
    assert [row[1] for row in waiting] == ["0", "1", "3"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("program", "call", "what"),
    [
        (ASYNCHRONOUS, 1, "all_reduce(float32"),
        pytest.param(POSTED, None, "recv from ", marks=pytest.mark.long),
    ],
    ids=["a call", "a message, over tcp"],
)
def test_a_rank_that_computes_beside_an_asynchronous_operation_is_not_shown_in_it(
    program, call, what, tmp_path
):
    """Rank 1 waits for rank 0 in the barrier, and rank 0's operation for rank 1, but these are no circle."""
    texts = [
        "rank 0 (pid ",
        " has not called barrier(), call ",
        " of group WORLD, that ranks 1, 2 and 3 have",
    ]
    with hangs(tmp_path, program, texts, "; it runs its own code", [0]) as found:
        (diagnosis,) = found["diagnoses"]
        assert diagnosis["ranks"] == [0]
        (wait,) = waits_of_rank(found, 0)
        assert (wait["call"], wait["waits_for"], wait["is_waiting"]) == (call, [1], False)
        shown = status(found["job"]).stdout
    (row,) = (line.split("\t") for line in shown.splitlines() if line.startswith("-->"))
    assert row[-1].startswith(f"its own code, with an asynchronous operation under way: {what}")


@pytest.mark.long
def test_the_culprit_of_a_message_is_named_and_watching_ends_with_the_job_or_by_ctrl_c(tmp_path):
    with hangs(tmp_path, UNSENT, ["rank 1 (pid "], "; it runs its own code") as found, ExitStack() as started:
        (diagnosis,) = found["diagnoses"]
        assert diagnosis["ranks"] == [1]
        command = [sys.executable, "-u", "-m", "fastcoll", "status", "--watch", found["job"]]
        both = [
            started.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            for _ in range(2)
        ]
        for watching in both:
            reports, lines = 0, []
            while reports < 2:
                lines.append(watching.stdout.readline())
                assert lines[-1], "it has ended"
                reports += lines[-1].startswith("4 ranks, for ")
            assert "\n" in lines  # between the reports
        interrupted, lasting = both
        interrupted.send_signal(signal.SIGINT)
        assert "there is no job" not in interrupted.communicate(timeout=LIMIT)[0]
        for rank in found["ranks"]:
            with suppress(ProcessLookupError):  # the launcher ends the others after the first
                os.kill(rank["pid"], signal.SIGKILL)
        assert "there is no job" in lasting.communicate(timeout=LIMIT)[0]
        assert (interrupted.returncode, lasting.returncode) == (0, 0)


def test_several_jobs_are_listed_with_their_commands(capsys):
    jobs = [
        jobs_here.RunningJob(name, {0: Rank(Record(name, 0, 1, "here", 1, 1, 90.0, "1", ()), process)})
        for name in ("first", "second")
        for process in [Process(os.getpid(), "S", command=f"python {name}.py")]
    ]
    running._print(jobs, [], None, False, Printer())
    lines = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["job", "ranks", "for", "command"]
    assert [(row[0], row[1], row[3]) for row in lines[1:3]] == [
        ("first", "1", "python first.py"),
        ("second", "1", "python second.py"),
    ]
    running._print(jobs[:1], [], None, False, Printer())
    assert not capsys.readouterr().out.startswith("job")


@pytest.mark.long
def test_a_stopped_job_is_shown_completely_and_goes_on(tmp_path):
    """All ranks are stopped at once, so no rank waits."""
    with job(tmp_path, BEGIN + "for step in range(10**9): dist.all_reduce(x)") as await_job:
        found = await_job(lambda found: len(found["ranks"]) == 4)
        pids = [rank["pid"] for rank in found["ranks"]]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        found = await_job(lambda found: {rank["state"] for rank in found["ranks"]} == {"stopped"})
        blamed = {rank for diagnosis in found["diagnoses"] for rank in diagnosis["ranks"]}
        assert blamed == {0, 1, 2, 3}
        calls = [rank["groups"][0]["calls"] for rank in found["ranks"]]
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        await_job(lambda found: all(r["groups"][0]["calls"] > calls[n] for n, r in enumerate(found["ranks"])))


@pytest.mark.long
def test_a_rank_that_has_left_is_not_taken_for_a_dead_one(tmp_path):
    with job(tmp_path, BEGIN + ON_ITS_OWN) as await_job:
        found = await_job(lambda found: len(found["ranks"]) == 3)
        assert [(each["rank"], each["where"]) for each in found["unseen"]] == [(1, "left")]
        assert found["unseen"][0]["pid"] in [each["pid"] for each in look()["in_no_group"]]


@pytest.mark.long
def test_ranks_that_have_not_met_yet_are_listed(tmp_path):
    """Rank 3 does not join, so no rank is in a group."""
    program = "import os\nif os.environ['RANK'] == '3':\n    while True: pass\n" + BEGIN

    def joining(report: dict) -> dict[str, bool]:
        outside = [each for each in report["in_no_group"] if str(tmp_path) in each["command"]]
        return {each["rank"]: each["joining_for"] is not None for each in outside}

    with job(tmp_path, program):
        until(lambda: joining(look()) == {"0": True, "1": True, "2": True, "3": False})


@pytest.mark.long
def test_a_rank_without_a_launcher_is_listed_while_it_joins(tmp_path):
    (tmp_path / "alone.py").write_text(
        "import sys\nimport fastcoll as dist\n"
        "dist.init_process_group('tcp', f'file://{sys.argv[1]}', 60, 2, int(sys.argv[2]))\nsys.stdin.readline()\n"
    )
    command = [sys.executable, "alone.py", str(tmp_path / "meet")]

    def joins(report: dict) -> bool:
        return first.pid in [each["pid"] for each in report["in_no_group"]]

    with subprocess.Popen([*command, "1"], cwd=tmp_path, stdin=subprocess.PIPE) as first:
        until(lambda: joins(look()))
        with subprocess.Popen([*command, "0"], cwd=tmp_path, stdin=subprocess.PIPE) as other:
            until(lambda: first.pid in [rank["pid"] for job in look()["jobs"] for rank in job["ranks"]])
            assert not joins(look())
            for rank in (first, other):
                rank.stdin.close()


WITHOUT_FIRST_THREAD = """
import ctypes, sys, threading
import fastcoll as dist
dist.init_process_group("shm", f"file://{sys.argv[1]}", world_size=1, rank=0)
threading.Thread(target=sys.stdin.read).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_rank_whose_first_thread_alone_has_ended_is_shown_as_running_on(tmp_path):
    (tmp_path / "alone.py").write_text(WITHOUT_FIRST_THREAD)
    command = [sys.executable, "alone.py", str(tmp_path / "meet")]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        try:
            assert rank.stdout.readline() == b"up\n"
            until(lambda: status_of(rank.pid)[0] == b"Z")
            jobs = jobs_here.find_jobs()[0]
            ((job, process),) = ((job, p) for job in jobs for p in job.processes if p.pid == rank.pid)
            assert state_of(process.state).name == "sleeping"
            assert "alone.py" in process.command
            assert job.diagnoses(time.time()) == []
        finally:
            rank.kill()


def test_a_job_is_found_by_any_word_of_a_long_command_line(tmp_path):
    (tmp_path / "alone.py").write_text(
        "import sys\nimport fastcoll as dist\nwith dist.world(world_size=1, rank=0):\n"
        "    print('up', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "alone.py", "long" * 50, str(tmp_path / "the_last_word.yaml")]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as rank:
        assert rank.stdout.readline() == b"up\n"
        for word in (command[-1], "the_last_word.yaml"):
            ((found,),) = (each["ranks"] for each in look(word)["jobs"])
            assert found["pid"] == rank.pid
        rank.stdin.close()


def test_without_a_job_nothing_is_found():
    """This process is no rank, but it may be the ancestor of ranks that other tests have started."""
    assert [job for job in look()["jobs"] if os.getpid() in [rank["pid"] for rank in job["ranks"]]] == []
    assert look("--job", "none-of-that-name")["jobs"] == []


@pytest.mark.parametrize("first", ["systemd", "python -m fastcoll.launch train.py"])
def test_a_launcher_may_be_the_first_process_of_a_container(first, monkeypatch):
    environs = {7: {b"FASTCOLL_LAUNCHERS": b"host:1"}, 1: {b"HOME": b"/root"}}
    monkeypatch.setattr(jobs_here, "status_of", lambda pid: (b"S", {7: 1, 1: 0}[pid]))
    monkeypatch.setattr(jobs_here, "_environ", environs.__getitem__)
    monkeypatch.setattr(jobs_here, "_words", lambda pid: first.split() if pid == 1 else ["train.py"])
    assert jobs_here.launchers_of(7) == ("host:1", environs[1])
    assert jobs_here._named("1")(SimpleNamespace(pid=7)) is ("fastcoll" in first)
    assert jobs_here._named("7")(SimpleNamespace(pid=7))


def test_the_cure_depends_on_whether_a_process_writes_its_stacks():
    before = signal.getsignal(signal.SIGQUIT)
    try:
        for handler, cure in ((signal.SIG_DFL, "py-spy dump --pid"), (lambda *_: None, "kill -QUIT")):
            signal.signal(signal.SIGQUIT, handler)
            (found,) = jobs_here.processes([os.getpid()])
            assert condition(found)[1].startswith(f"{cure} {os.getpid()} ")
    finally:
        signal.signal(signal.SIGQUIT, before)


@pytest.mark.parametrize(("seen_as", "where"), [(os.getpid(), LEFT), (1, GONE)], ids=["own", "another"])
def test_a_process_id_of_another_namespace_is_not_looked_up(seen_as, where):
    """The rank's own process has another pid in its namespace than here."""
    record = Record("job", 0, 2, "here", seen_as, 1, 0.0, "1", ())
    job = jobs_here.RunningJob("job", {0: Rank(record, Process(os.getpid(), "S"))})
    assert job.whereabouts(MemberRecord(1, "here", os.getpid())) == where
    assert job.whereabouts(MemberRecord(1, "there", os.getpid())) == ELSEWHERE
