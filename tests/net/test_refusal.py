"""Why a group cannot be made, as the other ranks hear it."""

from __future__ import annotations

import pytest

from fastcoll.errors import (
    CollectiveTimeoutError,
    PeerDiedError,
    RendezvousError,
    ResourceError,
    StoreTimeoutError,
    UsageError,
)
from fastcoll.net.tcp import refusal
from fastcoll.net.tcp.refusal import Refusal
from fastcoll.rendezvous import HashStore
from net.meshes import crew


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> list[Refusal]:
    """One group's, as its two ranks have it."""
    monkeypatch.setattr(refusal, "_CHECK_SECONDS", 0.0)
    store = HashStore()
    return [Refusal(store, member) for member in crew(2)]


@pytest.mark.parametrize(
    "error",
    [
        UsageError("no eth9"),
        ResourceError("no port"),
        RendezvousError("another secret"),
        StoreTimeoutError("rank 3 did not come"),
        PeerDiedError("rank 2 died", [2]),
    ],
)
def test_the_others_raise_what_one_tells(two: list[Refusal], error: Exception) -> None:
    first, second = two
    second.check()
    first.tell(error)
    with pytest.raises(type(error)) as caught:
        second.check()
    assert str(caught.value).startswith("rank 0 (")
    assert str(caught.value).endswith(f"): {error}")
    assert getattr(caught.value, "ranks", ()) == getattr(error, "ranks", ())


def test_ctrl_c_is_told_too(two: list[Refusal]) -> None:
    two[0].tell(KeyboardInterrupt())
    with pytest.raises(RendezvousError, match=r"rank 0 \(.*\): it was ended by KeyboardInterrupt"):
        two[1].check()


def test_what_all_find_themselves_and_what_came_from_another_is_not_told(two: list[Refusal]) -> None:
    first, second = two
    first.tell(CollectiveTimeoutError("late", [1]))
    second.check()
    first.tell(UsageError("of the first"))
    with pytest.raises(UsageError) as caught:
        second.check()
    second.tell(UsageError(f"again: {caught.value}"))
    with pytest.raises(UsageError, match=r"\): of the first"):
        first.check()


def test_what_cannot_be_read_is_an_error(two: list[Refusal]) -> None:
    two[0]._store.set("net/refused", "[" * 5000)
    with pytest.raises(RendezvousError, match="cannot be read"):
        two[1].check()
