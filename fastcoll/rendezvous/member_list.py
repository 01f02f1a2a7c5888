"""The list of all ranks as one short value, which every rank reads.

One record has 280 bytes as a JSON object, so n ranks would read 28 GB of them where n is 10,000. The list
is turned into columns, values that several records have are written once, and all is compressed: 14 bytes a
record with eight ranks a node. Before compression it is JSON:

    {"<field>": [value, ...], "<another>": {"values": [distinct, ...], "of": [place in values, ...]}, ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from ..core.processes import ProcessId
from ..errors import StoreError
from .compact import compact, expand

P = TypeVar("P", bound=ProcessId)

_MAX_BYTES_PER_RECORD = 4096
_TYPES: Mapping[str, type] = {"int": int, "str": str}


def pack(processes: Sequence[ProcessId]) -> bytes:
    """Processes, at least one and all of one class, as one value of a store."""
    records = [asdict(process) for process in processes]
    return compact({name: _column([record[name] for record in records]) for name in records[0]})


def unpack(kind: type[P], data: bytes, count: int) -> list[P]:
    """The `count` processes of class `kind` that `pack` wrote.

    Raises:
        StoreError: it is anything else.
    """
    columns = expand(data, count * _MAX_BYTES_PER_RECORD)
    # `from __future__ import annotations` makes the declared types texts.
    expected = {field.name: _TYPES[str(field.type)] for field in fields(kind)}
    try:
        if not isinstance(columns, dict) or set(columns) != set(expected):
            raise ValueError(f"expected the fields {', '.join(expected)}")
        values = [_values(columns[name], of, count) for name, of in expected.items()]
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise StoreError(f"the list of all ranks cannot be read: {error}") from error
    return [kind(**dict(zip(expected, row, strict=True))) for row in zip(*values, strict=True)]


def _column(values: list[Any]) -> list[Any] | dict[str, list[Any]]:
    places: dict[Any, int] = {}
    of = [places.setdefault(value, len(places)) for value in values]
    return values if 2 * len(places) > len(values) else {"values": list(places), "of": of}


def _values(column: Any, kind: type, count: int) -> list[Any]:
    values = column if isinstance(column, list) else column["values"]
    if not isinstance(values, list) or set(map(type, values)) != {kind}:
        raise ValueError(f"expected a column of {kind.__name__}")
    if values is not column:
        places = column["of"]
        if not isinstance(places, list) or set(map(type, places)) != {int} or min(places) < 0:
            raise ValueError("expected places in a column")
        values = [values[place] for place in places]
    if len(values) != count:
        raise ValueError(f"expected {count} records, got {len(values)}")
    return values
