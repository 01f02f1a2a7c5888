"""Match queues: the tags that a receive accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fastcoll.core.operands import ANY_TAG, JAX_TAGS, LARGEST_TAG, OBJECTS_TAG, wildcard_of
from fastcoll.p2p.queues import IncomingMessage, MatchQueues
from fastcoll.p2p.transfers import Receive, kind_of

ENGINE = cast(Any, SimpleNamespace(rank=0, timeout=1.0, forks=0))
ANY_OF_JAX = wildcard_of(JAX_TAGS)
TAGS = {0, LARGEST_TAG, LARGEST_TAG + 1, OBJECTS_TAG, JAX_TAGS, JAX_TAGS + LARGEST_TAG, ANY_TAG, ANY_OF_JAX}


def receive(tag: int) -> Receive:
    return Receive().of(ENGINE, np.zeros(1, "u1"), None, tag)


def message_of(tag: int, source: int = 1) -> IncomingMessage:
    return IncomingMessage(source, kind_of(tag, np.dtype("u1")), 1)


@pytest.mark.parametrize(
    ("sent", "taken"),
    [
        (0, {0, ANY_TAG}),
        (LARGEST_TAG, {LARGEST_TAG, ANY_TAG}),
        (LARGEST_TAG + 1, {LARGEST_TAG + 1}),
        (OBJECTS_TAG, {OBJECTS_TAG}),
        (JAX_TAGS, {JAX_TAGS, ANY_OF_JAX}),
        (JAX_TAGS + LARGEST_TAG, {JAX_TAGS + LARGEST_TAG, ANY_OF_JAX}),
    ],
)
def test_a_message_matches_its_tag_and_the_wildcard_of_its_kind(sent: int, taken: set[int]) -> None:
    for tag in TAGS:
        posted, stored = MatchQueues(), MatchQueues()
        wanted, message = receive(tag), message_of(sent)
        assert posted.post(wanted) is None
        assert posted.arrive(message) is (wanted if tag in taken else None)
        assert stored.arrive(message) is None
        assert stored.post(wanted) is (message if tag in taken else None)


def test_the_earliest_receive_wins_whatever_its_tag() -> None:
    for first, second in ((5, ANY_TAG), (ANY_TAG, 5)):
        queues, receives = MatchQueues(), [receive(first), receive(second)]
        for each in receives:
            queues.post(each)
        for each in receives:
            assert queues.arrive(message_of(5)) is each


def test_the_earliest_message_wins_whatever_its_tag() -> None:
    queues = MatchQueues()
    messages = [message_of(tag, source) for tag, source in ((4, 1), (7, 1), (0, 2), (4, 1), (7, 2))]
    for each in messages:
        queues.arrive(each)
    assert queues.post(Receive().of(ENGINE, np.zeros(1, "u1"), 2, ANY_TAG)) is messages[2]
    for each in (messages[0], messages[1], messages[3], messages[4]):
        assert queues.find(None, ANY_TAG) is each
        assert queues.post(receive(ANY_TAG)) is each
    assert queues.stored == 0
