"""The table of a store: its limits."""

import pytest

from fastcoll.errors import StoreError
from fastcoll.store import table as table_module
from fastcoll.store.table import MAX_ANSWER, MAX_KEY, MAX_VALUE, Op, StoreRequest, Table


def test_exceeded_limits_do_not_change_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "MAX_KEYS", 2)
    monkeypatch.setattr(table_module, "MAX_TOTAL", 100)
    table = Table()
    table.put(b"a", b"1" * 40)
    table.put(b"b", b"2" * 40)
    for key, value, message in [
        (b"c", b"", "takes no more"),
        (b"a", b"1" * 80, "would pass 100"),
        (b"k" * (MAX_KEY + 1), b"", "a key has"),
        (b"a", bytes(MAX_VALUE + 1), "at most"),
    ]:
        with pytest.raises(StoreError, match=message):
            table.put(key, value)
    assert table.get(b"a") == b"1" * 40
    assert table.remove(b"a")
    table.put(b"c", b"3" * 50)
    assert table.apply(StoreRequest(Op.NUM_KEYS)) == [b"2"]


def test_the_answer_to_get_has_the_values_that_fit() -> None:
    table = Table()
    keys = tuple(b"%d" % i for i in range(4))
    for key in keys:
        table.put(key, bytes(MAX_ANSWER // 3))
    answer = table.apply(StoreRequest(Op.GET, keys))
    assert 1 <= len(answer) < 4
