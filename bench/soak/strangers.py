"""Garbage is sent to every port of a job.

The store's server and the ranks must not fail, grow or accept it. There are a store, a client that measures the latency
of its calls, two ranks that communicate over TCP, and a stranger that connects as fast as it can, from addresses all
over 127.0.0.0/8, to every port on which the store or a rank listens. The ranks are stopped for 0.25 s again and again,
so that connections queue at their listeners, as on a loaded machine.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import fastcoll as dist
from fastcoll import PrefixStore, TCPStore

from .fleet import Child, Fleet, resident_bytes
from .report import Report, percentile

MOST_BYTES = 8 << 20  # by which a process may grow
_WARM = 2000  # connections before memory is measured, so that allocations of first uses do not count
_OPEN = 100  # connections that the stranger keeps open; then it closes the oldest
_STORE, _CLIENT, _RANKS, _STRANGER = 0, 1, (2, 3), 4  # slots of the board
_SAMPLES = 4000
_STOPPED_SECONDS = 0.25

_PIDFD = "anon_inode:[pidfd]"
_Held = tuple[int, dict[str, str]]
_HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
_TLS = bytes.fromhex("16030100c8010000c40303") + bytes(190)
_REDIS = b"*1\r\n$4\r\nPING\r\n"


def run(amount: int, seed: int) -> Report:
    """Make `amount` connections, to each port in turn."""
    report = Report()
    with Fleet() as fleet:
        store = fleet.start(serve)
        fleet.await_turns([_STORE], 1, 30.0)
        port = int(fleet.marks[_STORE])
        client = fleet.start(call_store, port)
        ranks = [fleet.start(work, rank, port) for rank in range(2)]
        fleet.await_turns([_CLIENT, *_RANKS], 100, 60.0)
        job = {"store": store, "rank 0": ranks[0], "rank 1": ranks[1]}
        addresses = sorted({address for child in job.values() for address in listening(child.pid)})
        _strange(fleet, addresses, _WARM, seed)
        before = {name: _held(child) for name, child in job.items()}
        quiet = _latencies(fleet, 1.0)
        began, turns = time.monotonic(), fleet.turns.copy()
        stranger = fleet.start(knock, addresses, amount, seed + 1)
        noisy = _latencies(fleet, 1e9, lambda: not stranger.pipe.poll())
        took = time.monotonic() - began
        end = fleet.reap(stranger, time.monotonic() + 5.0)
        if end.result is None:
            report.fail(f"the stranger: {end}")
        for place, who in zip((_CLIENT, *_RANKS), ("the client", "rank 0", "rank 1"), strict=True):
            if fleet.turns[place] <= turns[place] + 10:
                report.fail(
                    f"{who} got no further than from call {turns[place]:.0f} to {fleet.turns[place]:.0f}"
                )
        for name, child in job.items():
            _judge(name, before[name], _settled(child, before[name]), report)
        fleet.marks[_STRANGER] = 1.0  # all processes end
        for name, child in {"the client": client, **job}.items():
            ended = fleet.reap(child, time.monotonic() + 20.0)
            if ended.code or ended.hung:
                report.fail(f"{name}: {ended.error}")
    report.done = f"{amount:,} connections to {len(addresses)} ports"
    report.figures["rate"] = f"{amount / took:,.0f} a second"
    report.figures["a client's set and get"] = (
        f"{percentile(quiet, 0.5) * 1e6:.0f} us before, {percentile(noisy, 0.5) * 1e6:.0f} us meanwhile (p50)"
    )
    return report


def listening(pid: int) -> list[tuple[str, int]]:
    """Return the IPv4 addresses and ports at which a process listens."""
    links = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    found = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and fields[9] in inodes:
            address, port = fields[1].split(":")
            host = socket.inet_ntoa(struct.pack("<I", int(address, 16)))
            found.append(("127.0.0.1" if host == "0.0.0.0" else host, int(port, 16)))
    return found


def _held(child: Child) -> tuple[int, dict[str, str]]:
    """Return a process's memory and descriptors.

    pidfds are left out, because ranks open them for a while when they wait for others.
    """
    files, folder = dict[str, str](), f"/proc/{child.pid}/fd"
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            if (link := os.readlink(f"{folder}/{name}")) != _PIDFD:
                files[name] = link
    return resident_bytes(child.pid), files


def _judge(name: str, before: _Held, after: _Held, report: Report) -> None:
    grown = after[0] - before[0]
    report.figures[f"{name} grew by"] = f"{grown / 2**20:.1f} MiB"
    if grown > MOST_BYTES:
        report.fail(f"{name} has grown by {grown / 2**20:.1f} MiB")
    if len(after[1]) > len(before[1]):
        report.fail(f"{name} has more descriptors open: {after[1].items() - before[1].items()}")


def _settled(child: Child, before: _Held) -> _Held:
    """Return a process's resources once they have settled.

    That is when no group is being made and the stranger's connections are closed. The wait is 15 s at most, because
    half-open connections time out after 5 or 10 s.
    """
    end = time.monotonic() + 15.0
    while len((held := _held(child))[1]) > len(before[1]) and time.monotonic() < end:
        time.sleep(0.01)
    return held


def _strange(fleet: Fleet, addresses: list[tuple[str, int]], amount: int, seed: int) -> None:
    fleet.reap(fleet.start(knock, addresses, amount, seed), time.monotonic() + 120.0)


def _latencies(fleet: Fleet, seconds: float, goes_on: Callable[[], bool] = lambda: True) -> list[float]:
    """Sample the latency of the client's calls."""
    seen, end = [], time.monotonic() + seconds
    while goes_on() and time.monotonic() < end:
        time.sleep(0.01)
        seen.append(float(fleet.times[_CLIENT]))
    return seen[-_SAMPLES:]


