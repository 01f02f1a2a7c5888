"""The end of a meeting: written once, the same for all."""

from __future__ import annotations

from functools import partial

import pytest

from fastcoll.errors import PeerDiedError, StoreError, StoreTimeoutError, UsageError
from fastcoll.rendezvous import HashStore
from fastcoll.rendezvous.ending import FAILED, MET, MOVED, Ending, raise_failure


def test_the_first_to_decide_decides(in_threads) -> None:
    with HashStore() as store:
        kinds = [MET, FAILED, MOVED] * 5
        results = in_threads(
            *(partial(Ending(store, "m").decide, kind, b"%d" % n) for n, kind in enumerate(kinds))
        )
        assert results.count(True) == 1
        winner = results.index(True)
        assert store.get(Ending(store, "m").key) == kinds[winner] + b"%d" % winner


@pytest.mark.parametrize(
    "error",
    [UsageError("two of one rank"), StoreTimeoutError("2 did not come"), PeerDiedError("it died", [3, 4])],
)
def test_a_failure_is_raised_by_those_who_read_it(error: Exception) -> None:
    with HashStore() as store:
        Ending(store, "m").fail(error)
        end = store.get("m/end")
        assert end[:1] == FAILED
        with pytest.raises(type(error), match=str(error)) as caught:
            raise_failure(end[1:])
        assert getattr(caught.value, "ranks", None) == getattr(error, "ranks", None)


def test_a_failure_after_the_end_changes_nothing() -> None:
    with HashStore() as store:
        assert Ending(store, "m").decide(MET, b"all")
        Ending(store, "m").fail(UsageError("too late"))
        assert store.get("m/end") == MET + b"all"


def test_a_failure_in_a_lost_store_is_kept_to_oneself() -> None:
    store = HashStore()
    store.close()
    Ending(store, "m").fail(UsageError("nobody hears"))


@pytest.mark.parametrize(
    "record", [b"", b"{}", b"[]", b'{"kind": "KeyError", "text": "x", "ranks": []}', b"[" * 9999]
)
def test_what_is_no_failure_is_called_so(record: bytes) -> None:
    with pytest.raises(StoreError, match="why the meeting failed cannot be read"):
        raise_failure(record)
