"""A man in the middle of a group's TCP connections cuts, stalls, doubles or changes what they carry.

Two ranks make a group over TCP, reduce arrays and send messages. The connections that one of them accepts pass through
a proxy, which does one harm to the first connection and direction that reaches a certain number of bytes. Half of the
groups have a secret and the other half have none; half of those with a secret encrypt. Each call must succeed, or raise
within its timeout an error that names the other rank. Without encryption the bytes of arrays have no checksum
(docs/security.md): if such a byte is changed, the result may be wrong, but in one element if it was one bit.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections import Counter
from typing import NamedTuple

import numpy as np

import fastcoll as dist
from fastcoll import PrefixStore, TCPStore
from fastcoll.core.work import Timeout
from fastcoll.errors import FastcollError

from .fleet import Fleet
from .proxy import Proxy
from .report import Report
from .watching import PORT

HARMS = ("cut", "stall", "stall for good", "double", "flip")
_TIMEOUT = 3.0  # of the group
_LATE_SECONDS = 4.0  # by which a call may exceed its timeout; a lost connection is explained within 2 s
_STALL_SECONDS = 1.0
_CALLS, _COUNT = 30, 100  # pairs of calls, and elements of each array
_MOST_AT = _CALLS * (_COUNT * 8 + 96)  # about the bytes that a connection carries in one direction
_END_SECONDS = 60.0


class Case(NamedTuple):
    """One harm: its kind, the rank whose connections pass through the proxy, where it is done, and the protection."""

    harm: str
    rank: int
    at: int  # bytes of one connection in one direction
    amount: int  # how many bytes are doubled, or which bit is flipped
    has_secret: bool
    encrypts: bool = False


class Outcome(NamedTuple):
    """What happened to one rank."""

    calls: int
    wrong: int  # elements of results
    error: str
    is_named: bool  # the error is a FastcollError that names the other rank
    late: float  # seconds that the last call took beyond its timeout


def draw(seed: int, number: int) -> Case:
    """Return a case; a seed and a number always give the same one."""
    dice = random.Random(f"{seed} {number}")
    at = dice.choice((dice.randrange(300), dice.randrange(3000), dice.randrange(_MOST_AT)))
    case = Case(HARMS[number % len(HARMS)], dice.randrange(2), at, dice.randrange(1, 64), dice.random() < 0.5)
    return case._replace(encrypts=case.has_secret and dice.random() < 0.5)


def run(amount: int, seed: int) -> Report:
    """Harm `amount` groups, one after the other."""
    report, outcomes = Report(done=f"{amount:,} groups"), Counter[str]()
    for number in range(amount):
        case = draw(seed, number)
        for rank, text in enumerate(run_case(case)):
            kind, _, fault = text.partition(": ")
            outcomes[f"{case.harm} {kind}"] += 1
            if fault:
                report.fail(f"{case}, rank {rank}: {text}")
    report.figures |= {what: str(count) for what, count in sorted(outcomes.items())}
    return report


def run_case(case: Case) -> list[str]:
    """Run one group; return `survived`, `named` or `wrong data` for each rank, or a fault, which has a colon."""
    with Fleet() as fleet:
        children = [fleet.start(_work, rank, case) for rank in range(2)]
        ends = [fleet.reap(child, time.monotonic() + _END_SECONDS) for child in children]
    texts = []
    for end in ends:
        if end.result is None or end.code or end.hung:
            texts.append(f"failed: code {end.code}, {'hung, ' * end.hung}{end.error}")
        else:
            texts.append(_judged(case, end.result))
    return texts


def _judged(case: Case, outcome: Outcome) -> str:
    may_be = 0 if case.encrypts else {"flip": 1, "double": outcome.wrong}.get(case.harm, 0)
    if outcome.wrong > may_be:
        return f"wrong data: {outcome.wrong} elements"
    if outcome.late > _LATE_SECONDS:
        return f"late: {outcome.late:.1f} s after the timeout: {outcome.error}"
    if outcome.error:
        return "named" if outcome.is_named else f"not named: {outcome.error}"
    return "wrong data" if outcome.wrong else "survived"


def _work(fleet: Fleet, rank: int, case: Case) -> Outcome:
    os.environ["FASTCOLL_SECRET" if case.has_secret else "FASTCOLL_INSECURE"] = (
        "1" * 64 if case.has_secret else "1"
    )
    os.environ["FASTCOLL_ENCRYPT"] = str(int(case.encrypts))
    port = 0 if rank == 0 else fleet.await_mark(PORT)
    with _Between(case, rank, port, is_master=rank == 0) as store:
        fleet.marks[PORT] = store.port
        calls = wrong = 0
        began = time.monotonic()
        try:
            dist.init_process_group("tcp", None, _TIMEOUT, 2, rank, PrefixStore("job", store))
            for calls in range(_CALLS):
                began = time.monotonic()
                x = np.full(_COUNT, rank + 1.0)
                dist.all_reduce(x)
                wrong += np.count_nonzero(x != 3.0)
                began = time.monotonic()
                y = np.full(_COUNT, float(calls))
                if rank == 0:
                    dist.send(y, 1)
                else:
                    dist.recv(y, 0)
                wrong += np.count_nonzero(y != calls)
            dist.destroy_process_group()
        except FastcollError as error:
            late = time.monotonic() - began - _TIMEOUT
            return Outcome(
                calls, wrong, f"{type(error).__name__}: {error}", f"rank {1 - rank}" in str(error), late
            )
        finally:
            fleet.turns[rank] = 1
            fleet.await_turns(
                [0, 1], 1, _END_SECONDS
            )  # the store and the proxy are there until both have ended
        return Outcome(calls, wrong, "", True, 0.0)


class _Between(TCPStore):
    """A store that publishes the address of a proxy as that of the harmed rank."""

    def __init__(self, case: Case, rank: int, port: int, is_master: bool) -> None:
        super().__init__("127.0.0.1", port, is_master=is_master, wait_for_workers=False, timeout=_END_SECONDS)
        self._harm = Harm(case) if case.rank == rank else None

    def set(self, key: str, value: str | bytes) -> None:
        super().set(key, self._published(key, value))

    def exchange(self, key: str, value: str | bytes, wanted: str, timeout: Timeout = None) -> bytes:
        return super().exchange(key, self._published(key, value), wanted, timeout)

    def _published(self, key: str, value: str | bytes) -> str | bytes:
        """Return the value of a key, with the proxy's port if it is the harmed rank's address."""
        folder, _, rank = key.rpartition("/")
        if self._harm is None or not folder.endswith("group/member") or int(rank) != self._harm.case.rank:
            return value
        addresses = json.loads(value)
        proxy = Proxy((addresses["addresses"][0], addresses["ports"][0]), change=self._harm)
        return json.dumps(addresses | {"ports": [proxy.port]})


class Harm:
    """The `change` of a proxy: it does the harm of a case once."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._lock = threading.Lock()
        self._is_done = False

    def __call__(self, at: int, data: bytes) -> bytes:
        with self._lock:
            if self._is_done or not at <= self.case.at < at + len(data):
                return data
            self._is_done = True
        return self._do(data, self.case.at - at)

    def _do(self, data: bytes, here: int) -> bytes:
        amount = self.case.amount
        match self.case.harm:
            case "cut":
                raise ConnectionAbortedError
            case "stall":
                time.sleep(_STALL_SECONDS)
            case "stall for good":
                threading.Event().wait()
            case "double":
                return data[: here + amount] + data[here:]
            case "flip":
                return data[:here] + bytes([data[here] ^ 1 << amount % 8]) + data[here + 1 :]
        return data
