"""Complete runs of `--vs` with a fake Gloo: a module `torch` that passes all calls to fastcoll."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from programs import until
from versus.on_hosts import agent_of
from versus.options import main

import fastcoll
from fastcoll.bench import command

BENCH = [sys.executable, "-m", "fastcoll.bench"]
SOURCES = Path(__file__).parents[3]  # an installed package has no studies

TORCH = """
__version__ = "0"
float64 = "float64"
import numpy
def from_numpy(x):
    return x
def tensor(values, dtype):
    return numpy.array(values, dtype)
"""
DISTRIBUTED = """
from fastcoll import *
import fastcoll
def is_gloo_available():
    return True
def init_process_group(backend, init_method, rank, world_size):
    assert backend == "gloo"
    fastcoll.init_process_group("auto", init_method, rank=rank, world_size=world_size)
"""


@pytest.fixture
def gloo(tmp_path):
    """Return `--peer-python gloo=...` for a fake torch; `more` is added to its torch.distributed."""

    def make(more=""):
        package = tmp_path / "fake" / "torch"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(TORCH)
        (package / "distributed.py").write_text(DISTRIBUTED + more)
        program = tmp_path / "python"
        program.write_text(f'#!/bin/sh\nPYTHONPATH={package.parent}:$PYTHONPATH exec {sys.executable} "$@"\n')
        program.chmod(0o755)
        return ["--peer-python", f"gloo={program}"]

    return make


@pytest.fixture(autouse=True)
def temporary(monkeypatch, tmp_path):
    """Return the folder for the run's files, so that a test sees which are left."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which has been read from TMPDIR before
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.long
def test_a_comparison(gloo, tmp_path, temporary, capfd):
    """test_outcome.py has the pictures, the pages and several rounds."""
    words = "all_reduce send-recv barrier --vs gloo --sizes 8,64K --rounds 1 --scale 0.1 --backend shm --json out.json"
    assert main([*words.split(), "--results", str(tmp_path / "pages"), *gloo()]) == 0
    out, err = capfd.readouterr()
    assert "# gloo: torch 0 (Gloo), --peer-python" in err
    assert "# send_recv, float32" in out
    assert "gloo=PYTHON" in out
    read = json.loads(Path("out.json").read_text())
    assert [side["name"] for side in read["sides"]] == ["fastcoll", "gloo"]
    assert read["sides"][0]["library"] == f"fastcoll {fastcoll.__version__} (backend shm)"
    shares = {(r["operation"], r["size"]): r["fastcoll_over_limit"] for r in read["results"]}
    assert [key for key, share in shares.items() if share] == [("all_reduce", 65536), ("send_recv", 65536)]
    assert all(min(r["p99_seconds"]["gloo"], r["seconds"]["gloo"]) > 0 for r in read["results"])
    cores = sorted(os.sched_getaffinity(0))
    for side in read["sides"]:
        assert [rank["caller"][0] for rank in side["placed"]] == [cores[0], cores[1 % len(cores)]]
    assert len(list((tmp_path / "pages").iterdir())) == 1
    assert list(temporary.iterdir()) == []


@pytest.mark.long
def test_a_comparison_on_two_hosts(gloo, capfd, join_hosts):
    words = "all_gather --vs gloo --sizes 1M -n 4 --hosts 2 --rounds 1 --scale 0.1 --json out.json"
    assert main([*words.split(), *gloo()]) == 0, capfd.readouterr().err
    (row,) = json.loads(Path("out.json").read_text())["results"]
    sent = row["sent_bytes"]["fastcoll"]
    # Each rank sends its quarter to both ranks of the other host.
    assert 1 << 20 < sent < 1.2 * (1 << 20)
    assert row["processor_gloo_over_fastcoll"] > 0
    host, other = join_hosts(2)
    agent = Path("agent")
    agent.write_text(agent_of((host, other)))
    words = [*host.enter(), "sh", agent, "-x", "host1", "hostname;", "echo", "two words"]
    assert subprocess.run(words, capture_output=True, text=True).stdout == "host1\ntwo words\n"


