"""A check whether the calls of concurrent clients on one key are linearizable.

It is Wing and Gong's search in Lowe's form ("Testing for linearizability", 2017). The search handles the begins and
ends of calls in the order of time. It keeps all states that the key may have, each with the set of pending calls that
have taken effect already. When a call returns, only those states remain in which the call has taken effect and its
answer is right. A call that never returned, because its client was killed, may take effect at any later moment, or
never. Keys are independent, so each key is checked alone, as in Porcupine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

State = bytes | None
PENDING = float("inf")
UNSEEN = object()
"""The answer of a call that never returned."""


@dataclass(frozen=True)
class Event:
    """One call on one key: its arguments, its answer, its begin and its end."""

    op: str
    words: tuple[Any, ...]
    answer: Any
    began: float
    ended: float = PENDING

    def __str__(self) -> str:
        span = f"{self.began:.6f} to {self.ended:.6f}"
        return f"{self.op}{self.words} -> {'?' if self.answer is UNSEEN else self.answer!r} ({span})"


def _set(state: State, words: tuple[Any, ...]) -> tuple[State, Any]:
    return words[0], None


def _get(state: State, words: tuple[Any, ...]) -> tuple[State, Any]:
    """Model `get`, which waits for the key.

    A timeout shows that the key was missing at some moment.
    """
    return state, "timeout" if state is None else state


def _wait(state: State, words: tuple[Any, ...]) -> tuple[State, Any]:
    return state, "timeout" if state is None else None


def _add(state: State, words: tuple[Any, ...]) -> tuple[State, Any]:
    total = int(state or 0) + words[0]
    return b"%d" % total, total


def _compare_set(state: State, words: tuple[Any, ...]) -> tuple[State, Any]:
    expected, desired = words
    if state == expected or (state is None and not expected):
        return desired, desired
    return state, expected if state is None else state


def _delete(state: State, words: tuple[Any, ...]) -> tuple[State, Any]:
    return None, state is not None


def _check(state: State, words: tuple[Any, ...]) -> tuple[State, Any]:
    return state, state is not None


MODEL: dict[str, Callable[[State, tuple[Any, ...]], tuple[State, Any]]] = {
    "set": _set, "get": _get, "wait": _wait, "add": _add, "compare_set": _compare_set, "delete": _delete,
    "check": _check,
}  # fmt: skip
"""For each operation a function from the key's state and the arguments to the new state and the answer."""


def first_impossible(history: Iterable[Event], state: State = None) -> Event | None:
    """Return the first call of a key's history whose answer no order explains.

    None means that some order of the calls explains all answers.
    """
    calls = sorted(history, key=lambda event: event.began)
    moments = [(event.began, 1, number) for number, event in enumerate(calls)]
    moments += [(event.ended, 0, number) for number, event in enumerate(calls) if event.ended != PENDING]
    under_way: set[int] = set()
    # Each has a state of the key, and the pending calls that have taken effect.
    possible: set[tuple[State, frozenset[int]]] = {(state, frozenset())}
    for _, begins, number in sorted(moments):
        if begins:
            under_way.add(number)
            continue
        possible = _with(possible, calls, under_way, number)
        if not possible:
            return calls[number]
        under_way.discard(number)
        possible = {(state, done - {number}) for state, done in possible}
    return None


def _with(
    possible: set[tuple[State, frozenset[int]]], calls: list[Event], under_way: set[int], number: int
) -> set[tuple[State, frozenset[int]]]:
    """Let pending calls take effect in every order until the call `number` has.

    Returns:
        the states that are then possible.
    """
    found, seen, ahead = set[tuple[State, frozenset[int]]](), set(possible), list(possible)
    while ahead:
        state, done = ahead.pop()
        if number in done:
            found.add((state, done))
            continue
        for each in under_way - done:
            call = calls[each]
            after, answer = MODEL[call.op](state, call.words)
            if call.answer is not UNSEEN and answer != call.answer:
                continue
            if (new := (after, done | {each})) not in seen:
                seen.add(new)
                ahead.append(new)
    return found
