"""Values that all ranks read, made small: what each of n ranks reads of all n, a store sends n * n times.

Any value is JSON, compressed by zlib. Of the list of all ranks one record has 280 bytes as a JSON object, so n ranks
would read 28 GB of them where n is 10,000. The list is therefore turned into columns, and values that several records
have are written once: 14 bytes a record with eight ranks a node.

    {"<field>": [value, ...], "<another>": {"values": [distinct, ...], "of": [place in values, ...]}, ...}
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from ..core.processes import ProcessId
from ..errors import StoreError

P = TypeVar("P", bound=ProcessId)

_MAX_BYTES_PER_RECORD = 4096
_TYPES: Mapping[str, type] = {"int": int, "str": str}


def compact(value: Any) -> bytes:
    """What JSON can hold, as a short value of a store: JSON, compressed by zlib."""
    return zlib.compress(json.dumps(value, separators=(",", ":")).encode())


def expand(data: bytes, most: int) -> Any:
    """What `compact` was given.

    Args:
        most: bytes of JSON that it may have; what a peer wrote is not trusted to be small.

    Raises:
        StoreError: it has more, or is anything else.
    """
    reader = zlib.decompressobj()
    try:
        text = reader.decompress(data, most + 1)  # 0 would mean without limit
        if len(text) > most or not reader.eof or reader.unused_data:
            raise ValueError(f"it is cut off, or longer than {most} bytes")
        return json.loads(text)
    except (ValueError, RecursionError, zlib.error) as error:
        raise StoreError(f"what another rank wrote cannot be read ({error}): {data[:40]!r}") from error


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
