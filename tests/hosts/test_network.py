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


def reaches(host: Host, address: str, attempts: int = 300) -> bool:
    """Return whether a program at `address` answers; 300 attempts take a minute."""
    return host.namespace.run(sys.executable, "-c", ASK, address, str(attempts)) == "True\n"


def test_hosts_reach_one_another_on_every_link_until_one_vanishes(join_hosts: Join) -> None:
    network = join_hosts(2, links=2)
    one, two = network
    for address in [*two.addresses6, *reversed(two.addresses)]:
        answering = two.start([sys.executable, "-c", ANSWER, address], stdout=subprocess.PIPE)
        assert answering.process.stdout is not None
        with answering.process.stdout as lines:
            assert lines.readline() == b"bound\n"
            assert reaches(one, address)
            if address == two.address:
                network.cut(two)
                assert not reaches(one, address, attempts=2)
            answering.end()
    assert not reaches(one, "127.0.0.1", attempts=1)


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
    command, env = [sys.executable, "-c", script], {**os.environ, "PYTHONPATH": path}
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env).stdout
    for pid in map(int, printed.split()):
        try:
            process = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        assert select.select([process], [], [], 60)[0], f"process {pid} is left"
        os.close(process)
