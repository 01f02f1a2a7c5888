"""The doctor: it finds each problem that a test makes, and names a cure."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys

import pytest
from programs import python

from fastcoll import config
from fastcoll.rendezvous.detect import port_beside
from fastcoll.shm import segment
from fastcoll.tools import doctor, machine_checks, network_checks, software_checks
from fastcoll.tools.finding import Finding

ABOUT = {
    "Python", "NumPy", "Numba", "posix_ipc", "torch", "mpi4py", "CUDA", "settings", "secret", "compiled code",
    "shared memory", "memory", "limits", "peers' memory", "kernel", "cores", "huge pages", "load", "loopback",
    "interfaces", "own name", "ports",
}  # fmt: skip


def run(*words: str, open_files: int = 0, **environment: str) -> tuple[dict, int]:
    """Return the doctor's findings as JSON; `open_files` is the limit of its descriptors."""

    def restrict() -> None:
        if open_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (open_files, open_files))

    done = python("-m", "fastcoll", "doctor", "--json", *words, environ=environment, preexec_fn=restrict)
    assert not done.stderr
    return json.loads(done.stdout), done.returncode


def about(report: dict, what: str) -> list[dict]:
    return [each for each in report["findings"] if each["about"] == what]


def test_everything_is_checked_and_this_machine_can_run_these_tests():
    report, code = run("-n", "2")
    assert {each["about"] for each in report["findings"]} >= ABOUT
    assert [each for each in report["findings"] if each["level"] == "problem"] == []
    assert (code, report["fine"]) == (0, True)
    assert all(each["cure"] for each in report["findings"] if each["level"] == "warning")
    (peers,) = about(report, "peers' memory")
    assert peers["level"] == "ok"  # the tests of single_copy.py run here


PROBLEMS = [  # subject of the finding, its level, and parts of its text and of its cure
    ("shared memory", "problem", "", "--shm-size"),
    ("limits", "problem", "open files", "ulimit -n"),
    ("settings", "warning", "FASTCOLL_TCP_STREAM", "did you mean FASTCOLL_TCP_STREAMS?"),
    ("secret", "problem", "chmod 600", ""),
    ("compiled code", "warning", "cannot be kept in /proc/none", ""),
    ("interfaces", "problem", "nowhere0", ""),
    ("ports", "problem", "", ""),
    ("ports", "warning", f"pid {os.getpid()}", ""),
]


