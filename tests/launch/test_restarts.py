"""The launcher in jobs with generations, on one host: each test starts launchers on a small script."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import pytest
from launch.launching import LIMIT, Script, Starter, end, has_ended, next_line, patched, until, wait_for

from fastcoll import config
from fastcoll.errors import StoreTimeoutError
from fastcoll.launch.console import Console
from fastcoll.launch.failures import Failure
from fastcoll.launch.gathering import Gathering
from fastcoll.launch.generations import End, Node, Order, Over, Rules, Start
from fastcoll.launch.nodes import NodeShare, free_port
from fastcoll.launch.options import read
from fastcoll.launch.restarts import Restarts
from fastcoll.launch.supervisor import Supervisor
from fastcoll.store import HashStore

# Launchers with short intervals, and a grace that is long enough for a loaded machine.
PROMPT = ["--monitor-interval=0.02", "--grace=60"]
STAY = "here(os.environ['WORLD_SIZE'])\nstay()"


@pytest.fixture(autouse=True)
def settings(script: Script, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set a secret for this test, and variables that keep launchers from logging."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FASTCOLL_SECRET", "of this test")
    config.forget()
    yield
    monkeypatch.undo()
    config.forget()


@pytest.fixture
def start(start: Starter) -> Starter:
    """Start launchers with the options that all tests here share."""
    return lambda *options, **more: start(*PROMPT, *options, **more)


def c10d(port: int, nodes: str = "1:2", *more: str) -> list[str]:
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=0"]
    return [f"--nnodes={nodes}", *where, *more]


def test_a_failed_rank_restarts_all(script: Script, start: Starter) -> None:
    script(
        "import json\nos.write(1, (json.dumps(dict(os.environ)) + '\\n').encode())\n"
        "if rank == 1 and restarts == 0: sys.exit(3)\nif restarts == 0: time.sleep(600)"
    )
    code, out, err = end(start("-n2", "--max-restarts=2", "--role=trainer", "--rdzv-id=me", "--log-dir=logs"))
    assert code == 0, err
    lines = [json.loads(line.partition(" ")[2]) for line in out.splitlines()]
    first, second = ([each for each in lines if each["TORCHELASTIC_RESTART_COUNT"] == str(n)] for n in (0, 1))
    assert sorted(each["RANK"] for each in second) == ["0", "1"]
    expected = dict(
        ROLE_NAME="trainer", ROLE_WORLD_SIZE="2", WORLD_SIZE="2", GROUP_RANK="0", GROUP_WORLD_SIZE="1",
        TORCHELASTIC_RUN_ID="me", TORCHELASTIC_MAX_RESTARTS="2", TORCHELASTIC_USE_AGENT_STORE="False",
    )  # fmt: skip
    for each in lines:
        assert expected.items() <= each.items()
        assert each["ROLE_RANK"] == each["LOCAL_RANK"] == each["RANK"]
        assert each["TORCHELASTIC_ERROR_FILE"]
    for name in ("FASTCOLL_SECRET", "MASTER_PORT"):
        assert len({each[name] for each in second}) == 1
        assert second[0][name] != first[0][name], name
    assert Path("logs/generation-1/rank-1.stdout").read_text().startswith("{")
    assert "generation 1 starts: 2 ranks on 1 node, 1 of 2 restarts used" in err


@pytest.mark.parametrize("when", ["running", "pausing"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_ranks_run_and_in_a_pause(
    script: Script, start: Starter, when: str, number: signal.Signals
) -> None:
    """The pause after the second quick failure is ten minutes here."""
    script("here(restarts)\nif sys.argv[1] == 'pausing': sys.exit(1)\ntime.sleep(600)")
    command = patched("pauses._FIRST = pauses._MOST = 600.0")
    process = start("--max-restarts=9", "script.py", program=when, command=command)
    for restarts in range(2 if when == "pausing" else 1):
        _, pid, count = next_line(process)
        assert count == str(restarts)
    assert when == "running" or has_ended(pid)
    process.send_signal(number)
    assert end(process)[0] == 128 + number
    assert has_ended(pid)


@pytest.mark.long
def test_a_signal_while_the_log_of_a_restart_is_not_read(script: Script) -> None:
    """stderr is a full pipe. The launcher makes the folder just before it logs the restart."""
    script("if restarts == 0: sys.exit(1)\ntime.sleep(600)")
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with ExitStack() as stack:
        stack.callback(os.close, unread)
        stack.callback(os.close, full)
        while select.select([], [full], [], 0)[1]:
            os.write(full, bytes(select.PIPE_BUF))
        os.set_blocking(full, True)
        command = [*patched(), *PROMPT, "--max-restarts=1", "--log-dir=logs", "script.py"]
        process = stack.enter_context(subprocess.Popen(command, stderr=full))
        stack.callback(process.kill)
        wait_for("logs/generation-1")
        process.terminate()
        assert process.wait(LIMIT) == 128 + signal.SIGTERM


@pytest.mark.long
def test_nodes_join_and_leave(script: Script, start: Starter) -> None:
    script(STAY)
    options = c10d(free_port())
    first = start(*options, "-n2")
    before = [next_line(first) for _ in range(2)]
    assert [size for _, _, size in before] == ["2", "2"]
    second = start(*options)
    sizes = [next_line(node)[2] for node in (first, first, second)]
    assert sizes == ["3", "3", "3"]
    assert all(has_ended(pid) for _, pid, _ in before)
    second.send_signal(signal.SIGTERM)
    code, _, err = end(second)
    assert code == 128 + signal.SIGTERM, err
    assert [next_line(first)[2] for _ in range(2)] == ["2", "2"]
    third = start(*options)
    assert [next_line(node)[2] for node in (first, first, third)] == ["3", "3", "3"]
    third.kill()
    assert [next_line(first)[2] for _ in range(2)] == ["2", "2"]
    Path("go").touch()
    code, _, err = end(first)
    assert code == 0, err
    assert "generation 4 starts: 2 ranks on 1 node, 0 of 0 restarts used" in err
    assert "ended unexpectedly, or is unreachable: the ranks restart without its own" in err


def test_a_failure_on_one_of_the_nodes_with_numbers_restarts_both(script: Script, start: Starter) -> None:
    script(
        "here(rank, restarts)\nopen(f'here-{rank}', 'w')\nif restarts < 1: stay('here-0')\n"
        "if rank == 1 and restarts < 1: sys.exit(5)\nif restarts < 1: stay()"
    )
    options = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}", "--max-restarts=1"]
    both = [start(*options, f"--node_rank={node}") for node in (1, 0)]
    ends = [end(node) for node in both]
    assert [code for code, _, _ in ends] == [0, 0], ends
    lines = [[line.split()[3:] for line in out.splitlines()] for _, out, _ in ends]
    assert lines == [[["1", "0"], ["1", "1"]], [["0", "0"], ["0", "1"]]]
    failed = r"fastcoll.launch: (on another node )?rank 1 \(pid \d+ on .*\) failed first: exit code 5"
    assert [re.findall(failed, err) for _, _, err in ends] == [[""], ["on another node "]]


def test_the_end_of_the_launcher_that_leads_ends_the_others(script: Script, start: Starter) -> None:
    script(STAY)
    options = c10d(free_port(), "2")
    leader, other = (start(*options, f"--rdzv-conf=is_host={leads}") for leads in (1, 0))
    pids = [next_line(node)[1] for node in (leader, other)]
    leader.kill()
    code, _, err = end(other)
    assert code == 1
    assert "the launcher that leads the job ended unexpectedly, or is unreachable" in err
    assert all(map(has_ended, pids))


def test_a_job_with_another_name_or_other_options_is_refused(script: Script, start: Starter) -> None:
    script(STAY)
    port = free_port()
    first = start(*c10d(port), "--rdzv-id=one")
    next_line(first)
    code, _, err = end(start(*c10d(port), "--rdzv-id=two"))
    assert code == 1
    assert "another job is led there" in err
    differ = "it has --rdzv-id one --nnodes 1:2 --max-restarts 0 .*this launcher has --rdzv-id two"
    assert re.search(differ, err)
    Path("go").touch()
    assert end(first)[0] == 0


def test_of_two_jobs_with_one_name_the_second_waits(script: Script, start: Starter) -> None:
    script(STAY)
    options = c10d(free_port(), "1")
    first = start(*options)
    next_line(first)
    second = start(*options)
    assert second.stderr is not None
    waits = "fastcoll.launch: generation 0 runs without this node, which waits for room\n"
    assert second.stderr.readline() == waits
    Path("go").touch()
    assert [end(process) for process in (first, second)] == [(0, "", "")] * 2


def test_a_leader_that_was_stopped_reads_the_events_sent_meanwhile(script: Script, start: Starter) -> None:
    script("here(restarts)\nif sys.argv[1] == 'other' and restarts < 1: stay('fail'); sys.exit(5)\nstay()")
    options = c10d(free_port(), "2", "--max-restarts=1")
    leader = start(*options, "--rdzv-conf=is_host=1", "script.py", program="leader")
    other = start(*options, "--rdzv-conf=is_host=0", "script.py", program="other")
    assert [next_line(node)[2] for node in (leader, other)] == ["0", "0"]
    leader.send_signal(signal.SIGSTOP)
    Path("fail").touch()
    assert other.stderr is not None
    assert "failed first: exit code 5" in other.stderr.readline()
    leader.send_signal(signal.SIGCONT)
    assert [next_line(node)[2] for node in (leader, other)] == ["1", "1"]
    Path("go").touch()
    assert [end(node)[0] for node in (leader, other)] == [0, 0]


def test_ranks_that_the_system_cannot_start_count_as_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """The system refuses to start a process or to open a descriptor."""

    def refuse(*_: object, **others: object) -> Supervisor:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    node = Node("key", "host", 1, "default", "127.0.0.1", 0)
    rules = Rules(1, 1, max_restarts=1, last_call=0.0, join=60.0, end=5.0, fixed=True)
    variables = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "1"}
    job = NodeShare(("program",), 1, 1, 0, "127.0.0.1", 1234, variables=variables)
    with Gathering(HashStore(), node, lambda: 1234, rules, leads=True, tick=0.01) as gathering:
        assert Restarts(gathering, job, refuse, None, Console(), 0.01).run() == 1
    assert capfd.readouterr().err.count("cannot be run: Resource temporarily unavailable") == 2


def test_a_log_directory_that_is_gone_is_named(script: Script, start: Starter) -> None:
    script("import shutil; shutil.rmtree('logs'); sys.exit(3)")
    code, _, err = end(start("--max-restarts=1", "--log_dir=logs"))
    assert code == 1
    assert "cannot be run: No such file or directory: logs/generation-1\n" in err
    assert "Traceback" not in err


class Unconfirmed(HashStore):
    """A store that stores the first event but does not confirm it in time, so the event is sent again."""

    confirms = False

    def queue_push(self, key: str, value: str) -> None:
        super().queue_push(key, value)
        if not self.confirms:
            self.confirms = True
            raise StoreTimeoutError("the leader is stopped")


def next_order(gathering: Gathering) -> Order:
    orders: list[Order | None] = []
    until(lambda: orders.append(gathering.take()) or orders[-1])
    assert orders[-1] is not None
    return orders[-1]


def test_an_event_sent_twice_is_applied_once() -> None:
    """Otherwise a launcher that runs its ranks would count as ready, with its old port."""
    node = Node("key", "host", 1, "default", "127.0.0.1", 0)
    rules = Rules(1, 1, max_restarts=1, last_call=0.0, join=LIMIT, end=LIMIT, fixed=True)
    ports = count(1)
    with Gathering(Unconfirmed(), node, lambda: next(ports), rules, leads=True, tick=0.01) as gathering:
        for generation in (0, 1):
            gathering.ready()
            start = next_order(gathering)
            assert isinstance(start, Start)
            assert (start.generation, start.members[0].port) == (generation, generation + 1)
            gathering.failed(generation, Failure(3, "rank 0 failed"))
            assert isinstance(next_order(gathering), Over if generation else End)


def test_output_goes_where_it_is_sent(script: Script, start: Starter) -> None:
    script("sys.stdout.write('out\\n'); sys.stderr.write('err\\nno line end')")
    options = ["-n3", "--log-dir=new/logs", "--redirects=0:1,1:3", "--tee=2:2", "--local-ranks-filter=0,1,2"]
    code, out, err = end(start(*options))
    assert code == 0
    lines = [f"[{rank}] {line}" for rank in (0, 2) for line in ("err", "no line end")]
    assert (out, sorted(err.splitlines())) == ("[2] out\n", lines)
    files = sorted(path.name for path in Path("new/logs").iterdir())
    assert files == ["rank-0.stdout", "rank-1.stderr", "rank-1.stdout", "rank-2.stderr"]
    assert Path("new/logs/rank-1.stderr").read_text() == "err\nno line end"
    code, out, err = end(start("--redirects=3"))
    [folder] = re.findall(r"output that goes to files is in (.*)", err)
    assert (out, Path(folder, "rank-0.stdout").read_text()) == ("", "out\n")


def test_tracebacks_of_all_failed_ranks_are_shown_the_cause_first(script: Script, start: Starter) -> None:
    """Tracebacks are in the files of torch's `record`, or on stderr."""
    script(
        "import json\nfrom fastcoll.errors import PeerDiedError\nif rank == 0: stay('gone'); time.sleep(600)\n"
        "if rank == 1:\n"
        "    open('part', 'w').write(str(os.getpid())); os.rename('part', 'gone')\n"
        "    raise PeerDiedError('rank 2 is gone')\n"
        "stay('gone')\nwait_for_end(open('gone').read())\n"
        "error = {'message': {'message': 'x', 'extraInfo': {'py_callstack': 'in line 7', 'timestamp': '1'}}}\n"
        "json.dump(error, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\nos._exit(4)"
    )
    command = patched("supervisor.CAUSE_SECONDS = 100")  # rank 2 may get no core for a second
    code, _, err = end(start("-n3", command=command))
    assert code == 4
    lines = [line for line in err.splitlines() if not line.startswith("[")]
    assert re.match(r"fastcoll.launch: rank 2 \(.*\) failed first: exit code 4; its last lines", lines[0])
    assert lines[1] == "    in line 7"
    assert re.match(r"fastcoll.launch: rank 1 \(.*\) failed, too: exit code 1; its last lines", lines[2])
    assert lines[-1] == "    fastcoll.errors.PeerDiedError: rank 2 is gone"


