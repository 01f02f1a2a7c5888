"""The layout of records in a GPU's registers: every field is aligned, also those inside other records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _needs_kernels() -> None:
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed")


INNER = [("small", "i2"), ("large", "f8", (2,))]


@pytest.mark.parametrize("dtype", [INNER, [("tag", "S3"), ("inner", INNER, (3,)), ("end", "u1")]], ids=str)
def test_every_byte_of_every_field_has_its_place(dtype: Any) -> None:
    from fastcoll.kernels.cuda.combining import aligned, byte_pairs

    packed = np.dtype(dtype)
    private = aligned(packed)

    assert private.isalignedstruct
    host = np.frombuffer(np.random.default_rng(1).bytes(packed.itemsize), packed)
    copy = np.zeros(1, private)
    source, target = host.view(np.uint8), copy.view(np.uint8)
    pairs = [*byte_pairs(packed, private)]
    assert len({here for here, _ in pairs}) == len(pairs) == sum(kind.itemsize for kind in flat(packed))
    for here, there in pairs:
        target[there] = source[here]
    assert copy.astype(packed).tobytes() == host.tobytes()


def flat(kind: np.dtype[Any]) -> list[np.dtype[Any]]:
    """Return the dtype of every number in an element."""
    if kind.subdtype is not None:
        return flat(kind.subdtype[0]) * int(np.prod(kind.shape))
    return [kind] if kind.names is None else [each for name in kind.names for each in flat(kind[name])]
