"""How blocks are divided into segments: by the limits of the network."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.partition import Segments, Span
from .shape import Limits


def segments(blocks: Sequence[Span], itemsize: int, limits: Limits, at_once: int) -> Segments:
    """Segments of equal size for blocks of which a rank receives `at_once` at the same time."""
    return Segments.of_blocks(blocks, min(limits.segment, limits.at_once // max(at_once, 1)), itemsize)
