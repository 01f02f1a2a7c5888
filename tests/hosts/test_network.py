"""The hosts themselves: which hosts they reach, which resources they share, and that nothing is left behind."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.network import Host, Network

Join = Callable[..., Network]

# Lost datagrams are handled on both ends: the sender repeats its request until the answer comes.
ANSWER = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as own:
    own.bind((sys.argv[1], 5000))
    print("bound", flush=True)
    while True:
        own.sendto(*own.recvfrom(16))
"""
ASK = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
with socket.socket(family, socket.SOCK_DGRAM) as own:
    own.settimeout(0.2)
    for attempt in range(int(sys.argv[2])):
        try:
            own.sendto(b"hello", (sys.argv[1], 5000))
            print(own.recv(16) == b"hello")
            break
        except OSError:
            continue
    else:
        print(False)
"""


class Answering:
    """A program on a host that answers at one of its addresses."""

    def __init__(self, host: Host, address: str) -> None:
        self._started = host.start(
            [sys.executable, "-c", ANSWER, address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self._started.process.stdout is not None
        assert self._started.process.stdout.readline() == b"bound\n"

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        self._started.end()
        assert self._started.process.stdout is not None
        self._started.process.stdout.close()


def reaches(host: Host, address: str, attempts: int = 25) -> bool:
    """Return whether a program at `address` answers; twenty-five attempts take five seconds."""
    return host.namespace.run(sys.executable, "-c", ASK, address, str(attempts)) == "True\n"


@pytest.mark.long
@pytest.mark.parametrize("own_pids", [False, True])
def test_hosts_reach_one_another_on_every_link(join_hosts: Join, own_pids: bool) -> None:
    one, two, three = join_hosts(3, links=2, own_pids=own_pids)
    for address in [*two.addresses, *two.addresses6]:
        with Answering(two, address):
            assert reaches(one, address)
            assert reaches(three, address)
    assert not reaches(one, "127.0.0.1", attempts=1)


def test_a_host_vanishes_and_comes_back(join_hosts: Join) -> None:
    network = join_hosts(2)
    one, two = network
    with Answering(two, two.address):
        assert reaches(one, two.address)
        network.cut(two)
        assert not reaches(one, two.address, attempts=2)
        network.mend(two)
        assert reaches(one, two.address)
        network.unplug(two)
        assert not reaches(one, two.address, attempts=2)
    assert "NO-CARRIER" in two.namespace.run("ip", "link", "show", "eth0")


def test_which_resources_hosts_have_for_themselves(join_hosts: Join) -> None:
    one, two = join_hosts(2, own_pids=True)
    look = "hostname; stat -c %d /dev/shm; readlink /proc/self/ns/pid; ls /sys/class/net; pwd"
    names, shm, pids, interfaces, folders = zip(
        *(host.namespace.run("sh", "-c", look).replace("eth0\nlo", "eth0 lo").split("\n")[:5] for host in (one, two)),
        strict=True,
    )  # fmt: skip
    assert names == ("host0", "host1")
    assert len({*shm, str(os.stat("/dev/shm").st_dev)}) == 3
    assert len({*pids, os.readlink("/proc/self/ns/pid")}) == 3
    assert set(interfaces) == {"eth0 lo"}
    assert set(folders) == {os.getcwd()}
    for host in (one, two):
        assert host.namespace.run("getent", "hosts", "host1").split() == [two.address, "host1"]
    assert "host1" not in Path("/etc/hosts").read_text()
    two.namespace.run("touch", "/dev/shm/fastcoll-seen")
    assert os.listdir(Path(two.root, "dev/shm")) == ["fastcoll-seen"]
    assert not Path("/dev/shm/fastcoll-seen").exists()
    with pytest.raises(OSError, match="ls /nowhere: ls: cannot access"):
        one.namespace.run("ls", "/nowhere")


def test_hosts_may_share_memory_and_process_ids(join_hosts: Join) -> None:
    (host,) = join_hosts(1, own_shm=False)
    assert host.namespace.run("stat", "-c", "%d", "/dev/shm") == f"{os.stat('/dev/shm').st_dev}\n"
    assert host.namespace.run("readlink", "/proc/self/ns/pid") == os.readlink("/proc/self/ns/pid") + "\n"


@pytest.mark.parametrize("own_pids", [False, True])
def test_nothing_is_left_when_the_process_that_made_them_is_killed(own_pids: bool, join_hosts: Join) -> None:
    script = f"""
from hosts.network import Network
import os, signal
network = Network(2, own_pids={own_pids})
program = network.hosts[1].start(["sleep", "1000"])
print(*[host.namespace.pid for host in network], program.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    maker = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    printed = maker.communicate()[0]
    for pid in map(int, printed.split()):
        assert ended(pid), f"process {pid} is left"


def ended(pid: int) -> bool:
    """Return whether a process that was asked to end ends within a minute."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], 60)[0])
    finally:
        os.close(process)
