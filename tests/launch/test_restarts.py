"""The launcher in jobs with generations, on one host: each test starts launchers on a small script."""

from __future__ import annotations

import errno
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastcoll import config
from fastcoll.launch.console import Console
from fastcoll.launch.gathering import Gathering
from fastcoll.launch.generations import Node, Rules
from fastcoll.launch.nodes import Job, free_port
from fastcoll.launch.restarts import Restarts
from fastcoll.launch.supervisor import Supervisor
from fastcoll.rendezvous import HashStore

COMMAND = [sys.executable, "-m", "fastcoll.launch", "--monitor-interval=0.02"]
HEAD = """
import os, signal, sys, time
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def here(*words):
    os.write(1, f"here {os.getpid()} {' '.join(map(str, words))}\\n".encode())
def stay(path="go"):
    while not os.path.exists(path): time.sleep(0.01)
"""
STAY = "here(os.environ['WORLD_SIZE'])\nstay()"


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Write script.py into the current directory."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FASTCOLL_SECRET", "of this test")
    config.forget()
    monkeypatch.chdir(tmp_path)
    yield lambda text: (tmp_path / "script.py").write_text(HEAD + text) and None
    monkeypatch.undo()
    config.forget()


Started = subprocess.Popen[str]
Start = Callable[..., Started]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start a launcher on script.py; what still runs at the end is killed."""
    with ExitStack() as stack:

        def begin(*options: str, program: str = "script.py") -> Started:
            process = subprocess.Popen(
                [*COMMAND, *options, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(process.communicate)
            stack.callback(process.kill)
            return process

        yield begin


def end(process: Started) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def next_line(process: Started) -> list[str]:
    """The words of the next line that a rank has written, the pid second."""
    assert process.stdout is not None
    words = process.stdout.readline().split()
    assert words, process.communicate(timeout=60)
    return words[1:]


def has_ended(pid: int | str) -> bool:
    """Whether a process ends within a moment."""
    try:
        pidfd = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], 5)[0])
    finally:
        os.close(pidfd)


def c10d(port: int, nodes: str = "1:2", *more: str) -> list[str]:
    where = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-conf=last_call_timeout=0"]
    return [f"--nnodes={nodes}", *where, *more]


def test_a_failed_rank_starts_all_anew(script: Callable[[str], None], start: Start) -> None:
    script(
        "import json\nos.write(1, (json.dumps(dict(os.environ)) + '\\n').encode())\n"
        "if rank == 1 and restarts == 0: sys.exit(3)\nif restarts == 0: time.sleep(600)"
    )
    code, out, err = end(start("-n2", "--max-restarts=2", "--role=trainer", "--rdzv-id=me", "--log-dir=logs"))
    assert code == 0, err
    lines = [json.loads(line.partition(" ")[2]) for line in out.splitlines()]
    first, second = ([each for each in lines if each["TORCHELASTIC_RESTART_COUNT"] == str(n)] for n in (0, 1))
    assert sorted(each["RANK"] for each in second) == ["0", "1"]
    expected = {
        "ROLE_NAME": "trainer",
        "ROLE_WORLD_SIZE": "2",
        "WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "me",
        "TORCHELASTIC_MAX_RESTARTS": "2",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    for each in lines:
        assert expected.items() <= each.items()
        assert each["ROLE_RANK"] == each["LOCAL_RANK"] == each["RANK"]
        assert each["TORCHELASTIC_ERROR_FILE"]
    for name in ("FASTCOLL_SECRET", "MASTER_PORT"):
        assert len({each[name] for each in second}) == 1
        assert second[0][name] != first[0][name], name
    assert Path("logs/generation-1/rank-1.stdout").read_text().startswith("{")
    assert "generation 1 starts: 2 ranks on 1 node, 1 of 2 restarts used" in err


def test_after_the_last_restart_the_exit_code_is_the_failed_ranks(
    script: Callable[[str], None], start: Start
) -> None:
    script("if rank == 1: sys.exit(3)\ntime.sleep(600)")
    code, _, err = end(start("-n2", "--max-restarts=1"))
    assert code == 1
    assert len(re.findall(r"rank 1 \(pid \d+ on .*\) failed first: exit code 3", err)) == 2


def test_what_cannot_be_started_is_tried_again_and_told(start: Start) -> None:
    code, _, err = end(start("--max-restarts=1", "--no-python", program="no-such-program"))
    assert code == 1
    assert err.count("fastcoll.launch: rank 0") == 2


@pytest.mark.parametrize("when", ["running", "pausing"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_ranks_run_and_in_a_pause(
    script: Callable[[str], None], start: Start, when: str, number: signal.Signals
) -> None:
    """The pause after the third quick failure is of 2 s."""
    script("here(restarts)\nif sys.argv[1] == 'pausing': sys.exit(1)\ntime.sleep(600)")
    process = start("--max-restarts=9", "script.py", program=when)
    for restarts in range(3 if when == "pausing" else 1):
        _, pid, count = next_line(process)
        assert count == str(restarts)
    assert when == "running" or has_ended(pid)
    process.send_signal(number)
    assert end(process)[0] == 128 + number
    assert has_ended(pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_while_nobody_reads_what_is_said_of_a_restart(
    script: Callable[[str], None], number: signal.Signals
) -> None:
    """stderr is a pipe that is full from the start. The folder is made just before the restart is told."""
    script("if restarts == 0: sys.exit(1)\ntime.sleep(600)")
    unread, full = os.pipe()
    os.set_blocking(full, False)
    with ExitStack() as stack:
        stack.callback(os.close, unread)
        stack.callback(os.close, full)
        while select.select([], [full], [], 0)[1]:
            os.write(full, bytes(select.PIPE_BUF))
        os.set_blocking(full, True)
        process = stack.enter_context(
            subprocess.Popen([*COMMAND, "--max-restarts=1", "--log-dir=logs", "script.py"], stderr=full)
        )
        stack.callback(process.kill)
        deadline = time.monotonic() + 60
        while not Path("logs/generation-1").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        assert process.wait(20) == 128 + number


@pytest.mark.long
def test_nodes_join_and_leave(script: Callable[[str], None], start: Start) -> None:
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
    assert "ended without a word, or is out of reach: the ranks start anew without its own" in err


def test_a_failure_on_one_node_starts_both_anew(script: Callable[[str], None], start: Start) -> None:
    script("here(restarts)\nif rank == 1 and restarts < 1: stay('fail'); sys.exit('no data')\nstay()")
    options = c10d(free_port(), "2", "--max-restarts=1")
    both = [start(*options) for _ in range(2)]
    assert [next_line(node)[2] for node in both] == ["0", "0"]
    Path("fail").touch()
    assert [next_line(node)[2] for node in both] == ["1", "1"]
    Path("go").touch()
    ends = [end(node) for node in both]
    assert [code for code, _, _ in ends] == [0, 0], ends
    said = r"fastcoll.launch: (on another node )?rank 1 \(pid \d+ on .*\) failed first: exit code 1"
    assert sorted(re.findall(said, "".join(err for _, _, err in ends))) == ["", "on another node "]


def test_nodes_with_numbers(script: Callable[[str], None], start: Start) -> None:
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


def test_the_end_of_the_launcher_that_leads_ends_the_others(
    script: Callable[[str], None], start: Start
) -> None:
    script(STAY)
    options = c10d(free_port(), "2")
    leader, other = (start(*options, f"--rdzv-conf=is_host={leads}") for leads in (1, 0))
    pids = [next_line(node)[1] for node in (leader, other)]
    leader.kill()
    code, _, err = end(other)
    assert code == 1
    assert "the launcher that leads the job ended without a word, or is out of reach" in err
    assert all(map(has_ended, pids))


def test_a_job_with_another_name_or_other_options_is_refused(
    script: Callable[[str], None], start: Start
) -> None:
    script(STAY)
    port = free_port()
    first = start(*c10d(port), "--rdzv-id=one")
    next_line(first)
    code, _, err = end(start(*c10d(port), "--rdzv-id=two"))
    assert code == 1
    assert "another job is led there" in err
    assert re.search(
        "it has --rdzv-id one --nnodes 1:2 --max-restarts 0 .*this launcher has --rdzv-id two", err
    )
    Path("go").touch()
    assert end(first)[0] == 0


def test_of_two_jobs_with_one_name_the_second_waits(script: Callable[[str], None], start: Start) -> None:
    script(STAY)
    options = c10d(free_port(), "1")
    first = start(*options)
    next_line(first)
    second = start(*options)
    assert second.stderr is not None
    assert second.stderr.readline() == (
        "fastcoll.launch: generation 0 runs without this node, which waits for a place\n"
    )
    Path("go").touch()
    assert [end(process) for process in (first, second)] == [(0, "", "")] * 2


def test_a_leader_that_is_stopped_for_a_while_hears_what_was_told(
    script: Callable[[str], None], start: Start
) -> None:
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


def test_ranks_for_which_there_is_no_room_count_as_failed(capfd: pytest.CaptureFixture[str]) -> None:
    """No process, or no file descriptor: the system refuses to start them."""

    def refuse(*_: object, **others: object) -> Supervisor:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    node = Node("key", "host", 1, "default", "127.0.0.1", 0)
    rules = Rules(1, 1, max_restarts=1, last_call=0.0, join=60.0, end=5.0, fixed=True)
    told = {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "1"}
    job = Job(("program",), 1, 1, 0, "127.0.0.1", 1234, told=told)
    with Gathering(HashStore(), node, lambda: 1234, rules, leads=True, tick=0.01) as gathering:
        assert Restarts(gathering, job, refuse, None, Console(), 0.01).run() == 1
    assert capfd.readouterr().err.count("cannot be run: Resource temporarily unavailable") == 2


OLD = """
from fastcoll.rendezvous import TCPStore
from fastcoll.errors import StoreError
from fastcoll.rendezvous.detect import port_beside
if rank == 1:
    here()
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        TCPStore("127.0.0.1", port_beside(int(open("port").read())), timeout=10)
        print("it was let in")
    except StoreError as error:
        open("why", "w").write(str(error))
        os.rename("why", "refused")
    stay()
