"""Match queues: the tags that a receive accepts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from fastcoll.core.operands import ANY_TAG, JAX_TAGS, LARGEST_TAG, OBJECTS_TAG, wildcard_of
from fastcoll.p2p.queues import MatchQueues, Message
from fastcoll.p2p.transfers import Receive, kind_of

ENGINE = cast(Any, SimpleNamespace(rank=0, timeout=1.0, forks=0))
ANY_OF_JAX = wildcard_of(JAX_TAGS)


def receive(tag: int) -> Receive:
    return Receive(ENGINE, np.zeros(1, "u1"), None, tag)


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
    tags = {
        0,
        LARGEST_TAG,
        LARGEST_TAG + 1,
        OBJECTS_TAG,
        JAX_TAGS,
        JAX_TAGS + LARGEST_TAG,
        ANY_TAG,
        ANY_OF_JAX,
    }
    for tag in tags:
        posted, stored = MatchQueues(), MatchQueues()
        wanted, message = receive(tag), Message(1, kind_of(sent, np.dtype("u1")), 1)
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
            assert queues.arrive(Message(1, kind_of(5, np.dtype("u1")), 1)) is each
