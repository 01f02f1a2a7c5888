"""Where everything lies in a segment: pure arithmetic on sizes, no memory touched.

    segment  = header | section of rank 0 | section of rank 1 | ...
    section  = control page | slots | outgoing rings, one for each rank

Header (written by the creator before anybody attaches, then only read):
    word 0   MAGIC
    word 1   nonce, proves that two ranks mapped the same segment
    word 2   number of ranks

Control page of a section; single writer: its rank. Each item has 128 bytes of its own, two cache
lines, since adjacent-line prefetch makes neighbours share.
    LINES      two call lines by parity of the call's number, 128 bytes each:
               word 0 sequence (release), 1 call, 2 shape, 3 balance, then INLINE bytes of payload
    PROGRESS   word 0: rounds published, see rounds.py (release)
    STATE      word 0: 0 in order, 1 left, 2 failed (release); word 1: length of the reason
    REASON     the reason as UTF-8, at most REASON_BYTES
    ATTACHED   word 0: the nonce, once this rank has mapped the segment; before: words 1.. its CPUs
    QUOTA      word 0: cores that its cgroup allows
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ResourceError

MAGIC = 0x6661737463_02
PAGE = 4096
LINE = 128

LINES = 0
PROGRESS = 2 * LINE
STATE = 3 * LINE
ATTACHED = 4 * LINE
QUOTA = 5 * LINE
REASON = 6 * LINE
REASON_BYTES = 1024
CONTROL = PAGE

# Words of a call line.
SEQUENCE, CALL, SHAPE, BALANCE, PAYLOAD = range(5)
INLINE = LINE - 8 * PAYLOAD

SLOTS = 2  # by parity of the round; more do not help while every first round meets (docs/architecture.md)
RING_HEADER = 1024  # control words of a ring, see rings.py
_SMALLEST_SLOT = 4096
_SMALLEST_RING = 4096


@dataclass(frozen=True)
class Layout:
    """Sizes and offsets, in bytes, of a segment for `size` ranks."""

    size: int
    slot: int
    ring: int

    @property
    def slots_at(self) -> int:
        """Offset of the first slot in a section."""
        return CONTROL

    @property
    def rings_at(self) -> int:
        """Offset of the first outgoing ring in a section."""
        return CONTROL + SLOTS * self.slot

    @property
    def ring_stride(self) -> int:
        """From one outgoing ring to the next."""
        return RING_HEADER + self.ring

    @property
    def stride(self) -> int:
        """From one rank's section to the next."""
        used = self.rings_at + self.size * self.ring_stride
        return -(-used // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """The whole segment."""
        return PAGE + self.size * self.stride

    def section(self, rank: int) -> int:
        """Offset of a rank's section."""
        return PAGE + rank * self.stride


def plan(size: int, bytes_per_rank: int) -> Layout:
    """The layout for `size` ranks that each bring about `bytes_per_rank` of memory.

    Half goes to the two slots, half to the rings. Slots are at most 256 KiB, so that the slots in use
    stay in the last-level cache (256 KiB: 64 MiB all_reduce at the speed of an in-place stream with two
    ranks; 2-core AMD EPYC, 32 MiB L3), and smaller with more ranks.

    Raises:
        ResourceError: `bytes_per_rank` is too small for this many ranks.
    """
    largest = 256 << 10 if size <= 8 else 128 << 10 if size <= 16 else 64 << 10
    slot = min(largest, _power_of_two(bytes_per_rank // 4))
    ring = min(256 << 10, _power_of_two(bytes_per_rank // 2 // size))
    if slot < _SMALLEST_SLOT or ring < _SMALLEST_RING:
        need = max(4 * _SMALLEST_SLOT, 2 * size * _SMALLEST_RING)
        raise ResourceError(
            f"{bytes_per_rank} bytes of shared memory a rank are too few for {size} ranks, which need {need} each; "
            "raise FASTCOLL_SHM_BYTES_PER_RANK or make /dev/shm larger"
        )
    return Layout(size, slot, ring)


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most n (0 for n < 1)."""
    return 1 << (n.bit_length() - 1) if n > 0 else 0