here()
if restarts == 0:
    stay("fail")
    sys.exit(1)
store = TCPStore("127.0.0.1", port_beside(int(os.environ["MASTER_PORT"])), is_master=True)
open("part", "w").write(os.environ["MASTER_PORT"])
os.rename("part", "port")
stay()
"""


@pytest.mark.long
def test_a_rank_of_an_old_generation_is_not_let_in(script: Callable[[str], None], start: Start) -> None:
    """It was stopped, together with its launcher, and goes on when the next generation runs without it."""
    script(OLD)
    options = c10d(free_port(), "1:2", "--max-restarts=1", "--grace=0.1")
    leader = start(*options)
    next_line(leader)
    other = start(*options)
    old = int(next_line(other)[1])
    next_line(leader)
    other.send_signal(signal.SIGSTOP)
    Path("fail").touch()
    deadline = time.monotonic() + 60
    while not Path("port").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(old, signal.SIGCONT)
    while not Path("refused").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "has another secret" in Path("refused").read_text()
    assert Path(f"/proc/{old}").exists()
    other.send_signal(signal.SIGCONT)  # its launcher finds that it was left out, and comes again
    assert has_ended(old)
    for process in (other, leader):
        process.terminate()
        assert end(process)[0] == 128 + signal.SIGTERM


def test_output_goes_where_it_is_sent(script: Callable[[str], None], start: Start) -> None:
    script("os.write(1, b'out\\n'); os.write(2, b'err\\n')")
    options = ["-n3", "--log-dir=logs", "--redirects=0:1,1:3", "--tee=2:2", "--local-ranks-filter=0,1,2"]
    code, out, err = end(start(*options))
    assert code == 0
    assert (out, sorted(err.splitlines())) == ("[2] out\n", ["[0] err", "[2] err"])
    files = sorted(path.name for path in Path("logs").iterdir())
    assert files == ["rank-0.stdout", "rank-1.stderr", "rank-1.stdout", "rank-2.stderr"]
    code, out, err = end(start("--redirects=3"))
    [folder] = re.findall(r"output that goes to files is in (.*)", err)
    assert (out, Path(folder, "rank-0.stdout").read_text()) == ("", "out\n")


def test_tracebacks_of_all_that_failed_the_first_one_first(
    script: Callable[[str], None], start: Start
) -> None:
    """As torch's `record` leaves them, and on stderr."""
    script(
        "import json\nfrom fastcoll.errors import PeerDiedError\nif rank == 0: stay('gone'); time.sleep(600)\n"
        "if rank == 1:\n"
        "    open('part', 'w').write(str(os.getpid())); os.rename('part', 'gone')\n"
        "    raise PeerDiedError('rank 2 is gone')\n"
        "stay('gone')\nwhile os.path.exists('/proc/' + open('gone').read()): time.sleep(0.01)\n"
        "error = {'message': {'message': 'x', 'extraInfo': {'py_callstack': 'in line 7', 'timestamp': '1'}}}\n"
        "json.dump(error, open(os.environ['TORCHELASTIC_ERROR_FILE'], 'w'))\nos._exit(4)"
    )
    code, _, err = end(start("-n3"))
    assert code == 4
    said = [line for line in err.splitlines() if not line.startswith("[")]
    assert re.match(r"fastcoll.launch: rank 2 \(.*\) failed first: exit code 4; its last lines", said[0])
    assert said[1] == "    in line 7"
    assert re.match(r"fastcoll.launch: rank 1 \(.*\) failed, too: exit code 1; its last lines", said[2])
    assert said[-1] == "    fastcoll.errors.PeerDiedError: rank 2 is gone"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--rdzv-backend=etcd-v2"], "--rdzv_backend etcd-v2 is refused: there is no etcd here"),
        (["--rdzv-backend=x"], "--rdzv_backend x is refused: it is not known; give c10d or static"),
        (["--start-method=fork"], "--start-method is refused: ranks are always fresh processes"),
        (["--numa_binding", "node"], "--numa_binding is refused: start the program under numactl"),
        (["--signals-to-handle=SIGX"], "'SIGX' is no signal; give names, as SIGTERM,SIGUSR1"),
        (["--signals-to-handle=SIGKILL"], "SIGKILL, SIGSTOP and SIGCHLD cannot be among them"),
        (
            ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nnodes=2"],
            "is for one node, as is port 0",
        ),
        (["--nnodes=1:2"], "--nnodes 1:2 needs --rdzv_backend c10d"),
        (["--nnodes=3:2"], "give a number from 1 up, or MIN:MAX, not '3:2'"),
        (["--max-restarts=-1"], "give a whole number from 0 up, not '-1'"),
        (["--rdzv-endpoint=a:b"], "give HOST or HOST:PORT, not 'a:b'"),
        (["--rdzv-conf=x=1"], "'x' is none of is_host, join_timeout, last_call_timeout"),
        (["--redirects=4"], "give 0 to 3 (1: stdout, 2: stderr, 3: both), or such by local rank"),
        (["--rdzv-backend=c10d", "--min_ranks=1"], "--min_ranks is for programs whose ranks go on"),
    ],
)
def test_wrong_options_are_refused(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str], script: Callable[[str], None]
) -> None:
    from fastcoll.launch.options import read

    script("")
    with pytest.raises(SystemExit):
        read([*options, "script.py"])
    assert complaint in capsys.readouterr().err


