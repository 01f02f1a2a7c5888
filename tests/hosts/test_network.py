"""The hosts themselves: which resources they share, and that nothing is left behind.

That they reach one another, unless one is cut off, is what the other tests here and net/test_hosts.py need.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.network import Network

Join = Callable[..., Network]


def test_which_resources_hosts_have_for_themselves(join_hosts: Join) -> None:
    one, two = join_hosts(2, own_pids=True)
    look = "hostname; stat -c %d /dev/shm; readlink /proc/self/ns/pid; ls /sys/class/net; pwd"
    texts = [host.namespace.run("sh", "-c", look).replace("eth0\nlo", "eth0 lo") for host in (one, two)]
    names, shm, pids, interfaces, folders = zip(*(text.splitlines() for text in texts), strict=True)
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
