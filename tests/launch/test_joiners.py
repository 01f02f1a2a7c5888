"""Failed ranks are replaced by processes that join the others through the launcher's store."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from launch.launching import LIMIT, Launch, patched

from fastcoll.launch.console import Console
from fastcoll.launch.nodes import NodeShare
from fastcoll.launch.pauses import Pauses
from fastcoll.launch.supervisor import Supervisor

HEAD = f"""
import os, signal, sys, time
from fastcoll.store import TCPStore
host, port = os.environ["FASTCOLL_ELASTIC"].split(":")
store = TCPStore(host, int(port), timeout={LIMIT})
is_new = os.environ.get("FASTCOLL_JOINER") == "1"
local = os.environ["LOCAL_RANK"]
if is_new:
    print("RANK" in os.environ, "WORLD_SIZE" in os.environ, local, flush=True)
"""


@pytest.mark.long
def test_ranks_that_die_are_replaced_a_given_number_of_times(launch: Launch) -> None:
    text = """
if local == "1":
    store.set(f"ended-{store.add('ended', 1)}", "")
    os.kill(os.getpid(), signal.SIGKILL)
store.wait(["ended-3"])
"""
    done = launch(text, "--min_ranks=1", "-n3", "--max-restarts=2", "--log_dir=logs", "script.py", head=HEAD)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[new 1] False False 1", "[new 2] False False 1"]
    assert Path("logs/joiner-2.stdout").read_text() == "False False 1\n"
    failed = r"fastcoll.launch: (.*) \(pid \d+\) failed: signal SIGKILL \(9\); \d go(?:es)? on here(.*)"
    names = re.findall(failed, done.stderr)
    assert names[:2] == [("rank 1", "; joiner 1 of 2 starts"), ("joiner 1", "; joiner 2 of 2 starts in 1 s")]
    assert names[2:] in ([], [("joiner 2", "")])


def test_the_launcher_does_not_wait_for_a_joiner_when_the_others_have_ended(launch: Launch) -> None:
    """The second joiner would start in ten minutes. Rank 0 ends after the launcher has logged that."""
    text = """
if local == "1":
    sys.exit(3)
while "joiner 2 of 9" not in open("log").read():
    time.sleep(0.01)
"""
    command = patched("pauses._FIRST = pauses._MOST = 600.0")
    with Path("log").open("w+") as log:
        done = launch(
            text,
            "--min_ranks=1",
            "-n2",
            "--max-restarts=9",
            "script.py",
            head=HEAD,
            command=command,
            stderr=log,
        )
        log.seek(0)
        lines = log.read()
    assert done.returncode == 0, lines
    assert "joiner 2 of 9 starts in 600 s" in lines
    assert "joiner 3" not in lines


def test_a_joiner_that_no_rank_admits_does_not_outlive_the_job(launch: Launch) -> None:
    """The program goes on by shrink, so it admits no joiner. Rank 0 ends when the joiner waits."""
    text = f"""
import fastcoll as dist
dist.init_process_group(timeout={LIMIT})
if local == "1":
    os.kill(os.getpid(), signal.SIGKILL)
while not store.check(["elastic/waiting/1"]):
    time.sleep(0.01)
dist.shrink()
dist.destroy_process_group()
"""
    done = launch(text, "--min_ranks=1", "-n2", "--max-restarts=1", "script.py", head=HEAD)
    assert done.returncode == 0, done.stderr
    assert "JobEndedError: the job has ended before this joiner could join it" in done.stderr


def test_a_launcher_that_replaces_many_ranks_leaks_no_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pauses, "after", lambda *_: 0.0)
    monkeypatch.chdir(tmp_path)
    program = 'if [ "$LOCAL_RANK" = 1 ]; then exit 3; fi; until [ -e go ]; do sleep 0.01; done'
    job = NodeShare(("sh", "-c", program), 2, 1, 0, "127.0.0.1", 1)
    descriptors: list[int] = []

    class Watching(Console):
        def say(self, text: str, has_to_act: object = None) -> None:
            descriptors.append(len(os.listdir("/proc/self/fd")))
            if "joiner" not in text.partition("; ")[2]:
                Path("go").touch()

    supervisor = Supervisor(job, 0, console=Watching(), is_guest=True, min_ranks=1, max_restarts=20)
    assert supervisor.run() == 0
    assert len(descriptors) == 21
    assert max(descriptors) <= descriptors[0] + 4  # each process has four descriptors


TRAINS = """
import os, signal, sys, time
moment, victims = sys.argv[1], sys.argv[2].split(",")
if os.environ.get("RANK") in victims:
    if moment == "first":
        os.kill(os.getpid(), signal.SIGKILL)
    os.environ["FASTCOLL_FAILPOINT"] = f"{moment}:kill"
import fastcoll as dist
from fastcoll import elastic

@elastic.run(min_ranks=1)
def train(state):
    dist.barrier()
    state.commit()

train(elastic.State(step=0))
print(dist.get_rank(), dist.get_world_size(), flush=True)
"""


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("moment", "victims"),
    [
        ("first", "1"),
        pytest.param("start.after_rendezvous", "0,2", marks=LONG),
        pytest.param("start.after_join", "0", marks=LONG),
        pytest.param("start.after_world", "1", marks=LONG),
    ],
)
def test_a_rank_that_dies_before_all_have_met_is_replaced(launch: Launch, moment: str, victims: str) -> None:
    done = launch(TRAINS, "--min_ranks=1", "-n3", "--max-restarts=2", "script.py", moment, victims, head="")
    assert done.returncode == 0, done.stderr
    assert sorted(line.partition("] ")[2] for line in done.stdout.splitlines()) == ["0 3", "1 3", "2 3"]


@pytest.mark.long
@pytest.mark.parametrize(("moment", "n"), [("first", 2), ("start.after_join", 3)])
def test_a_death_without_a_replacement_ends_the_wait_of_all(launch: Launch, moment: str, n: int) -> None:
    done = launch(TRAINS, "--min_ranks=1", f"-n{n}", "script.py", moment, "1", head="")
    assert done.returncode == 128 + 9
    log = r"rank 1 \(pid \d+ on .*\) failed first: signal SIGKILL \(9\); the ranks had not all met, and no restart"
    assert re.search(log, done.stderr), done.stderr


def test_the_death_of_all_that_have_the_state_ends_the_job(launch: Launch) -> None:
    text = """
import os, pathlib, signal, time
import fastcoll as dist
new = pathlib.Path("new")
if "RANK" not in os.environ:
    new.touch()
    signal.pause()
with dist.world():
    while os.environ["RANK"] == "0" and not new.exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = launch(text, "--min_ranks=1", "-n2", "--max-restarts=1", "script.py", head="")
    assert done.returncode == 128 + 9
    assert "every rank that had the state has failed, so the state is lost" in done.stderr, done.stderr


@pytest.mark.parametrize("lives", [[1.0] * 9, [1.0, 1.0, 1.0, 100.0, 1.0, 1.0]])
def test_pauses(lives: list[float]) -> None:
    pauses = Pauses()
    found = [pauses.after(lived) for lived in lives]
    assert found == ([0, 1, 2, 4, 8, 16, 30, 30, 30] if len(lives) == 9 else [0, 1, 2, 0, 1, 2])
