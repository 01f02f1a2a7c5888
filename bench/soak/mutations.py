"""Broken frames, made of whole ones: the same random numbers make the same bytes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

Field = tuple[int, int]
"""Offset and size of a field of a header, in bytes."""

Mutation = Callable[[random.Random, bytes, Sequence[Field]], bytes]


def _whole(dice: random.Random, frame: bytes, fields: Sequence[Field]) -> bytes:
    return frame


def _truncated(dice: random.Random, frame: bytes, fields: Sequence[Field]) -> bytes:
    return frame[: dice.randrange(len(frame))]


def _twice(dice: random.Random, frame: bytes, fields: Sequence[Field]) -> bytes:
    at = dice.randrange(len(frame))
    return frame[: at + dice.randrange(1, 64)] + frame[at:]


def _flipped(dice: random.Random, frame: bytes, fields: Sequence[Field]) -> bytes:
    changed = bytearray(frame)
    for _ in range(dice.randrange(1, 9)):
        changed[dice.randrange(len(changed))] ^= 1 << dice.randrange(8)
    return bytes(changed)


def _extreme_field(dice: random.Random, frame: bytes, fields: Sequence[Field]) -> bytes:
    """Change one field: to 0, a power of two, one less, the largest value, or any value."""
    at, size = dice.choice(fields)
    power = 1 << dice.randrange(8 * size)
    value = dice.choice((0, power, power - 1, (1 << 8 * size) - 1, dice.randrange(1 << 8 * size)))
    return frame[:at] + value.to_bytes(size, dice.choice(("little", "big"))) + frame[at + size :]


def _random_header(dice: random.Random, frame: bytes, fields: Sequence[Field]) -> bytes:
    end = sum(fields[-1])
    return dice.randbytes(end) + frame[end:]


def _noise(dice: random.Random, frame: bytes, fields: Sequence[Field]) -> bytes:
    return dice.randbytes(dice.randrange(1, 2000))


MUTATIONS: dict[str, Mutation] = {
    "whole": _whole, "truncated": _truncated, "doubled in part": _twice, "flipped": _flipped,
    "extreme field": _extreme_field, "random header": _random_header, "noise": _noise,
}  # fmt: skip
HEADER_ONLY = ("whole", "truncated", "extreme field", "random header")
"""Mutations that leave the bytes behind the header as they are, or cut them off."""


def mutated(
    dice: random.Random, frame: bytes, fields: Sequence[Field], names: Sequence[str] = tuple(MUTATIONS)
) -> tuple[str, bytes]:
    """Return the name of one of the mutations, and what it makes of a frame with these fields in its header."""
    name = dice.choice(names)
    return name, MUTATIONS[name](dice, frame, fields)
