"""Values that all ranks read, made small: what each of n ranks reads of all n, a store sends n * n times."""

from __future__ import annotations

import json
import zlib
from typing import Any

from ..errors import StoreError


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
