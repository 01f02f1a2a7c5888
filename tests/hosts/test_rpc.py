"""Remote calls between four hosts, until a worker is killed or its host vanishes. tests/rpc has all kinds of calls."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hosts.network import Network
from hosts.nodes import await_line, finish, output_of, ranks_on

Join = Callable[..., Network]

# The last worker dies, or its host vanishes, while each other one has two calls to it. The last one of those is made
# when the host has vanished.
PROGRAM = """
import operator, os, signal, sys, threading, time
import numpy as np
import fastcoll
from fastcoll import rpc
from fastcoll.testing.worker import clock_at_work

LIMIT = 200.0
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
here = threading.Semaphore(0)

def hold():
    time.sleep(LIMIT)

def arrive():
    here.release()

def await_file(name):
    while not os.path.exists(f"{sys.argv[1]}/{name}"):
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
shared = [os.readlink(each.path) for each in os.scandir("/proc/self/fd") if os.path.islink(each.path)]
say("called", *(name for name in shared if "fastcoll-rpc" in name))
call = None if rank == size - 1 else rpc.rpc_async(size - 1, hold, timeout=LIMIT)
rpc.rpc_sync("w0", arrive)
say("here")
if call is None:
    hold()
if sys.argv[2] == "vanish":
    await_file("vanished")
late = rpc.rpc_async(size - 1, hold, timeout=LIMIT)
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
open(f"{sys.argv[1]}/{rank}", "w").close()  # a rank that detects a death leaves at once
for other in range(size - 1):
    await_file(str(other))
try:
    rpc.shutdown(timeout=LIMIT)
except fastcoll.PeerDiedError:
    say("over")
"""


@pytest.mark.timed
@pytest.mark.parametrize(("how", "seconds"), [("die", 2.0), ("vanish", 12.0)])
def test_calls_until_a_worker_is_lost(join_hosts: Join, tmp_path: Path, how: str, seconds: float) -> None:
    """All others must name it in time, be able to call one another, and leave."""
    network = join_hosts(4, own_pids=True)
    (tmp_path / "program.py").write_text(PROGRAM)
    with ranks_on(network.hosts, [str(tmp_path / "program.py"), str(tmp_path), how]) as nodes:
        if how == "vanish":
            for node in nodes:
                await_line(node, "here", nodes)
            network.cut(network.hosts[3])
            (tmp_path / "vanished").touch()
            began = time.monotonic()
        finish(nodes[:3])
        if how == "die":
            assert nodes[3].wait_for_code() == -9, output_of(nodes)
            began = float(re.findall(r"^dies ([\d.]+)$", nodes[3].out, re.MULTILINE)[0])
        assert [node.code for node in nodes[:3]] == [0, 0, 0], output_of(nodes)
        # "called" is followed by the shared memory that a worker has, which cannot be between hosts.
        assert all("called\n" in node.out for node in nodes), output_of(nodes)
        last = r"worker w3, rank 3 \(pid \d+ on host3\), died; the call of hold is lost"
        said = rf"^lost \(3,\) ([\d.]+) .*{last}.*\n(?:.*\n)*late .* died.*\n(?:.*\n)*over\n"
        found = [re.findall(said, node.out, re.MULTILINE) for node in nodes[:3]]
        assert all(len(times) == 1 for times in found), output_of(nodes)
        assert max(float(times[0]) for times in found) - began < seconds