@pytest.mark.long
@pytest.mark.parametrize(
    ("operation", "fault", "said"),
    [
        (
            "all_reduce",
            "def all_reduce(x, *rest):\n    if get_rank() == 1 and x.dtype == 'float32': raise OSError('boom')\n",
            ["rank 0, 1: was in all_reduce of 8 bytes", "OSError: boom"],
        ),
        (
            "broadcast",
            "broadcast = lambda x, src: None\n",
            ["broadcast of 8 bytes: 2 wrong elements on rank 1"],
        ),
    ],
)
def test_what_a_peer_does_wrong_is_shown(gloo, operation, fault, said, capfd):
    words = f"{operation} --vs gloo --sizes 8 --rounds 1 --scale 0.1"
    assert main([*words.split(), *gloo(fault)]) == 1
    out, err = capfd.readouterr()
    assert [text for text in said if text not in err] == []
    assert "# Left out: gloo failed: exit code 1." in out


def test_without_a_peer_the_exit_code_is_2_with_the_cure(gloo, capsys):
    assert main("barrier --vs gloo --peer-python gloo=/bin/false".split()) == 2
    assert "install it with: python -m fastcoll.bench --vs gloo --install-peers" in capsys.readouterr().err
    assert main(["custom", "--vs", "gloo", *gloo()]) == 2
    assert "gloo is left out: it does not have custom" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_comparison_leaves_nothing(gloo, number, temporary):
    hang = "import time\ndef all_reduce(x, *rest):\n    time.sleep(1000)\n"
    words = ["all_reduce", "--vs", "gloo", *gloo(hang), "--sizes", "8", "--rounds", "1"]
    process = subprocess.Popen(
        [*BENCH, *words], cwd=SOURCES, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ranks = wait_for_ranks(temporary, '{"begins": 0}', "gloo", process)
    process.send_signal(number)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert err.endswith("interrupted\n")
    # A rank whose parent ended first exists until it is reaped.
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in ranks))
    assert list(temporary.iterdir()) == []


def wait_for_ranks(folder, line, side, process):
    """Return the pids of a side's ranks as soon as both have written `line`."""
    end = time.monotonic() + 120
    while time.monotonic() < end and process.poll() is None:
        logs = []
        with suppress(FileNotFoundError):  # the folder of a side that has ended
            logs = [file.read_text() for file in folder.glob("*/[01].jsonl")]
        if len(logs) == 2 and all(line in log and side in log.lower() for log in logs):
            return [json.loads(log.splitlines()[0])["pid"] for log in logs]
        time.sleep(0.01)
    raise AssertionError(process.communicate())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--vs", "nccl"], "no peer 'nccl'; known: gloo, openmpi, openmpi-tcp, mpich"),
        (["sendrecv", "--vs", "gloo"], "no operation 'sendrecv' to compare; known: all_reduce"),
        (["--vs", "gloo", "-n", "1"], "needs at least 2 ranks"),
        (["--vs", "gloo", "-n", "3", "--hosts", "2"], "-n is 3; it must be a multiple of --hosts 2"),
        (["--vs", "openmpi-tcp", "-n", "4", "--hosts", "2"], "openmpi-tcp is for one host"),
        (["--vs", "gloo", "-d", "bfloat16"], "not bfloat16"),
        (["--vs", "gloo", "-d", "int8,int32"], "one dtype at a time"),
        (["--vs", "gloo", "--cores", "4000"], "may not use core 4000"),
        (["--vs", "gloo", "--csv", "x.csv"], "unrecognized arguments: --csv"),
        (["--vs", "gloo", "--op", "max"], "unrecognized arguments: --op"),
        (["--vs", "gloo", "--results", "/dev/null"], "/dev/null is no folder"),
        (["--vs", "gloo", "--peer-python", "gloo"], "is not PEER=PYTHON"),
        (["--vs", "gloo", "--backend", "cpu"], "there is no backend 'cpu'"),
        (["--vs", "gloo", "--backend", "cpu:nccl"], "no backend for CPU arrays that is available here"),
    ],
)
def test_mistakes_are_named(words, message, refused):
    assert message in refused(main, words)


def test_without_the_sources_one_line_names_the_cure(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "__file__", str(tmp_path / "fastcoll" / "bench" / "command.py"))
    assert command.main(["--vs", "gloo"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("--vs is a study")
    assert text.count("\n") == 1


def test_ranks_of_a_launcher_are_refused(monkeypatch, refused):
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert "starts its own ranks" in refused(main, ["--vs", "gloo"])
