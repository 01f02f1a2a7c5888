"""The launcher as a command: each test runs it on a small script."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launch.launching import (
    COMMAND,
    LIMIT,
    Launch,
    Script,
    Starter,
    end,
    has_ended,
    next_line,
    until,
    wait_for,
)

from fastcoll.launch.options import read
from fastcoll.testing.worker import shm_names

# Every rank writes a file, and goes on when all ranks have written theirs.
MEET = """
open(f"here-{rank}.part", "w").write(str(os.getpid()))
os.rename(f"here-{rank}.part", f"here-{rank}")
for each in range(int(os.environ["WORLD_SIZE"])): stay(f"here-{each}")
"""


def test_each_rank_gets_its_environment_and_arguments(launch: Launch) -> None:
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT FASTCOLL_SECRET"
    done = launch(
        f"import json\nprint(json.dumps([*map(os.environ.get, '{names}'.split()), *sys.argv[1:]]))",
        *["--nproc-per-node=3", "--use_env", "--standalone", "script.py", "--flag", "-n", "7"],
    )
    assert done.returncode == 0
    ranks = [json.loads(line.partition(" ")[2]) for line in sorted(done.stdout.splitlines())]
    port, secret = ranks[0][6:8]
    assert int(port) > 0
    assert len(secret) == 64
    same = ["3", "3", "0", "127.0.0.1", port, secret, "--flag", "-n", "7"]
    assert ranks == [[rank, rank, *same] for rank in "012"]
    threads = "fastcoll.launch: OMP_NUM_THREADS and NUMBA_NUM_THREADS set to 1, as 3 ranks share this node\n"
    assert done.stderr == threads


def test_many_nodes_and_the_local_rank_as_an_argument(launch: Launch) -> None:
    text = "print(*sys.argv[1:], *map(os.environ.get, ['WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT']))"
    options = "-n2 --nnodes=2 --node_rank=1 --master_addr=there --master-port=77 --nodes_port=0"
    done = launch(text, *options.split(), "--pass_local_rank", "script.py", "-x")
    lines = [f"[{2 + local}] --local_rank={local} -x 4 there 77" for local in (0, 1)]
    assert sorted(done.stdout.splitlines()) == lines


def test_logs_take_the_place_of_links_and_are_not_written_where_those_lead(launch: Launch) -> None:
    Path("precious").write_text("mine")
    Path("logs").mkdir()
    Path("logs/rank-0.stdout").symlink_to("../precious")
    Path("logs/rank-0.stderr").hardlink_to("precious")
    assert launch("print('said')", "-n1", "--log_dir", "logs", "script.py").returncode == 0
    assert Path("precious").read_text() == "mine"
    assert Path("logs/rank-0.stdout").read_text() == "said\n"


def test_a_log_that_cannot_be_made_is_named(launch: Launch) -> None:
    Path("logs/rank-0.stdout").mkdir(parents=True)
    done = launch("", "--log_dir", "logs", "script.py")
    assert done.returncode == 1
    why = f"the ranks on {os.uname().nodename} cannot be run: Is a directory: logs/rank-0.stdout"
    assert done.stderr == f"fastcoll.launch: {why}\n"


def test_modules_other_programs_and_plain_output(launch: Launch) -> None:
    assert launch("print(f'module {rank}')", "--no_prefix", "-m", "script").stdout == "module 0\n"
    assert launch("", "--no-python", "sh", "-c", "echo shell $RANK").stdout == "[0] shell 0\n"
    missing = launch("", "--no-python", "no-such-program")
    assert missing.returncode == 127
    assert "'no-such-program' cannot be run: No such file or directory" in missing.stderr


def test_rank_0_has_the_standard_input(launch: Launch) -> None:
    done = launch("print(sys.stdin.read())", "-n2", "script.py", input="text")
    assert sorted(done.stdout.splitlines()) == ["[0] text", "[1] "]


@pytest.mark.parametrize(
    ("failure", "code", "text"),
    [
        ("raise ValueError('the cause')", 1, "exit code 1; its last lines on stderr:\n    Traceback"),
        ("sys.exit(3)", 3, "exit code 3; it wrote nothing on stderr\n"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "signal SIGKILL (9); it wrote nothing on stderr\n"),
    ],
)
def test_the_first_failure_ends_the_others(launch: Launch, failure: str, code: int, text: str) -> None:
    done = launch(f"{MEET}if rank == 1:\n    {failure}\ntime.sleep(1000)", "-n3", "script.py")
    assert done.returncode == code
    pid = Path("here-1").read_text()
    assert f"fastcoll.launch: rank 1 (pid {pid} on {os.uname().nodename}) failed first: {text}" in done.stderr
    assert ("\n    ValueError: the cause\n" in done.stderr) == (code == 1)
    assert done.stderr.count("failed first") == 1


def test_a_failure_counts_though_the_launcher_was_started_with_sigchld_ignored(launch: Launch) -> None:
    text = "print(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL); sys.exit(3)"
    done = launch(text, "--no_prefix", "script.py", command=["env", "--ignore-signal=CHLD", *COMMAND])
    assert (done.returncode, done.stdout) == (3, "True\n")


@pytest.mark.long
def test_without_a_cause_the_failed_group_is_reported(launch: Launch) -> None:
    text = "from fastcoll.errors import PeerDiedError\nif rank == 0: raise PeerDiedError('rank 1 is gone')"
    done = launch(f"{MEET}{text}\ntime.sleep(1000)", "-n2", "script.py")
    assert done.returncode == 1
    assert "fastcoll.launch: rank 0 (pid " in done.stderr
    assert "    fastcoll.errors.PeerDiedError: rank 1 is gone\n" in done.stderr


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace(launch: Launch) -> None:
    text = f"signal.signal(signal.SIGTERM, signal.SIG_IGN){MEET}if rank == 1: sys.exit(4)\ntime.sleep(1000)"
    assert launch(text, *["-n2", "--grace=0.2", "--monitor_interval=1000", "script.py"]).returncode == 4


def test_processes_that_outlive_their_rank_are_ended(launch: Launch) -> None:
    text = "for new in (False, True): print(subprocess.Popen(['sleep', '1000'], start_new_session=new).pid)"
    done = launch(text, "--no_prefix", "script.py")
    assert done.returncode == 0
    assert all(map(has_ended, done.stdout.split()))


def test_adopted_processes_that_end_are_reaped_while_the_rank_runs(launch: Launch) -> None:
    """A shell prints the pid of its background job, and leaves the job to the launcher."""
    text = "wait_for_end(int(subprocess.check_output(['sh', '-c', 'true & echo $!']))); print('reaped')"
    assert launch(text, "--no_prefix", "script.py").stdout == "reaped\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_are_passed_on_to_ranks(script: Script, start: Starter, number: signal.Signals) -> None:
    script(f"signal.signal({number:d}, lambda *_: (here('got it'), os._exit(0)))\nhere()\nstay()")
    process = start("-n2", f"--grace={LIMIT}")
    pids = [next_line(process)[1] for _ in range(2)]
    process.send_signal(number)
    code, out, err = end(process)
    assert code == 128 + number
    said = {line.split(" ", 1)[1] for line in out.splitlines()}
    assert said == {f"here {pid} got it" for pid in pids}
    assert "failed" not in err
    assert all(map(has_ended, pids))


def test_ranks_ignore_the_signals_that_a_background_job_ignores(script: Script, start: Starter) -> None:
    """As with `nohup python -m fastcoll.launch ... &` in a shell script, only SIGTERM ends the launcher."""
    script(
        "signal.signal(signal.SIGTERM, lambda *_: (here('got it'), os._exit(0)))\n"
        "here([signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGHUP)])\n"
        "stay()"
    )
    ignoring = ["sh", "-c", "trap '' INT HUP; exec \"$@\"", "sh"]
    process = start(f"--grace={LIMIT}", command=[*ignoring, *COMMAND])
    _, pid, *ignored = next_line(process)
    assert ignored == ["[True,", "True]"]
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
    assert end(process)[:2] == (128 + signal.SIGTERM, f"[0] here {pid} got it\n")


@pytest.mark.parametrize("failpoint", ["after_start", "before_end"])
def test_a_launcher_killed_at_any_moment_leaves_nothing(launch: Launch, failpoint: str) -> None:
    mark = f"left-{os.getpid()}-{failpoint}"
    more = {**os.environ, "FASTCOLL_FAILPOINT": f"launch.{failpoint}:kill", "LEFT": mark}
    done = launch("time.sleep(1000 if rank else 0); sys.exit(1)", "-n2", "--grace=0", "script.py", env=more)
    assert done.returncode == -signal.SIGKILL
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if mark in environ_of(pid):
            assert has_ended(pid), pid


def environ_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def test_a_second_signal_kills_at_once(script: Script, start: Starter) -> None:
    script("signal.signal(signal.SIGINT, lambda *_: here('no'))\nhere('ready')\nstay()")
    process = start("-n2", "--grace=1000")
    for word in ("ready", "no"):
        lines = [next_line(process) for _ in range(2)]
        assert [line[2] for line in lines] == [word] * 2
        process.send_signal(signal.SIGINT)
    assert end(process)[0] == 130
    assert all(has_ended(pid) for _, pid, _ in lines)


def test_a_segment_whose_makers_all_end_is_removed(
    script: Script, start: Starter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTCOLL_FAILPOINT", "shm.meeting.after_create:stop")
    before = shm_names()
    script("import fastcoll\nhere()\nfastcoll.init_process_group('shm')")
    process = start("-n2", "--grace=0")
    pids = [next_line(process)[1] for _ in range(2)]
    until(lambda: shm_names() - before)
    assert len(shm_names() - before) == 1
    process.terminate()
    assert end(process)[0] == 128 + signal.SIGTERM
    assert all(map(has_ended, pids))
    assert shm_names() <= before


# Ctrl-C in a callback, whose exceptions Python prints and ignores; import makes such callbacks for every module.
INTERRUPTED = """
import runpy, signal, sys, weakref

