"""The checker of histories: it agrees with trying every order, and finds what a broken store would answer."""

from __future__ import annotations

import random
from itertools import permutations

import pytest
from soak.linearizable import MODEL, PENDING, UNSEEN, Event, first_impossible


def event(op: str, *words: object, answer: object = None, span: tuple[float, float]) -> Event:
    return Event(op, words, answer, *span)


@pytest.mark.parametrize(
    ("history", "possible"),
    [
        pytest.param(
            [
                event("set", b"1", span=(0, 2)),
                event("get", answer="timeout", span=(1, 3)),
                event("get", answer=b"1", span=(4, 5)),
            ],
            True,
            id="reading nothing while it is written",
        ),
        pytest.param(
            [event("set", b"1", span=(0, 1)), event("get", answer="timeout", span=(2, 3))],
            False,
            id="an old value",
        ),
        pytest.param(
            [event("add", 1, answer=1, span=(0, 2)), event("add", 1, answer=1, span=(1, 3))],
            False,
            id="an addition that is lost",
        ),
        pytest.param(
            [
                event("compare_set", b"", b"1", answer=b"1", span=(0, 3)),
                event("compare_set", b"", b"2", answer=b"2", span=(0, 3)),
            ],
            False,
            id="two that win",
        ),
        pytest.param(
            [event("delete", answer=True, span=(0, 5)), event("set", b"1", span=(1, 2))],
            True,
            id="deleting what comes meanwhile",
        ),
        pytest.param(
            [
                event("set", b"1", answer=UNSEEN, span=(0, PENDING)),
                event("check", answer=False, span=(1, 2)),
                event("check", answer=True, span=(3, 4)),
            ],
            True,
            id="a killed client's call that comes late",
        ),
        pytest.param(
            [
                event("set", b"1", answer=UNSEEN, span=(0, PENDING)),
                event("check", answer=True, span=(1, 2)),
                event("check", answer=False, span=(3, 4)),
            ],
            False,
            id="a killed client's call that is taken back",
        ),
    ],
)
def test_what_has_an_order(history: list[Event], possible: bool) -> None:
    assert (first_impossible(history) is None) == possible


def has_an_order(history: list[Event]) -> bool:
    """By trying all orders of up to five calls, without those of killed clients or with them."""
    return any(
        fits(order)
        for count in range(len(history) + 1)
        for order in permutations(history, count)
        if all(call in order for call in history if call.ended != PENDING)
    )


def fits(order: tuple[Event, ...]) -> bool:
    """Whether these calls, one after the other, give their answers, and none begins after one behind it has ended."""
    state = None
    for place, call in enumerate(order):
        if any(later.ended < call.began for later in order[place + 1 :]):
            return False
        state, answer = MODEL[call.op](state, call.words)
        if call.answer is not UNSEEN and call.answer != answer:
            return False
    return True


def any_event(dice: random.Random) -> Event:
    """A call with a likely answer, right or not."""
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


def test_it_agrees_with_trying_every_order() -> None:
    dice, found = random.Random(5), [0, 0]
    for _ in range(1500):
        history = [any_event(dice) for _ in range(dice.randrange(1, 6))]
        expected = has_an_order(history)
        found[expected] += 1
        assert (first_impossible(history) is None) == expected, history
    assert min(found) > 200
