"""Broken requests to a store's server, and broken answers to its clients."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fastcoll import TCPStore
from fastcoll.errors import StoreError
from fastcoll.store import frames, store_protocol, tcp_store
from fastcoll.store.secret import job_secret
from fastcoll.store.table import SHAPES, Op, StoreRequest

from .fleet import Fleet
from .mutations import mutated
from .watching import ATTACKER, OVER, PORT, Seen

HERE = "127.0.0.1"
HEADER = ((0, 1), (1, 1), (2, 2), (4, 4), (8, 8))
_TOGETHER = 5  # at most so many frames on one connection
_CHECK_EVERY = 100  # connections
_CALL_SECONDS = 0.2  # timeout of the calls whose answers are broken
_PATIENCE = 10.0


def hold_store(fleet: Fleet, seen: Seen, count: int) -> None:
    """Serve a store until the attack is over."""
    with TCPStore(HERE, 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE) as store:
        fleet.marks[PORT] = store.port
        fleet.await_mark(OVER)
        if store.compare_set("end", "", "1") != b"1":
            seen.fault("the store does not work after the attack")


def attack_store(fleet: Fleet, count: int, seed: int) -> None:
    """Send broken requests; between them an honest client must get its answers."""
    port, dice, sent, connections = fleet.await_mark(PORT), random.Random(seed), 0, 0
    with TCPStore(HERE, port, timeout=_PATIENCE) as honest:
        while sent < count:
            deadline = time.monotonic() + _PATIENCE
            connection = tcp_store.connect(HERE, port, job_secret(), _PATIENCE)
            with suppress(StoreError):  # the server has dropped it
                for _ in range(dice.randrange(1, _TOGETHER + 1)):
                    sent += 1
                    connection.send(mutated(dice, _request(dice), HEADER)[1], deadline)
            connection.close()
            connections += 1
            fleet.turns[ATTACKER] = sent
            if connections % _CHECK_EVERY == 0:
                assert honest.compare_set("honest", "", "1") == b"1", "another answer came"


def _request(dice: random.Random) -> bytes:
    """Return a valid request that does not wait for long."""
    op = dice.choice(list(Op))
    fewest, most, values = SHAPES[op]
    number = dice.randrange(fewest, min(most, 3) + 1)
    keys = tuple(b"key%d" % dice.randrange(50) for _ in range(number))
    contents = tuple(dice.choice((b"", b"1", b"-7", b"x" * 100)) for _ in range(values * number))
    return frames.encode_request(StoreRequest(op, keys, contents, dice.choice((0.0, 0.01, 1.0))))


def use_store(fleet: Fleet, seen: Seen, count: int) -> None:
    """Make calls of a store whose server gives broken answers."""
    tcp_store.GRACE_SECONDS = _CALL_SECONDS
    port, dice = fleet.await_mark(PORT), random.Random(0)
    with TCPStore(HERE, port, timeout=_CALL_SECONDS) as store:
        calls: list[Callable[[], Any]] = [
            lambda: store.set("a", "1"),
            lambda: store.get("a"),
            lambda: store.add("n", 1),
            lambda: store.check(["a", "b"]),
            lambda: store.wait(["a"], 0.1),
            lambda: store.multi_get(["a", "n"]),
            lambda: store.peek(["a", "b"]),
            lambda: store.compare_set("a", "1", "1"),
            lambda: store.set_new(["a", "c"], ["1", "2"]),
            lambda: store.exchange("a", "1", "b", 0.1),
            lambda: store.queue_push("q", "1"),
            lambda: store.queue_pop("q", block=False),
            lambda: store.delete_key("a"),
            store.num_keys,
            store.list_keys,
        ]
        while not fleet.marks[OVER]:
            seen.attempt(dice.choice(calls), "")


def answer_badly(fleet: Fleet, count: int, seed: int) -> None:
    """Serve a store that sends `count` broken answers."""
    dice, encode = random.Random(seed), store_protocol.encode_frame

    def broken(*args: Any, **named: Any) -> bytes:
        fleet.turns[ATTACKER] += 1
        whole = encode(*args, **named)
        # At least one byte: a server that does not answer at all is a slow one to its client, which then waits longer.
        return mutated(dice, whole, HEADER)[1] or whole[:1]

    store_protocol.encode_frame = broken  # type: ignore[assignment]
    with TCPStore(HERE, 0, is_master=True, wait_for_workers=False, timeout=_PATIENCE) as store:
        fleet.marks[PORT] = store.port
        while fleet.turns[ATTACKER] < count:
            time.sleep(0.005)
        fleet.marks[OVER] = 1.0
        time.sleep(4 * _CALL_SECONDS)  # the victim's last call ends
