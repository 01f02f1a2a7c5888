"""`python -m fastcoll.bench` as a user runs it."""

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios

import pytest
from programs import python

from fastcoll.bench import tune
from fastcoll.bench.command import main, pictures, temporary_folder

BENCH = ["-m", "fastcoll.bench"]
LAUNCH = ["-m", "fastcoll.launch"]


def run(command, words, **options):
    return python(*command, *words.split(), **options)


@pytest.mark.long
def test_all_reduce_with_files(tmp_path):
    done = run(
        BENCH,
        "all_reduce -n 2 -b 8 -e 4K --iters 20 -d float32,bfloat16 -o sum,custom "
        "--json out.json --csv out.csv",
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "# all_reduce" in done.stdout
    assert "# Out of bounds values : 0 OK" in done.stdout
    assert "# against float32's sum" in done.stdout
    assert "\x1b" not in done.stdout
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len(results) == 2 * 2 * 10
    assert [r["size"] for r in results][:10] == [8 << n for n in range(10)]
    assert all(r["wrong"] == 0 and r["time_us"] > 0 and r["iterations"] == 20 for r in results)
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 41


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_operation_is_right(ranks, tmp_path):
    done = run(BENCH, f"-n {ranks} -b 8 -e 300K -f 200 --iters 3 --json out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["results"]
    assert len({r["operation"] for r in rows}) == 12
    assert done.stdout.endswith(f"# picture: {tmp_path}/fastcoll-bench.png\n")
    assert (tmp_path / "fastcoll-bench.png").stat().st_size > 10_000
    assert all(r["wrong"] == 0 for r in rows)


def test_launched_ranks_are_used():
    done = run(LAUNCH, "-n 2 -m fastcoll.bench barrier broadcast -e 8 --iters 10")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on" in done.stdout
    assert done.stdout.count("# broadcast") == 1


def test_wrong_results_are_exit_code_1(tmp_path):
    """A sitecustomize module patches a broadcast that does nothing into the workers."""
    (tmp_path / "sitecustomize.py").write_text(
        "import fastcoll\nreal = fastcoll.broadcast\n"
        "fastcoll.broadcast = lambda x, *rest: real(x, *rest) if x.dtype == 'int64' else None\n"
    )
    done = run(BENCH, "broadcast -e 8 --iters 3", environ={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1, done.stderr
    assert "4 FAILED" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["allreduce"], "known: all_reduce, reduce,"),
        (["-b", "12Q"], "'12Q' is no size in bytes"),
        (["-b", "1M", "-e", "1K"], "from 1M to 1K"),
        (["-d", "float31"], "no dtype 'float31'"),
        (["-o", "sum,mean"], "no reduction 'mean'"),
        (["-n", "0"], "at least one rank"),
        (["-n", "2", "-r", "2"], "the ranks are 0 to 1"),
        (["--backend", "pigeons"], "no backend 'pigeons'"),
        (["--json", "/nowhere/out.json"], "there is no folder /nowhere"),
        (["--plot", "out.doc"], "must end in .png"),
        (["--plot", "."], "name a file"),
        (["--json", "/proc/out.json"], "/proc/out.json cannot be written: "),
        (["--csv", "/"], "/ cannot be written: Is a directory"),
        (["--iters", "0"], "not a finite number greater than 0"),
        (["--seconds", "inf"], "inf is not a finite number greater than 0"),
        (["--pin", "4000"], "may not use core 4000"),
        (["--cores", "0,x"], "invalid"),
        (["--sizes", "8,12Q"], "'12Q' is no size in bytes"),
        (
            ["--results", "3"],
            "--results; --peer-python, --install-peers, --rounds,",
        ),
        (["--rounds", "3"], "--results, --name belong to --vs"),
        (["nothing", "--first-calls"], "nothing"),
        (["--tune", "-n", "1"], "between ranks"),
        (["--tune"], "that is none"),
        (["--start", "--json", "out.json"], "unrecognized arguments: --json out.json"),
        (["--overlap", "barrier", "--cores", "0"], "unrecognized arguments: barrier --cores 0"),
        (["--first-calls", "--begin=8"], "unrecognized arguments: --begin=8"),
        (["--tune", "nosuch"], "unrecognized arguments: nosuch"),
        (
            ["--device", "cuda", "update_symmetric_all_reduce"],
            "update_symmetric_all_reduce is for host memory",
        ),
    ],
)
def test_mistakes_are_named(words, message, refused):
    assert message in refused(tune.main if "--tune" in words else main, words)


def test_pictures_get_their_extensions_and_are_not_written_by_the_check(tmp_path):
    found = pictures([tmp_path / "out", tmp_path / "b.pdf"])
    assert [path.name for path in found] == ["out.png", "out.svg", "b.pdf"]
    assert list(tmp_path.iterdir()) == []


def test_sigterm_leaves_no_folder_behind():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, temporary_folder() as folder:
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not os.path.exists(folder)
    assert signal.getsignal(signal.SIGTERM) == before


def test_contradictions_of_the_launcher_are_refused(refused, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "env:// misses RANK" in refused(main, ["barrier"])
    environ = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert "leave -n out" in refused(main, ["barrier", "-n", "3"])


@pytest.mark.long
def test_reduction_that_the_dtype_does_not_have():
    done = run(BENCH, "all_reduce -e 8 -d float32 -o band")
    assert done.returncode == 2
    assert "float32" in done.stderr
    assert "Traceback" not in done.stderr


def on_terminal(words, **environ):
    """Return the exit code of a run and its output on a terminal of 100 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    settings = {**os.environ, "TERM": "xterm-256color", **environ}
    process = subprocess.Popen([sys.executable, *BENCH, *words.split()], stdout=theirs, env=settings)
    os.close(theirs)
    got = bytearray()
    # EIO: the last writer has closed the terminal
    with contextlib.suppress(OSError), open(ours, "rb", buffering=0) as terminal:
        while data := terminal.read(4096):
            got += data
    return process.wait(timeout=600), got.decode()


@pytest.mark.long
def test_terminal_shows_progress_above_whole_lines():
    code, text = on_terminal("barrier broadcast -e 8 --iters 3", NO_COLOR="1")
    assert code == 0
    assert "0/2" in text
    assert "1/2" in text
    shown = re.sub(r"\x1b\[[\d;?]*\w", "", text).split("\r")
    assert any(line.rstrip().endswith("0.00        0") for line in shown)
    assert "\x1b[32m" not in text
