"""The command `fastcoll`: each of its commands starts by its name, and programs can read its output."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import python

from fastcoll.system.standard_streams import run_command
from fastcoll.tools import command, environment
from fastcoll.tools.printing import Printer, bytes_of, digits_of, seconds_of

LIMIT = 120  # s, which only ends a hang


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "fastcoll", *words, environ=environment)


@pytest.mark.parametrize("name", command.COMMANDS)
def test_each_command_is_found_and_prints_its_options(name, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    assert ended.value.code == 0
    assert "usage:" in (shown := capsys.readouterr().out)
    assert "--help" in shown


def test_without_a_command_the_commands_are_listed_and_an_unknown_one_is_refused():
    done = run()
    assert done.returncode == 0
    assert all(f"\n  {name} " in done.stdout for name in command.COMMANDS)
    assert run("--version").stdout.startswith("fastcoll ")
    done = run("docter")
    assert done.returncode == 2
    assert "did you mean doctor?" in done.stderr


COMMAND = "import sys; from fastcoll.tools.command import main; sys.exit(main(sys.argv[1:]))"
TO_A_PIPE = [
    [sys.executable, "-c", COMMAND, "env"],
    [sys.executable, "-m", "fastcoll.bench", "barrier", "--iters", "1"],
    [sys.executable, "-m", "fastcoll.warmup", "--ops", "barrier", "-j", "1"],
]


@pytest.mark.parametrize("words", TO_A_PIPE, ids=lambda words: words[2].rpartition(".")[2])
def test_a_reader_that_goes_away_is_no_error(words):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, timeout=LIMIT)
    os.close(write)
    assert done.returncode == 141
    assert b"Error" not in done.stderr, done.stderr


def test_output_for_which_the_disk_has_no_room_is_named_in_a_line():
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-c", COMMAND, "env"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (1, "the output cannot be written: No space left on device\n")


def test_characters_that_the_output_lacks_are_replaced():
    code = (
        "from fastcoll.system.standard_streams import run_command as run; run(lambda: print('a \u2192 \xe9'))"
    )
    done = python("-c", code, environ={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stdout) == (0, "a \\u2192 \\xe9\n"), done.stderr


def test_ctrl_c_ends_a_command_with_a_line(capsys):
    def command() -> int:
        raise KeyboardInterrupt

    assert run_command(command) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"


def test_a_command_whose_output_is_closed_from_the_start_prints_nothing():
    words = ["sh", "-c", 'exec "$0" -c "$1" env >&-', sys.executable, COMMAND]
    done = subprocess.run(words, stderr=subprocess.PIPE, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_stream_that_is_closed_from_the_start_is_the_null_device(name, monkeypatch):
    def command() -> int:
        with getattr(sys, name) as stream:
            assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev
        monkeypatch.undo()
        return 3

    monkeypatch.setattr(sys, name, None)
    assert run_command(command) == 3


@pytest.mark.parametrize("name", ["env", "status"])
def test_commands_that_people_wait_for_import_nothing_heavy(name):
    code = (
        f"import sys; from fastcoll.tools.command import main; main(['{name}']); print(*sorted(sys.modules))"
    )
    done = python("-c", code, check=True)
    modules = set(done.stdout.splitlines()[-1].split())
    heavy = "numba llvmlite posix_ipc torch mpi4py multiprocessing fastcoll.shm fastcoll.bench"
    assert not {*heavy.split()} & modules


# ---- what is printed ---------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROWS = [("1", "a\nb"), ("1000", "word " * 40)]


def test_a_table_in_a_pipe_is_lines_with_tabs():
    out = io.StringIO()
    Printer(out).table(("n", "text"), ROWS, ["bad", ""])
    assert out.getvalue().splitlines() == ["n\ttext", "1\ta b", "1000\t" + ("word " * 40).strip()]


def test_a_table_fits_into_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Printer(out).table(("n", "text"), ROWS)
    lines = out.getvalue().splitlines()
    assert lines[:3] == ["n     text", "1     a b", "1000  " + " ".join(["word"] * 11)]
    assert all(len(line) <= 60 for line in lines)
    assert {line[:6] for line in lines[3:]} == {" " * 6}


def test_reports_follow_one_another_in_a_pipe_and_replace_one_another_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for out, between in ((io.StringIO(), "\n"), (Terminal(), "\033[H\033[J")):
        show = Printer(out)
        show.anew()
        show.say("first")
        assert out.getvalue() == ("first\n" if between == "\n" else f"{between}first\n")
        show.anew()
        show.say("second")
        assert out.getvalue().endswith(f"first\n{between}second\n")
    monkeypatch.setenv("TERM", "dumb")
    show = Printer(out := Terminal())
    show.anew()
    assert out.getvalue() == ""


def test_colours_are_for_terminals_that_have_them(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for no_color, coloured in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", no_color)
        out = Terminal()
        Printer(out).say("trouble", "bad")
        assert ("\033[1;31mtrouble\033[0m" in out.getvalue()) is coloured


@pytest.mark.parametrize(
    ("value", "text", "of"),
    [
        *((0.04, "0.0 s", seconds_of), (12.4, "12 s", seconds_of), (59.6, "1 min", seconds_of)),
        *((200, "3 min 20 s", seconds_of), (7500, "2 h 5 min", seconds_of), (90000, "1 d 1 h", seconds_of)),
        *((1 << 3, "8 B", bytes_of), (1 << 12, "4 KiB", bytes_of), (1 << 26, "64 MiB", bytes_of)),
        *((1 << 35, "32 GiB", bytes_of), (1 << 44, "16 TiB", bytes_of), (1000 << 20, "1000 MiB", bytes_of)),
        *((3.14159, "3.14", digits_of), (999.6, "1000", digits_of), (3550.2, "3550", digits_of)),
    ],
)
def test_durations_and_bytes_are_formatted(value, text, of):
    assert of(value) == text


# ---- env ---------------------------------------------------------------------------------------------------


def env(**environment: str) -> tuple[dict, int]:
    launchers = ("RANK", "WORLD", "LOCAL_", "MASTER_", "OMPI", "PMI", "MPI_", "MV2", "SLURM", "FASTCOLL_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    command, settings = [sys.executable, "-m", "fastcoll", "env", "--json"], {**inherited, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=settings)
    assert not done.stderr
    return json.loads(done.stdout), done.returncode


def test_env_without_a_launcher():
    report, code = env()
    assert code == 0
    detected = {name: report["detected"][name]["value"] for name in ("launcher", "meets")}
    assert detected == {"launcher": "none", "meets": "no other rank"}
    assert {each["from"] for each in report["settings"].values()} == {"default"}


def test_env_shows_the_launcher_and_where_the_ranks_meet():
    sizes = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
    report, code = env(RANK="1", **sizes, MASTER_ADDR="10.0.0.1", MASTER_PORT="29500")
    found = report["detected"]
    assert code == 0
    assert "fastcoll.launch" in found["launcher"]["value"]
    assert found["launcher"]["why"] == "RANK=1, WORLD_SIZE=4, LOCAL_WORLD_SIZE=4"
    assert (found["rank"]["value"], found["rank"]["why"]) == ("1", "RANK")
    assert found["meets"]["value"] == "10.0.0.1:24500"
    assert "rank 0 listens there" in found["meets"]["why"]


def test_env_shows_which_launchers_are_ignored_and_why():
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    report, code = env(**slurm, **mpi)
    found = report["detected"]
    assert found["launcher"]["value"] == "Open MPI"
    assert found["ignored"]["value"] == "Slurm"
    assert "outermost" in found["ignored"]["why"]
    assert code == 0
    assert "all ranks are on this machine" in found["meets"]["why"]
    report, _ = env(**slurm, SLURM_JOB_NAME="bash")
    assert "a shell in an allocation" in report["detected"]["ignored"]["why"]


def test_env_shows_what_would_be_refused(tmp_path):
    report, code = env(RANK="0", WORLD_SIZE="2", PMI_RANK="1", PMI_SIZE="2")
    assert code == 1
    assert "RANK=0, but PMI_RANK=1" in report["wrong"][0]
    report, code = env(FASTCOLL_TIMEOUT="soon", FASTCOLL_TIMEUOT="3")
    assert code == 1
    assert report["settings"]["FASTCOLL_TIMEOUT"] == {"value": "soon", "from": "environment"}
    assert "cannot be used" in report["wrong"][0]
    assert "FASTCOLL_TIMEUOT" in report["settings"]


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("FASTCOLL_SHM_ALGORITHMS", "close,foo", "there is no 'foo'; there are close, past,"),
        ("FASTCOLL_PLACE", "x", "FASTCOLL_PLACE is 'x'; it is set by the launcher"),
        ("FASTCOLL_JOINER", "1", "FASTCOLL_ELASTIC, which is not set"),
    ],
)
def test_env_refuses_the_settings_that_ranks_would_refuse(name, text, why, capsys, monkeypatch):
    monkeypatch.setenv(name, text)
    assert environment.main(["--json"]) == 1
    (wrong,) = json.loads(capsys.readouterr().out)["wrong"]
    assert why in wrong
    done = python("-c", "import fastcoll; fastcoll.init_process_group()")
    assert re.search(rf"fastcoll\.errors\.UsageError: .*({name}|FASTCOLL_ELASTIC)", done.stderr)


@pytest.mark.parametrize("name", ["FASTCOLL_SECRET", "FASTCOLL_SECERT", "FASTCOLL_MY_SECRETS"])
def test_env_shows_which_files_it_would_use_and_never_the_secret(name):
    done = run("env", **{name: "swordfish-swordfish"})
    assert "swordfish" not in done.stdout
    assert "(19 characters)" in done.stdout
    assert str(Path(command.__file__).parents[1]) in done.stdout
