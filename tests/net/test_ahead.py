"""Ranks that have returned from a call before the others made it: what they leave behind, and what they are told."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
from together import together

from fastcoll import config
from fastcoll.core.group import ProcessGroup
from fastcoll.errors import AbortedError, MismatchError
from net.groups import everybody, groups
from net.meshes import nothing_left


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    config.forget()
    with nothing_left():
        yield


def spread(group: ProcessGroup, value: float) -> float:
    """What a broadcast from rank 0 leaves in the array."""
    x = np.full(3, float(value) if group.rank == 0 else -1.0)
    group.broadcast(x, 0)
    return float(x[0])


@pytest.mark.parametrize("n", [2, 3])
def test_what_a_root_sent_before_it_left_arrives(n: int) -> None:
    sent = threading.Event()

    def root(group: ProcessGroup) -> None:
        for value in range(5):
            spread(group, value)
        sent.set()
        group.close()

    def leaf(group: ProcessGroup) -> list[float]:
        assert sent.wait(20), "the root has waited"
        return [spread(group, -1) for _ in range(5)]

    with groups(n) as made:
        everybody(made, lambda group: spread(group, 7))  # from the second call on a root does not wait
        results = together(lambda: root(made[0]), *(lambda g=group: leaf(g) for group in made[1:]))
        assert results == [None] + [[0.0, 1.0, 2.0, 3.0, 4.0]] * (n - 1)


@pytest.mark.parametrize("n", [2, 3])
def test_a_root_is_told_of_a_mismatch_even_if_the_others_have_left(n: int) -> None:
    with groups(n) as made:
        everybody(made, lambda group: spread(group, 7))
        told = together(lambda: spread(made[0], 1), *(lambda g=group: g.barrier() for group in made[1:]))
        assert told[0] == 1.0
        assert all(isinstance(error, MismatchError) for error in told[1:]), told
        together(*(lambda g=group: g.close() for group in made[1:]))
        with pytest.raises(MismatchError) as caught:
            made[0].barrier()
        assert str(caught.value) == str(told[1])
        assert "rank 0 called broadcast(float64, 3 elements, root=0)" in str(told[1])
        with pytest.raises(AbortedError, match="left"):
            made[0].barrier()


@pytest.mark.parametrize("n", [2, 3])
def test_a_root_is_told_of_a_refused_call_with_its_reason(n: int) -> None:
    with groups(n) as made:
        everybody(made, lambda group: spread(group, 7))

        def refused(group: ProcessGroup) -> None:
            if group.rank == 0:
                spread(group, 1)
            else:
                group.broadcast(np.zeros(3), n)

        everybody(made, refused)
        errors = everybody(made, lambda group: group.barrier())
        assert isinstance(errors[0], MismatchError)
        assert f"rank 1's broadcast was refused: UsageError: src is {n}" in str(errors[0])
        assert errors[1:] == [None] * (n - 1)
        assert everybody(made, lambda group: spread(group, 2)) == [2.0] * n
