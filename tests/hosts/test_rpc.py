"""Remote calls between four hosts: values, references and gradients; a worker that is killed, and a host that vanishes.

test_strangers.py attacks the listening sockets of workers.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.network import Network
from hosts.nodes import Node, await_line, finish, output_of, ranks_on

Join = Callable[..., Network]

PROGRAM = """
import gc, operator, os, signal, sys, threading, time
import numpy as np
import fastcoll
from fastcoll import rpc
from fastcoll.testing.worker import clock_at_work

LIMIT = 200.0
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
over, ended, here = threading.Event(), threading.Event(), threading.Semaphore(0)

class Counter:
    def __init__(self):
        self.total = np.zeros(300_000)
    def add(self, number):
        self.total += number
        return self.total[-1]
    def __del__(self):
        ended.set()

def down(depth):
    return depth and 1 + rpc.rpc_sync((rpc.get_worker_info().id + 1) % size, down, args=(depth - 1,))

def pass_on(counter, to):
    counter.rpc_sync().add(to)
    return to if to == size - 1 else rpc.rpc_sync(to + 1, pass_on, args=(counter, to + 1))

def has_ended():
    return ended.wait(LIMIT)

def hold():
    return over.wait(LIMIT)

def shared():
    names = [os.readlink(f"/proc/self/fd/{each.name}") for each in os.scandir("/proc/self/fd") if each.is_symlink()
             and os.path.lexists(each.path)]
    return [name for name in names if "fastcoll-rpc" in name]

def arrive():
    here.release()

def await_file(name):
    end = time.monotonic() + LIMIT
    while not os.path.exists(f"{sys.argv[1]}/{name}"):
        assert time.monotonic() < end, name
        time.sleep(0.01)

def die():
    say("dies", time.monotonic())
    os.kill(os.getpid(), signal.SIGKILL)

def say(*words):
    print(*words, flush=True)

rpc.init_rpc(f"w{rank}")
for to in range(size):
    for count in (3, 5_000, 1_000_000):
        x = np.arange(count) + rank
        assert (rpc.rpc_sync(to, operator.add, args=(x, to)) == x + to).all()
assert down(16) == 16
if rank == 0:
    counter = rpc.remote("w1", Counter)
    assert pass_on(counter, 0) == size - 1
    assert counter.to_here().total[0] == sum(range(size))
    del counter
    assert rpc.rpc_sync("w1", has_ended)
say("called", *shared())
if rank < size - 1:
    call = rpc.rpc_async(size - 1, hold, timeout=LIMIT)
    rpc.rpc_sync("w0", arrive)
    say("here")
    if sys.argv[2] == "vanish":
        await_file("vanished")
    late = rpc.rpc_async(size - 1, hold, timeout=LIMIT)  # under way as the host vanishes
    if rank == 0 and sys.argv[2] == "die":
        assert all(here.acquire(timeout=LIMIT) for _ in range(size))
        rpc.rpc_async(size - 1, die)
    waited = time.monotonic() - clock_at_work()  # for a core, which does not count
    try:
        call.wait()
    except fastcoll.PeerDiedError as error:
        say("lost", error.ranks, clock_at_work() + waited, error)
    try:
        late.wait()
    except fastcoll.PeerDiedError as error:
        say("late", error)
    assert rpc.rpc_sync((rank + 1) % (size - 1), operator.neg, args=(rank,)) == -rank
    open(f"{sys.argv[1]}/{rank}", "w").close()  # who has seen a death leaves by it, without the others
    for other in range(size - 1):
        await_file(str(other))
    try:
        rpc.shutdown(timeout=LIMIT)
    except fastcoll.PeerDiedError:
        say("over")
else:
    rpc.rpc_sync("w0", arrive)
    say("last")
    hold()
"""


def check_lost(nodes: list[Node]) -> list[float]:
    """Check that the other workers detected the end of the last one, could call one another, and left; return times."""
    *others, _ = nodes
    assert [node.code for node in others] == [0] * len(others), output_of(nodes)
    times = []
    for node in others:
        lost = re.search(r"^lost \((\d),\) ([\d.]+) (.*)$", node.out, re.MULTILINE)
        assert lost, output_of(nodes)
        assert int(lost[1]) == len(others)
        assert f"worker w{len(others)}, rank {len(others)} (pid " in lost[3]
        assert f"on host{len(others)}), died; the call of hold is lost" in lost[3]
        assert re.search(r"^late .* died", node.out, re.MULTILINE), output_of(nodes)
        assert "\nover\n" in node.out, output_of(nodes)
        times.append(float(lost[2]))
    return times


def until_the_end(network: Network, tmp_path: Path, how: str) -> float:
    """Call until the last worker is killed or its host vanishes; return the seconds until the others detect it."""
    (tmp_path / "program.py").write_text(PROGRAM)
    words = [str(tmp_path / "program.py"), str(tmp_path), how]
    with ranks_on(network.hosts, words) as nodes:
        if how == "die":
            finish(nodes)
            died = re.search(r"^dies ([\d.]+)$", nodes[3].out, re.MULTILINE)
            assert died, output_of(nodes)
            assert nodes[3].code == -9, output_of(nodes)
            began = float(died[1])
        else:
            for node, line in zip(nodes, ["here", "here", "here", "last"], strict=True):
                await_line(node, line, nodes)
            network.cut(network.hosts[3])
            (tmp_path / "vanished").touch()
            began = time.monotonic()
            finish(nodes[:3])
        # "called" is followed by the shared memory that a worker has, which cannot be between hosts.
        assert all("called\n" in node.out for node in nodes), output_of(nodes)
        return max(check_lost(nodes)) - began


def test_calls_between_hosts_until_a_worker_is_killed(join_hosts: Join, tmp_path: Path) -> None:
    until_the_end(join_hosts(4, own_pids=True), tmp_path, "die")


@pytest.mark.timed
@pytest.mark.parametrize(("how", "seconds"), [("die", 2.0), ("vanish", 12.0)])
def test_a_lost_worker_is_known_in_time(join_hosts: Join, tmp_path: Path, how: str, seconds: float) -> None:
    assert until_the_end(join_hosts(4, own_pids=True), tmp_path, how) < seconds