def test_torchruns_variables_are_defaults(
    script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastcoll.launch.options import read

    script("")
    for name, value in {
        "NNODES": "2:4",
        "RDZV_BACKEND": "c10d",
        "RDZV_ENDPOINT": "[::1]",
        "SHUTDOWN_TIMEOUT": "7",
    }.items():
        monkeypatch.setenv(f"PET_{name}", value)
    options, job = read(["--max-restarts", "3", "script.py"])
    assert (options.nnodes, options.rdzv_endpoint, job.told["TORCHELASTIC_MAX_RESTARTS"]) == (
        (2, 4),
        ("::1", 29400),
        "3",
    )
    assert (job.told["TORCHELASTIC_RUN_ID"], options.grace) == ("none", 7.0)


def test_a_job_of_one_node_has_a_name_of_its_own(script: Callable[[str], None]) -> None:
    """As with torchrun, where programs name what they save by it."""
    from fastcoll.launch.options import read

    script("")
    names = [
        read([*given, "script.py"])[1].told["TORCHELASTIC_RUN_ID"] for given in ([], [], ["--rdzv-id=x"])
    ]
    assert len({*names}) == 3
    assert names[2] == "x"


def test_brackets_of_an_ipv6_address_are_for_the_option_alone(script: Callable[[str], None]) -> None:
    """As with torchrun."""
    from fastcoll.launch.options import read

    script("")
    assert read(["--master-addr=[::1]", "script.py"])[1].master_addr == "::1"


def test_port_0_is_a_job_of_its_own(script: Callable[[str], None], start: Start) -> None:
    """Torchrun's way to have several jobs of one node on a machine; each may start anew."""
    script("here(restarts)\nif restarts == 0: sys.exit(1)")
    process = start("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--max-restarts=1")
    assert [next_line(process)[2] for _ in range(2)] == ["0", "1"]
    assert end(process)[0] == 0


def test_a_further_signal_is_passed_on_and_ends_the_job(
    script: Callable[[str], None], start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGUSR1")
    script(
        "signal.signal(signal.SIGUSR1, lambda *_: (here('saved'), os._exit(0)))\n"
        "here(os.environ['TORCHELASTIC_SIGNALS_TO_HANDLE'])\ntime.sleep(600)"
    )
    process = start()
    _, pid, names = next_line(process)
    assert names == "SIGTERM,SIGUSR1"
    process.send_signal(signal.SIGUSR1)
    assert next_line(process) == ["here", pid, "saved"]
    assert end(process)[0] == 128 + signal.SIGUSR1