class Finder:
    def find_spec(self, name, *_):
        if name == "fastcoll.launch.command":
            it = type("It", (), {})()
            self.callback = weakref.ref(it, lambda _: signal.raise_signal(signal.SIGINT))

sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["script.py"]
runpy.run_module("fastcoll.launch", run_name="__main__")
"""


def test_ctrl_c_while_the_launcher_is_imported_counts(launch: Launch) -> None:
    done = launch("print('here')", command=[sys.executable, "-c", INTERRUPTED])
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "")


def test_a_reader_that_goes_away_ends_the_job(script: Script, start: Starter) -> None:
    script("here()\nstay()\nwhile True:\n    print('more')\n    time.sleep(0.01)")
    process = start("-n2")
    pids = [next_line(process)[1] for _ in range(2)]
    assert process.stdout is not None
    process.stdout.close()
    Path("go").touch()
    assert process.wait(LIMIT) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    process.stderr.close()
    assert all(map(has_ended, pids))


def test_a_full_disk_ends_the_job_with_its_grace(launch: Launch) -> None:
    text = (
        "def save(*_):\n    open('saved', 'w').close()\n    os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('lost')\nstay()"
    )
    with open("/dev/full", "w") as full:
        done = launch(text, f"--grace={LIMIT}", "script.py", stdout=full)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == "fastcoll.launch: the output cannot be written: No space left on device\n"
    assert Path("saved").exists()


SAVE = """
def save(*_):
    print("this is written where nobody reads it")
    time.sleep(0.3)  # so long it goes on behind that
    open(f"saved-{rank}", "w")
    sys.exit()
