"""The checker of histories: it agrees with a search of all orders, and finds answers of a broken store."""

from __future__ import annotations

import ast
import random
from itertools import permutations

import pytest
from soak.linearizable import MODEL, PENDING, UNSEEN, Event, first_impossible


def events(text: str) -> list[Event]:
    """Parse calls such as `set 1 -> None 0..2`: operation, arguments, answer, begin and end; ? is an unseen answer."""
    found = []
    for call in text.split(", "):
        (op, *words), (answer, span) = (part.split() for part in call.split(" -> "))
        began, _, ended = span.partition("..")
        values = [int(word) if op == "add" else word.encode() for word in words]
        value = UNSEEN if answer == "?" else ast.literal_eval(answer)
        found.append(Event(op, tuple(values), value, float(began), float(ended or PENDING)))
    return found


@pytest.mark.parametrize(
    ("history", "possible"),
    [
        ("set 1 -> None 0..2, get -> 'timeout' 1..3, get -> b'1' 4..5", True),
        ("set 1 -> None 0..1, get -> 'timeout' 2..3", False),  # an old value
        ("add 1 -> 1 0..2, add 1 -> 1 1..3", False),  # an addition that is lost
        # Two calls that both win.
        (
            "set 0 -> None 0..1, compare_set 0 1 -> b'1' 2..4, compare_set 0 2 -> b'2' 2..4",
            False,
        ),
        ("delete -> True 0..5, set 1 -> None 1..2", True),  # of values that change meanwhile
        # A killed client's call may take effect late, and its effect stays.
        ("set 1 -> ? 0.., check -> False 1..2, check -> True 3..4", True),
        ("set 1 -> ? 0.., check -> True 1..2, check -> False 3..4", False),
    ],
)
def test_histories_with_and_without_an_order(history: str, possible: bool) -> None:
    assert (first_impossible(events(history)) is None) == possible


def has_an_order(history: list[Event]) -> bool:
    """Try all orders of up to five calls, with and without those of killed clients."""
    return any(
        fits(order)
        for count in range(len(history) + 1)
        for order in permutations(history, count)
        if all(call in order for call in history if call.ended != PENDING)
    )


def fits(order: tuple[Event, ...]) -> bool:
    """Return whether the calls in this order give their answers and respect real time."""
    state = None
    for place, call in enumerate(order):
        if any(later.ended < call.began for later in order[place + 1 :]):
            return False
        state, answer = MODEL[call.op](state, call.words)
        if call.answer is not UNSEEN and call.answer != answer:
            return False
    return True


def any_event(dice: random.Random) -> Event:
    """Return a call with a plausible answer, right or wrong."""
    began = dice.random()
    span = (began, PENDING if dice.random() < 0.2 else began + dice.random())
    op, words, answers = dice.choice(
        [
            ("set", (b"1",), [None]),
            ("get", (), [b"1", b"2", "timeout"]),
            ("add", (1,), [1, 2, 3]),
            ("compare_set", (b"1", b"2"), [b"1", b"2"]),
            ("delete", (), [True, False]),
            ("check", (), [True, False]),
            ("wait", (), [None, "timeout"]),
        ]
    )
    return Event(op, words, UNSEEN if span[1] == PENDING else dice.choice(answers), *span)


def test_the_checker_agrees_with_a_search_of_all_orders() -> None:
    dice, found = random.Random(5), [0, 0]
    for _ in range(500):
        history = [any_event(dice) for _ in range(dice.randrange(1, 6))]
        expected = has_an_order(history)
        found[expected] += 1
        assert (first_impossible(history) is None) == expected, history
    assert min(found) > 60