def serve(fleet: Fleet) -> None:
    """Serve the store until the soak ends."""
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        fleet.marks[_STORE] = store.port
        fleet.turns[_STORE] = 1
        while not fleet.marks[_STRANGER]:
            time.sleep(0.05)
        time.sleep(1.0)  # meanwhile the ranks, which still use the store, leave


def call_store(fleet: Fleet, port: int) -> None:
    """Set and get, and write the latency on the board."""
    with TCPStore("127.0.0.1", port, timeout=30.0) as store:
        while not fleet.marks[_STRANGER]:
            began, text = time.monotonic(), str(fleet.turns[_CLIENT])
            store.set("turn", text)
            assert store.get("turn") == text.encode(), "another value came back"
            fleet.times[_CLIENT] = time.monotonic() - began
            fleet.turns[_CLIENT] += 1
            time.sleep(0.002)


def work(fleet: Fleet, rank: int, port: int) -> None:
    """Reduce over TCP; in every 20th turn also make a group, which opens connections."""
    with TCPStore("127.0.0.1", port, timeout=30.0) as store:
        dist.init_process_group("tcp", None, 30.0, 2, rank, PrefixStore("job", store))
        over = False
        while not over:
            turn = fleet.turns[_RANKS[rank]]
            x = np.array([turn, float(fleet.marks[_STRANGER] and rank == 0)])
            dist.all_reduce(x)
            assert x[0] == 2 * turn, f"{x[0]} instead of {2 * turn}"
            over = bool(x[1])
            if turn % 20 == 19:
                group = dist.new_group()
                dist.barrier(group)
                dist.destroy_process_group(group)
            fleet.turns[_RANKS[rank]] += 1
            time.sleep(0.002)
        dist.destroy_process_group()


def knock(fleet: Fleet, addresses: list[tuple[str, int]], amount: int, seed: int) -> int:
    """Connect `amount` times and send garbage; return how many connections took it."""
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    dice, left_open, sent = random.Random(seed), deque[socket.socket](), 0
    over = threading.Event()
    starving = threading.Thread(target=_starve, args=([fleet.children[place].pid for place in _RANKS], over))
    starving.start()
    for number in range(amount):
        connection = socket.socket()
        connection.settimeout(5.0)
        with contextlib.suppress(OSError):
            home = f"127.{dice.randrange(256)}.{dice.randrange(256)}.{dice.randrange(1, 255)}"
            connection.bind((home, 0))
            connection.connect(addresses[number % len(addresses)])
            connection.sendall(_garbage(dice))
            sent += 1
        left_open.append(connection)
        if len(left_open) > (_OPEN if number % 50 == 0 else 0):
            last = left_open.popleft() if number % 50 == 0 else left_open.pop()
            last.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # no TIME_WAIT
            last.close()
    for connection in left_open:
        connection.close()
    over.set()
    starving.join()
    return sent


def _starve(pids: Sequence[int], over: threading.Event) -> None:
    """Stop ranks again and again, and let them run in between."""
    dice = random.Random(0)
    while not over.wait(dice.uniform(0.05, 0.3)):
        for signum in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            time.sleep(_STOPPED_SECONDS if signum == signal.SIGSTOP else 0.0)


def _garbage(dice: random.Random) -> bytes:
    """Return random bytes, another protocol's request, nothing, or a begun opening."""
    kind = dice.randrange(10)
    if kind < 3:
        return dice.randbytes(dice.randrange(1, 200))
    if kind < 6:
        return (_HTTP, _TLS, _REDIS)[kind - 3]
    if kind == 6:
        return b""
    if kind == 7:
        return dice.randbytes(1 << 16)
    from fastcoll.store.opening import MAGIC, OPENING_SIZE

    return MAGIC + dice.randbytes(dice.randrange(OPENING_SIZE - len(MAGIC) + 100))