def test_each_problem_is_found_with_its_cure(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("for everybody to read")
    secret.chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        master = next(p for p in range(1024, 65536) if port_beside(p) == port)
        report, code = run(
            "-n", "100000", open_files=100, FASTCOLL_TCP_STREAM="1", FASTCOLL_SECRET_FILE=str(secret),
            NUMBA_CACHE_DIR="/proc/none", FASTCOLL_PORT_RANGE=f"{port}-{port}", FASTCOLL_SOCKET_IFNAME="nowhere0",
            MASTER_PORT=str(master),
        )  # fmt: skip
    assert (code, report["fine"]) == (1, False)
    for what, level, text, cure in PROBLEMS:
        found = [each for each in about(report, what) if each["level"] == level]
        assert any(text in each["text"] and cure in each["cure"] for each in found), (what, report)


def test_a_problem_that_blocks_other_checks_is_reported_once(tmp_path):
    report, code = run(FASTCOLL_SHM_BYTES_PER_RANK="much", NUMBA_CACHE_DIR=str(tmp_path))
    problems = [each for each in report["findings"] if each["level"] == "problem"]
    assert ([each["about"] for each in problems], code) == (["settings"], 1)
    assert "FASTCOLL_SHM_BYTES_PER_RANK='much'" in problems[0]["text"]
    (memory,) = about(report, "shared memory")
    assert "not checked" in memory["text"]


@pytest.mark.parametrize(
    ("path", "command"),
    [(os.path.dirname(sys.executable), "python"), ("/none", sys.executable)],
    ids=["the Python of the PATH", "another, as under pipx"],
)
def test_code_that_is_not_compiled_is_a_warning_with_the_command_that_compiles_it(path, command, tmp_path):
    report, _ = run(NUMBA_CACHE_DIR=str(tmp_path), PATH=path)
    (kernels,) = about(report, "compiled code")  # there are none in an empty folder
    assert (kernels["level"], kernels["cure"].partition(",")[0]) == (
        "warning",
        f"{command} -m fastcoll warmup",
    )


def test_a_missing_package_is_named_and_the_rest_is_checked():
    code = "import sys; sys.modules['posix_ipc'] = None; from fastcoll.tools.doctor import main; main(['--json'])"
    done = python("-c", code)
    report = json.loads(done.stdout)
    (machine,) = about(report, "machine checks")
    assert (machine["level"], machine["cure"], report["fine"]) == ("problem", "pip install posix_ipc", False)
    assert about(report, "loopback")


def test_a_machine_where_peers_may_not_read_is_warned_of(monkeypatch):
    denied = (
        "import sys; sys.modules['fastcoll.shm.reach'] = None; print(False); print('Operation not permitted')"
    )
    monkeypatch.setattr(machine_checks, "_ASK_PEER", denied)
    reads, opens = machine_checks.memory_of_peers(2)
    assert "process_vm_readv: Operation not permitted" in reads.text
    assert "SYS_PTRACE" in reads.cure
    assert (reads.level, opens.level) == ("warning", "warning")


def test_memory_of_another_process_at_the_same_address_is_detected(monkeypatch):
    """As with pids of another namespace; the probe must compare the value that it reads."""
    wrong = machine_checks._ASK_PEER.replace("== word", "== word + 1")
    assert wrong != machine_checks._ASK_PEER
    monkeypatch.setattr(machine_checks, "_ASK_PEER", wrong)
    (found,) = machine_checks.memory_of_peers(2)
    assert "another process" in found.text


@pytest.mark.parametrize(
    ("name", "version", "level"),
    [
        ("NumPy", "1.25.2", "problem"),
        ("NumPy", "2.0.1", "ok"),
        ("NumPy", "9.1.0", "warning"),
        ("NumPy", "", "problem"),
        ("torch", "", "none"),
        ("torch", "2.6.0+cpu", "warning"),
        ("torch", "2.15.0", "ok"),
        ("Numba", "0.68.0rc1", "ok"),
    ],
)
def test_versions_are_judged_by_what_tests_ran_with(name, version, level):
    found = software_checks.judge(name, version, "pip install it" if name != "torch" else "")
    assert found.level == level
    assert bool(found.cure) is (level in ("problem", "warning"))


def test_mpi_that_cannot_be_loaded_is_a_warning(monkeypatch):
    monkeypatch.setattr(software_checks, "installed", lambda package: "4.1.0")
    monkeypatch.setattr(software_checks, "_ASK_MPI", "raise ImportError('libmpi.so: not there')")
    version, library = software_checks.mpi(2)
    assert version.level == "ok"
    assert library.level == "warning"
    assert "libmpi.so: not there" in library.text


def test_a_check_that_gets_no_answer_is_a_warning(monkeypatch):
    monkeypatch.setattr(software_checks, "installed", lambda package: "4.1.0")
    for module, ask in ((software_checks, "_ASK_MPI"), (machine_checks, "_ASK_PEER")):
        monkeypatch.setattr(module, ask, "import signal; signal.pause()")
        monkeypatch.setattr(module, "_SECONDS", 0.01)
    found = [*software_checks.mpi(2), *machine_checks.memory_of_peers(2)]
    assert [each.level for each in found] == ["ok", "warning", "warning"]
    assert all("within 0.01 s" in each.text for each in found[1:])


def test_cgroups_limits_are_those_of_the_lowest_ancestor(monkeypatch, tmp_path):
    inner = tmp_path / "sys/fs/cgroup/outer/inner"
    inner.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n")
    (inner / "memory.max").write_text("max\n")
    (inner / "memory.current").write_text("100\n")
    (inner.parent / "memory.max").write_text("4096\n")
    (inner.parent / "memory.current").write_text("3000\n")
    (inner / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(machine_checks, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    assert machine_checks.cgroup_limit("memory.max") == 4096
    assert machine_checks.cgroup_limit("cpu.max") == 1.5
    assert machine_checks.cgroup_limit("pids.max") is None


def test_small_shared_memory_slows_a_group_before_it_stops_one(monkeypatch):
    config.forget()
    monkeypatch.setattr(segment, "free_bytes", lambda: 12 << 20)
    (slower,) = machine_checks.shared_memory(2)
    assert slower.level == "warning"
    monkeypatch.setattr(segment, "free_bytes", lambda: 8 << 10)
    (none,) = machine_checks.shared_memory(2)
    assert none.level == "problem"


def test_a_check_that_fails_is_reported_and_the_others_go_on(monkeypatch):
    def broken(ranks):
        raise OSError("no such thing")

    monkeypatch.setattr(network_checks, "CHECKS", (broken, network_checks.loopback))
    monkeypatch.setattr(machine_checks, "CHECKS", ())
    monkeypatch.setattr(software_checks, "CHECKS", ())
    first, second = list(doctor.examine(2))
    assert (first.level, first.about) == ("problem", "broken")
    assert second.about == "loopback"


def test_a_finding_is_shown_before_the_next_check_runs(monkeypatch, capsys):
    shown = []

    def examine(ranks):
        yield Finding("ok", "one", "works")
        shown.append(capsys.readouterr().out)
        yield Finding("problem", "two", "does not", "mend it")

    monkeypatch.setattr(doctor, "examine", examine)
    assert doctor.main(["-n", "2"]) == 1
    assert shown[0].splitlines()[1:] == ["\twhat\tfound", "ok\tone\tworks"]
    assert "two\tmend it" in capsys.readouterr().out


@pytest.mark.parametrize(("used", "level"), [(0.05, "ok"), (1.4, "warning")])
def test_other_processes_that_use_the_cores_are_a_warning(used, level, monkeypatch):
    monkeypatch.setattr(machine_checks.load, "used_by_others", lambda *_: used)
    (found,) = machine_checks.other_processes(2)
    assert (found.level, f"other processes use {used:.1f} of" in found.text) == (level, True)
    assert bool(found.cure) == (level == "warning")
