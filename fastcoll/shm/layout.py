"""Where everything lies in a segment: pure arithmetic on sizes, no memory touched.

    segment  = header | section of rank 0 | section of rank 1 | ...
    section  = control page | slots | outgoing rings, one for each other rank

Header: words that the creator writes before anybody attaches, and that are then only read:
    word 0   MAGIC
    word 1   nonce, proves that two ranks mapped the same segment
    word 2   number of ranks
    word 3   ONE_SHOT_LIMIT, rank 0's number for all (tuning_cache.py)
    word 4   WAYS, those of autotune.py that rank 0's FASTCOLL_SHM_ALGORITHMS allows, as bits, for all
and behind it, from COMBINED on, where there are groups: for each group of GROUP ranks two combined lines by parity of
the call's number, written by any of its ranks (rounds.py); like call lines, with the first word of each rank's payload

Control page of a section; single writer: its rank. Each item has 128 bytes of its own, two cache
lines, since adjacent-line prefetch makes neighbours share.
    LINES      two call lines by parity of the call's number, 128 bytes each:
               word 0 sequence (release), 1 call, 2 shape, 3 balance, 4 time of the last call, then INLINE
               bytes of payload
    PUBLISHED  word 0: see rounds.py (release)
    CONSUMED   word 0: see rounds.py (release)
    STATE      word 0: 0 in order, 1 left, 2 failed, 3 leaving (release); word 1: length of the reason
    REASON     who is at fault and the reason as UTF-8 (monitor.py), at most REASON_BYTES
    ATTACHED   word 0: the nonce, once this rank has mapped the segment; before: words 1.. its CPUs
    QUOTA      word 0: cores that its cgroup allows
    REACH      word 0: address of a word in its memory, word 1: how it can reach all others' (reach.py); words 2 to 5:
               the table of its arena (arena.py), there before a call line names that arena; word PUSHING: 1 while it
               writes into peers' arrays (single_copy.py); word REFUGE: the port at which it serves a store for the
               survivors of a failure, 0 for none
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import ResourceError

MAGIC = 0x6661737463_05
ONE_SHOT_LIMIT = 3
ALGORITHMS = 4
PAGE = 4096
LINE = 128

COMBINED = LINE
# Up to so many ranks read all lines, more meet in groups (rounds.py). Lines that another core has just written take
# 0.15 us to read when they are up to 12, 0.23 when they are 16, 0.53 when they are 32, 0.80 when they are 64 (as far
# apart as sections, best of 20,000, one L3 of an AMD EPYC of family 26); to meet in groups is two such steps.
FLAT = 16
GROUP = 8  # ranks; a combined line has room for a word of each

LINES = 0
PUBLISHED = 2 * LINE
CONSUMED = 3 * LINE
STATE = 4 * LINE
ATTACHED = 5 * LINE
QUOTA = 6 * LINE
REACH = 6 * LINE + 64
REACH_WORDS = 8
PUSHING = 6
RECOVERY = 7
REASON = 7 * LINE
REASON_BYTES = 1024
CONTROL = PAGE

# Words of a call line.
SEQUENCE, CALL, SHAPE, BALANCE, TIME, PAYLOAD = range(6)
INLINE = LINE - 8 * PAYLOAD

CHANNELS = LINE // 8  # signals from one rank to another in a segment of symmetric arrays
SLOTS = 8  # rounds take turns; why so many: docs/architecture.md, "Where the data lies"
RING_HEADER = 1024  # control words of a ring, see rings.py
_SMALLEST_SLOT = 1024
_SMALLEST_RING = 2048


@dataclass(frozen=True)
class Layout:
    """Sizes and offsets, in bytes, of a segment for `size` ranks."""

    size: int
    slot: int
    ring: int = 0

    cure: ClassVar[str] = "lower FASTCOLL_SHM_BYTES_PER_RANK"

    @property
    def groups(self) -> int:
        """How many groups the ranks meet in; 0: all meet at once."""
        return -(-self.size // GROUP) if self.size > FLAT else 0

    @property
    def header(self) -> int:
        """Bytes of the header."""
        return -(-(COMBINED + 2 * LINE * self.groups) // PAGE) * PAGE

    @property
    def rings_at(self) -> int:
        """Offset of the first outgoing ring in a section."""
        return CONTROL + SLOTS * self.slot

    @property
    def stride(self) -> int:
        """From one rank's section to the next."""
        used = self.rings_at + (self.size - 1) * (RING_HEADER + self.ring)
        return -(-used // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """The whole segment."""
        return self.header + self.size * self.stride

    def section(self, rank: int) -> int:
        """Offset of a rank's section."""
        return self.header + rank * self.stride

    def ring_of(self, src: int, dst: int) -> int:
        """Offset of the ring from `src` to `dst`, two different ranks."""
        place = (dst - src) % self.size - 1
        return self.section(src) + self.rings_at + place * (RING_HEADER + self.ring)


@dataclass(frozen=True)
class SymmetricLayout(Layout):
    """A segment of symmetric arrays: of `slot` bytes a rank, and no rings.

    section  = signals | the rank's array
    signals    a line for each rank: word k counts the signals on channel k to that rank (release)
    """

    cure: ClassVar[str] = "ask for smaller arrays"

    @property
    def array_at(self) -> int:
        """Offset of the array in a section."""
        return -(-self.size * LINE // PAGE) * PAGE

    @property
    def stride(self) -> int:
        return -(-(self.array_at + self.slot) // PAGE) * PAGE

    def signal(self, src: int, dst: int, channel: int) -> int:
        """Offset of the count of signals from src to dst."""
        return self.section(src) + LINE * dst + 8 * channel


def plan(size: int, bytes_per_rank: int) -> Layout:
    """The layout for `size` ranks that each bring about `bytes_per_rank` of memory.

    Half goes to the slots, three eighths to the rings; the rest is for headers. Slots are at most
    256 KiB: all slots of a rank are then twice a large L2, so that what is read was written long enough ago to
    have moved on to the last-level cache (docs/architecture.md).

    Raises:
        ResourceError: `bytes_per_rank` is too small for this many ranks.
    """
    largest = 256 << 10 if size <= 8 else 128 << 10 if size <= 16 else 64 << 10
    slot = min(largest, _power_of_two(bytes_per_rank // 2 // SLOTS))
    ring = min(1 << 20, _power_of_two(bytes_per_rank * 3 // 8 // max(1, size - 1)))
    if slot < _SMALLEST_SLOT or ring < _SMALLEST_RING:
        need = max(2 * SLOTS * _SMALLEST_SLOT, -(-8 * (size - 1) * _SMALLEST_RING // 3))
        raise ResourceError(
            f"{bytes_per_rank} bytes of shared memory a rank are too few for {size} ranks, which need {need} each; "
            "raise FASTCOLL_SHM_BYTES_PER_RANK"
        )
    return Layout(size, slot, ring)


def _power_of_two(n: int) -> int:
    """The largest power of two that is at most n (0 for n < 1)."""
    return 1 << n.bit_length() >> 1