signal.signal(signal.SIGHUP, save)
open(f"here-{rank}", "w")
stay()
"""


@pytest.mark.long
@pytest.mark.parametrize("goes", ["reader", "terminal"])
def test_ranks_keep_their_grace_when_the_reader_ends_with_the_signal(script: Script, goes: str) -> None:
    """The reader ends with the signal, as `tee` does at Ctrl-C, or a closed terminal."""
    script(SAVE)
    theirs, ours = os.pipe() if goes == "reader" else pty.openpty()
    command = [*COMMAND, "-n2", f"--grace={LIMIT}", "script.py"]
    with subprocess.Popen(command, stdout=ours, stderr=subprocess.DEVNULL) as process:
        os.close(ours)
        wait_for("here-0", "here-1")
        os.close(theirs)
        process.send_signal(signal.SIGHUP)
        assert process.wait(LIMIT) == 128 + signal.SIGHUP
    assert sorted(path.name for path in Path().glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.long
def test_a_signal_ends_ranks_whose_output_is_not_read(script: Script, start: Starter) -> None:
    script(
        "os.set_blocking(1, False)\nhere()\nlast = time.monotonic()\n"
        "while time.monotonic() < last + 0.3:\n"
        "    try:\n        os.write(1, b'more\\n' * 800)\n        last = time.monotonic()\n"
        "    except BlockingIOError: time.sleep(0.01)\n"
        "open(f'full-{rank}', 'w')\ntime.sleep(1000)"
    )
    process = start("-n2")
    pids: list[str] = []
    while len(pids) < 2:
        words = next_line(process)
        pids += words[1:2] if words[0] == "here" else []
    wait_for("full-0", "full-1")
    process.terminate()
    assert process.wait(LIMIT) == 128 + signal.SIGTERM
    assert all(map(has_ended, pids))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("-n0 script.py", "give a number from 1 up, auto or cpu, not '0'"),
        ("--nnodes=0 script.py", "give a number from 1 up, or MIN:MAX, not '0'"),
        ("--nnodes=3:2 script.py", "give a number from 1 up, or MIN:MAX, not '3:2'"),
        ("--nnodes=2 script.py", "--master_addr is needed for 2 nodes"),
        ("--nnodes=1:2 script.py", "--nnodes 1:2 needs --rdzv_backend c10d"),
        ("--nnodes=2 --standalone script.py", "is for one node, as is port 0 of --rdzv_endpoint; --nnodes says 2"),
        ("--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --nnodes=2 x", "is for one node, as is port 0"),
        ("--node_rank=1 script.py", "--node_rank must be from 0 to 0, got 1"),
        ("--master_port=70000 script.py", "--master_port must be from 1 to 65535, got 70000"),
        ("--nodes_port=70000 script.py", "--nodes_port must be from 0 to 65535, got 70000"),
        (
            "--nnodes=2 --node_rank=1 --master_addr=there --nodes_port=0 --min_ranks=1 script.py",
            "--nodes_port 0 leaves the launchers no store, which --min_ranks on several nodes needs; give a port",
        ),
        ("--max-restarts=-1 script.py", "give a whole number from 0 up, not '-1'"),
        ("--grace=-1 script.py", "give a number of seconds from 0 up, not '-1'"),
        ("--grace=x script.py", "give a number of seconds from 0 up, not 'x'"),
        ("--log_dir=script.py script.py", "--log_dir 'script.py' cannot be used: File exists"),
        ("--log_dir=script.py/x script.py", "'script.py/x' cannot be used: Not a directory"),
        ("--log_dir=/proc script.py", "--log_dir '/proc' cannot be used: No such file"),
        ("-m --no_python script", "-m and --no_python exclude each other"),
        ("--use_env --pass-local-rank script.py", "not allowed with argument --use_env"),
        ("absent.py", "there is no script 'absent.py' (for a module give -m)"),
        ("--rdzv-backend=etcd-v2 script.py", "--rdzv_backend etcd-v2 is refused: there is no etcd here"),
        ("--rdzv-backend=x script.py", "--rdzv_backend x is refused: it is not known; give c10d or static"),
        ("--rdzv-backend=c10d --min_ranks=1 script.py", "--min_ranks is for programs whose ranks go on"),
        ("--rdzv-endpoint=a:b script.py", "give HOST or HOST:PORT, not 'a:b'"),
        ("--rdzv-conf=x=1 script.py", "'x' is none of is_host, join_timeout, last_call_timeout"),
        ("--start-method=fork script.py", "--start-method is refused: ranks are always fresh processes"),
        ("--numa_binding node script.py", "--numa_binding is refused: give --cpu_bind numa"),
        ("--signals-to-handle=SIGX script.py", "'SIGX' is no signal; give names, as SIGTERM,SIGUSR1"),
        ("--signals-to-handle=SIGKILL script.py", "SIGKILL, SIGSTOP and SIGCHLD cannot be among them"),
        ("--redirects=4 script.py", "give 0 to 3 (1: stdout, 2: stderr, 3: both), or such by local rank"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused(
    options: str, complaint: str, capsys: pytest.CaptureFixture[str], script: Script
) -> None:
    script("")
    with pytest.raises(SystemExit) as info:
        read(options.split())
    assert info.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_failpoint_that_does_not_exist_is_refused(launch: Launch) -> None:
    done = launch("", "script.py", env={**os.environ, "FASTCOLL_FAILPOINT": "foo"})
    assert done.returncode == 1
    assert (
        "fastcoll.launch: FASTCOLL_FAILPOINT='foo' cannot be used (there is no failpoint 'foo'" in done.stderr
    )
    assert "Traceback" not in done.stderr


def test_auto_is_one_rank_per_usable_core_and_the_port_differs_from_job_to_job(script: Script) -> None:
    script("")
    jobs = [read(["-n", "auto", "script.py"])[1] for _ in range(3)]
    assert {job.local_size for job in jobs} == {len(os.sched_getaffinity(0))}
    assert len({job.master_port for job in jobs}) > 1
