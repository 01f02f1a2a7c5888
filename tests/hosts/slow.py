"""A slow network: a process forwards the packets between hosts, late, out of order, twice or not at all.

    python slow.py SEED PID...          a host for each PID; reads settings, a JSON object a line, until EOF

Each host's eth0 becomes a TUN device, which this process opened in the host's namespace. Each packet of IPv4 (others
are dropped) waits for its turn at the sender's rate, at most QUEUE_SECONDS, and then for a random time. The random
numbers depend on the seed and on the order of the packets, which the kernel's timing changes.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import json
import os
import random
import select
import struct
import subprocess
import sys
import time
from typing import Any

from hosts.network import Closing, Host, Network

_CLONE_NEWNET, _TUNSETIFF, _TUN_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x1001
QUEUE_SECONDS = 0.5
# One-way latency in seconds; shares of packets that are lost, and duplicated; bytes per second that a host sends; pairs
# of hosts [source, target] between which all packets are lost.
QUICK = {"least": 0.0, "most": 0.0, "loss": 0.0, "twice": 0.0, "rate": 12.5e6, "cut": []}


def lacking() -> str | None:
    """Return why no TUN device can be made here, or None."""
    try:
        os.close(_open_tun("fastcoll-try"))
    except OSError as error:
        return f"no TUN devices here: {error}"
    return None


class SlowNetwork(Closing):
    """Makes the first link of a Network's hosts slow, until `close`; after that they reach no other host.

    Args:
        settings: those that differ from QUICK.
    """

    def __init__(self, network: Network, seed: int, **settings: Any) -> None:
        self.hosts = network.hosts
        for host in self.hosts:
            host.namespace.run("ip", "link", "delete", "eth0")
        pids = [str(host.namespace.pid) for host in self.hosts]
        self._settings = dict(QUICK)
        self._carrier = subprocess.Popen(
            [sys.executable, __file__, str(seed), *pids],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            self.change(**settings)
            for host in self.hosts:
                host.namespace.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
                host.namespace.run("ip", "link", "set", "eth0", "up")
        except BaseException:
            self.close()
            raise

    def change(self, **settings: Any) -> dict[str, int]:
        """Change settings for later packets; return the numbers of sent, lost and duplicated packets."""
        self._settings.update(settings)
        assert self._carrier.stdin is not None
        assert self._carrier.stdout is not None
        self._carrier.stdin.write(json.dumps(self._settings) + "\n")
        self._carrier.stdin.flush()
        counts: dict[str, int] = json.loads(self._carrier.stdout.readline())
        return counts

    def cut(self, *hosts: Host) -> None:
        """Lose all packets from and to these hosts."""
        others = [[a.index, b.index] for a in self.hosts for b in self.hosts if {a, b} & {*hosts}]
        self.change(cut=others)

    def lose(self, source: Host, target: Host) -> None:
        """Lose all packets from one host to another."""
        self.change(cut=[[source.index, target.index]])

    def mend(self) -> None:
        """Undo `cut` and `lose`."""
        self.change(cut=[])

    def close(self) -> None:
        """Stop forwarding. Calling it twice is fine."""
        for pipe in (self._carrier.stdin, self._carrier.stdout):
            if pipe is not None:
                pipe.close()
        self._carrier.wait()


# ---- the process that forwards ------------------------------------------------------------------------------


def _open_tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TUN_WITHOUT_HEADER))
    except BaseException:
        os.close(tun)
        raise
    return tun


def _open_tun_in(pid: str) -> int:
    with open(f"/proc/{pid}/ns/net", "rb") as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    return _open_tun("eth0")


class _Carrier:
    """The packets that are delayed: `due` has (time, number, target, packet)."""

    def __init__(self, seed: int, tuns: list[int]) -> None:
        self._random, self._tuns = random.Random(seed), tuns
        self._is = dict(QUICK)
        self._due: list[tuple[float, int, int, bytes]] = []
        self._free = [0.0] * len(tuns)  # when all packets of each sender have left
        self._counts = {"sent": 0, "lost": 0, "doubled": 0}

    def run(self) -> None:
        poller = select.poll()
        for fd in (0, *self._tuns):
            poller.register(fd, select.POLLIN)
        while True:
            grace = 1000 * (self._due[0][0] - time.monotonic()) if self._due else None
            for fd, _ in poller.poll(None if grace is None else max(grace, 0.0)):
                if fd:
                    self._take(self._tuns.index(fd))
                elif not (line := sys.stdin.readline()):
                    return
                else:
                    self._is = json.loads(line)
                    print(json.dumps(self._counts), flush=True)
            while self._due and self._due[0][0] <= time.monotonic():
                _, _, target, packet = heapq.heappop(self._due)
                _give(self._tuns[target], packet)

    def _take(self, source: int) -> None:
        try:
            packet = os.read(self._tuns[source], 1 << 16)
        except (BlockingIOError, OSError):  # it is not up yet
            return
        target = packet[19] - 1  # of 10.77.0.x
        if packet[0] >> 4 != 4 or packet[16:19] != b"\x0a\x4d\x00" or not 0 <= target < len(self._tuns):
            return
        self._counts["sent"] += 1
        lost, twice = (self._random.random() < self._is[what] for what in ("loss", "twice"))
        now = time.monotonic()
        self._free[source] = max(self._free[source], now)
        if self._free[source] - now > QUEUE_SECONDS:
            return
        self._free[source] += len(packet) / self._is["rate"]
        if lost or [source, target] in self._is["cut"]:
            self._counts["lost"] += 1
            return
        self._counts["doubled"] += twice
        for _ in range(1 + twice):
            due = self._free[source] + self._random.uniform(self._is["least"], self._is["most"])
            heapq.heappush(self._due, (due, self._counts["sent"], target, packet))


def _give(tun: int, packet: bytes) -> None:
    try:
        os.write(tun, packet)
    except OSError:  # it is full or down: the packet is lost
        return


if __name__ == "__main__":
    _Carrier(int(sys.argv[1]), [_open_tun_in(pid) for pid in sys.argv[2:]]).run()
