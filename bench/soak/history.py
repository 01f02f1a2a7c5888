"""The answers to clients of a store must be linearizable while some clients are killed and stopped.

Eight clients make random calls on a few keys; one history uses a TCPStore, the next a FileStore. A client writes each
request before the call, and the answer after it, to a file, which stays if the client is killed. Every half second the
clients use new keys, so that each key has few calls that a kill has interrupted, and that may or may not have taken
effect.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastcoll import FileStore, Store, StoreTimeoutError, TCPStore

from .fleet import Child, Fleet
from .linearizable import PENDING, UNSEEN, Event, first_impossible
from .report import Report

CLIENTS, KEYS = 8, 3
HISTORY_SECONDS = 10
_ERA_SECONDS = 0.5
_WAIT_SECONDS = 0.02  # timeout of get and wait for a missing key
_TIMEOUT_SECONDS = 15.0  # timeout of other calls, which may wait for the lock of a stopped client
_WORDS = [b"1", b"2", b"37"]  # numbers, so that add always works


def run(amount: int, seed: int) -> Report:
    """Run histories for `amount` seconds in all.

    Each takes about ten seconds, or less if this is necessary to have one on each kind of store.
    """
    report, calls, kills, pauses = Report(), 0, 0, 0
    kinds = {"TCPStore": _tcp, "FileStore": _file}
    rounds = max(len(kinds), amount // HISTORY_SECONDS)
    for number in range(rounds):
        name = list(kinds)[number % len(kinds)]
        dice = random.Random(f"{seed}/{number}")
        events, killed, paused = _history(kinds[name], amount / rounds, dice)
        calls, kills, pauses = calls + sum(map(len, events.values())), kills + killed, pauses + paused
        for key, history in events.items():
            if (event := first_impossible(history)) is not None:
                near = [
                    str(each) for each in history if each.ended > event.began and each.began < event.ended
                ]
                report.fail(f"history {number} of {name}, {key}: no order explains {event}; with it: {near}")
    report.done = (
        f"{rounds} histories of {amount / rounds:.0f} s, {CLIENTS} clients, {kills} killed, {pauses} stopped"
    )
    report.figures = {"calls": f"{calls:,}", "not linearizable": str(len(report.faults))}
    return report


def _tcp(fleet: Fleet) -> Callable[[], Store]:
    fleet.start(serve)
    fleet.await_turns([0], 1, 30.0)
    port = int(fleet.marks[0])
    return lambda: TCPStore("127.0.0.1", port, timeout=_TIMEOUT_SECONDS)


def _file(fleet: Fleet) -> Callable[[], Store]:
    return lambda: FileStore(str(fleet.folder / "store"), timeout=_TIMEOUT_SECONDS)


def serve(fleet: Fleet) -> None:
    """Serve a store until this process is killed."""
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        fleet.marks[0] = store.port
        fleet.turns[0] = 1
        signal.pause()


def _history(
    make: Callable[[Fleet], Callable[[], Store]], seconds: float, dice: random.Random
) -> tuple[dict[str, list[Event]], int, int]:
    """Run one history.

    Returns:
        the calls by key, and how many clients were killed and stopped.
    """
    killed = paused = 0
    with Fleet() as fleet:
        opens, begin = make(fleet), time.monotonic()
        files: list[Path] = []

        def start() -> Child:
            files.append(fleet.folder / f"calls-{len(files)}")
            return fleet.start(work, opens, files[-1], begin, seconds, dice.random())

        clients = [start() for _ in range(CLIENTS)]
        while time.monotonic() < begin + seconds:
            time.sleep(dice.uniform(0.05, 0.25))
            place = dice.randrange(CLIENTS)
            if dice.random() < 0.5:
                clients[place].signal(signal.SIGKILL)
                clients[place] = start()
                killed += 1
            else:
                clients[place].signal(signal.SIGSTOP)
                time.sleep(dice.uniform(0.0, 0.1))
                clients[place].signal(signal.SIGCONT)
                paused += 1
        for client in clients:
            end = fleet.reap(client, begin + seconds + 2 * _TIMEOUT_SECONDS)
            if end.code:
                raise AssertionError(f"a client failed: {end}")
        events: dict[str, list[Event]] = defaultdict(list)
        for file in files:
            if file.exists():
                _read(file, events)
    return events, killed, paused


def _read(file: Path, events: dict[str, list[Event]]) -> None:
    """Add the calls that one client has written; its last call may lack an answer."""
    asked: list[Any] | None = None
    for line in file.read_bytes().splitlines():
        fields = json.loads(line)
        if len(fields) == 4:
            asked = fields
            continue
        assert asked is not None, "an answer without a request"
        key, op, words, began = asked
        if fields[0] != "unknown":
            events[key].append(Event(op, _words(words), _decoded(fields[0]), began, fields[1]))
        asked = None
    if asked is not None:
        key, op, words, began = asked
        events[key].append(Event(op, _words(words), UNSEEN, began, PENDING))


def _words(words: list[Any]) -> tuple[Any, ...]:
    return tuple(word.encode() if isinstance(word, str) else word for word in words)


def _decoded(answer: Any) -> Any:
    """Decode an answer from JSON.

    A value was written as ["..."], to distinguish it from "timeout".
    """
    return answer[0].encode() if isinstance(answer, list) else answer


def work(
    fleet: Fleet, opens: Callable[[], Store], file: Path, begin: float, seconds: float, seed: float
) -> None:
    """Call at random, and write each call and its answer."""
    dice = random.Random(seed)
    with opens() as store, file.open("ab", buffering=0) as log:
        while (now := time.monotonic()) < begin + seconds:
            key = f"{int((now - begin) / _ERA_SECONDS)}/{dice.randrange(KEYS)}"
            op = dice.choice(
                ("set", "get", "wait", "add", "add", "compare_set", "compare_set", "delete", "check")
            )
            words = {"set": 1, "compare_set": 2}.get(op, 0)
            given: list[Any] = [
                dice.choice([*_WORDS, b""] if words == 2 else _WORDS).decode() for _ in range(words)
            ]
            if op == "compare_set" and not given[1]:
                given[1] = "9"
            if op == "add":
                given = [dice.randrange(1, 9)]
            log.write(json.dumps([key, op, given, time.monotonic()]).encode() + b"\n")
            answer = _ask(store, key, op, given)
            log.write(json.dumps([answer, time.monotonic()]).encode() + b"\n")


def _ask(store: Store, key: str, op: str, given: list[Any]) -> Any:
    """Make one call; return its answer in the form in which it is written as JSON."""
    if op in ("get", "wait"):
        store.set_timeout(_WAIT_SECONDS)
        try:
            return store.wait([key]) if op == "wait" else [store.get(key).decode()]
        except StoreTimeoutError as error:
            return "unknown" if "the lock of" in str(error) else "timeout"  # a stopped client holds the lock
        finally:
            store.set_timeout(_TIMEOUT_SECONDS)
    if op == "check":
        return store.check([key])
    if op == "compare_set":
        return [store.compare_set(key, *given).decode()]
    if op == "delete":
        return store.delete_key(key)
    return store.add(key, given[0]) if op == "add" else store.set(key, given[0])