def test_torchruns_variables_are_defaults(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    script("")
    given = "NNODES=2:4 RDZV_BACKEND=c10d RDZV_ENDPOINT=[::1] SHUTDOWN_TIMEOUT=7"
    for name, value in (each.split("=") for each in given.split()):
        monkeypatch.setenv(f"PET_{name}", value)
    options, job = read(["--max-restarts", "3", "script.py"])
    assert (options.nnodes, options.rdzv_endpoint, options.grace) == ((2, 4), ("::1", 29400), 7.0)
    assert job.variables["TORCHELASTIC_MAX_RESTARTS"] == "3"
    assert job.variables["TORCHELASTIC_RUN_ID"] == "none"


def test_a_job_of_one_node_has_a_name_of_its_own(script: Script) -> None:
    """Programs use the name for files that they save, as with torchrun. Brackets are for the option alone."""
    script("")
    given = ["--master-addr=[::1]"], [], ["--rdzv-id=x"]
    jobs = [read([*options, "script.py"])[1] for options in given]
    names = [job.variables["TORCHELASTIC_RUN_ID"] for job in jobs]
    assert len({*names}) == 3
    assert names[2] == "x"
    assert jobs[0].master_addr == "::1"


def test_port_0_is_a_job_of_its_own(script: Script, start: Starter) -> None:
    """As with torchrun, so that one machine can run several single-node jobs, each with restarts."""
    script("here(restarts)\nif restarts == 0: sys.exit(1)")
    process = start("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=1")
    assert [next_line(process)[2] for _ in range(2)] == ["0", "1"]
    assert end(process)[0] == 0


def test_a_further_signal_is_passed_on_and_ends_the_job(
    script: Script, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")
    script(
        "signal.signal(signal.SIGUSR1, lambda *_: (here('saved'), os._exit(0)))\n"
        "here(os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'])\nstay()"
    )
    process = start()
    _, pid, names = next_line(process)
    assert names == "SIGTERM,SIGUSR1"
    process.send_signal(signal.SIGUSR1)
    assert next_line(process) == ["here", pid, "saved"]
    assert end(process)[0] == 128 + signal.SIGUSR1
