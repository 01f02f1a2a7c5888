"""Layout of a segment: pure arithmetic on sizes, without access to memory.

    segment  = header | section of rank 0 | section of rank 1 | ...
    section  = control page | slots | heads of the outgoing rings, one for each other rank | their control words | rings
               | relay memory

Only the control pages and the heads are allocated with the segment. A rank allocates its slots, its relay memory, and
each of its rings with the ring's control words, before it first writes there (segment.py, rings.py). So a group of 256
ranks that have sent no messages takes 9 MiB: a control page and 255 heads of 128 bytes for each rank.

Header: words that rank 0 writes before other ranks attach, and that no rank writes afterwards:
    word 0   MAGIC
    word 1   nonce, which proves that two ranks have mapped the same segment
    word 2   number of ranks
    word 3   ONE_SHOT_LIMIT, the limit of one-shot reductions that rank 0 has chosen for all ranks (tuning_cache.py)
    word 4   ALGORITHMS that all ranks may use, as bits: those of FASTCOLL_SHM_ALGORITHMS on rank 0 (autotune.py)
More than FLAT ranks meet in groups of GROUP ranks (rounds.py). Then the header also has two *combined lines* for each
group, from COMBINED on: one for even call numbers and one for odd ones. Any rank of the group may write them. A
combined line has the fields of a call line (below), but its payload consists of one word from each rank's payload.

Control page of a section. Only the section's rank writes it, except for EVENT. Each item has 128 bytes of its own, two
cache lines, because the adjacent-line prefetcher makes two neighbours behave as one; but QUOTA and REACH share 128
bytes, and EVENT, which is rarely written, lies behind PUBLISHED.
"(release)" marks a word that the rank writes after the data that it announces, by a store with release semantics.
    LINES      two call lines of 128 bytes, one for even call numbers and one for odd ones:
               word 0 sequence (release), 1 call, 2 shape, 3 balance, 4 time of the last call; then INLINE bytes of
               payload
    PUBLISHED  word 0: see rounds.py (release)
    EVENT      word 0: the event of this rank's stores (kernels/futex.py), if there are more ranks than cores
    CONSUMED   word 0: see rounds.py (release)
    STATE      word 0: 0 working, 1 left, 2 failed, 3 leaving (release); word 1: length of the reason
    REASON     the ranks at fault, and the reason as UTF-8 (monitor.py), at most REASON_BYTES
    HEADER     this rank's header in a call of a larger group, with ranks on other nodes (release); its first words are
               those of kernels/headers.py, and small data follows; at most 1024 bytes
    RESULT     rank 0: the combination of such headers of all ranks of the larger group (release), of the same size
    RELAY      word 0: number of the call of the larger group whose data this rank has put into its relay memory
               (release); word 8, on rank 0: number of the call whose result is there (release)
    ATTACHED   word 0: the nonce, once this rank has mapped the segment; words 1 and up: its CPUs, written before word 0
    QUOTA      word 0: number of cores that the rank's cgroup allows
    REACH      word 0: address of a word in the rank's memory; word 1: how the rank can access all peers' memory
               (reach.py); words 2 to 5: the table of its arena (arena.py), written before a call line names that
               arena; word PUSHING: 1 while the rank writes into peers' arrays (single_copy.py); word RECOVERY: the
               port of the store that it serves to the survivors of a failure, 0 for none
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from ..errors import ResourceError

MAGIC = 0x6661737463_07
ONE_SHOT_LIMIT = 3
ALGORITHMS = 4
PAGE = 4096
LINE = 128

COMBINED = LINE
# If there are at most FLAT ranks, each reads the call lines of all; more ranks meet in groups (rounds.py). To read
# lines that other cores have just written takes 0.15 us for up to 12 lines, 0.23 for 16, 0.53 for 32, 0.80 for 64 (as
# far apart as sections, best of 20,000, one L3 of an AMD EPYC of family 26). A meeting in groups needs two such steps.
FLAT = 16
GROUP = 8  # ranks; a combined line has room for one word of each

LINES = 0
PUBLISHED = 2 * LINE
EVENT = PUBLISHED + 64
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
RELAY = 15 * LINE
HEADER = 16 * LINE
RESULT = 24 * LINE
CONTROL = PAGE

# Words of a call line.
SEQUENCE, CALL, SHAPE, BALANCE, TIME, PAYLOAD = range(6)
INLINE = LINE - 8 * PAYLOAD

CHANNELS = LINE // 8  # signal counters from one rank to another in a segment of a symmetric array
SLOTS = 8  # round t uses slot t % SLOTS; why so many: docs/architecture-shm.md, "Where the data lies"
RING_CONTROL = 1024  # bytes of the control words of a ring without its head, see rings.py
_SMALLEST_SLOT = 1024
_SMALLEST_RING = 2048


@dataclass(frozen=True)
class Layout:
    """Sizes and offsets, in bytes, of a segment for `size` ranks."""

    size: int
    slot: int
    ring: int = 0
    relay: int = 0  # of a rank's relay memory (net/tcp/plans/relayed.py)

    cure: ClassVar[str] = "lower FASTCOLL_SHM_BYTES_PER_RANK"

    @property
    def groups(self) -> int:
        """Number of groups in which the ranks meet; 0: all ranks read the lines of all ranks."""
        return -(-self.size // GROUP) if self.size > FLAT else 0

    @cached_property
    def header(self) -> int:
        """Bytes of the header."""
        return _whole_pages(COMBINED + 2 * LINE * self.groups)

    @cached_property
    def heads_at(self) -> int:
        """Offset of the head of the first outgoing ring in a section."""
        return CONTROL + SLOTS * self.slot

    @cached_property
    def ring_controls_at(self) -> int:
        """Offset of the control words of the first outgoing ring in a section."""
        return self.heads_at + _whole_pages((self.size - 1) * LINE)

    @cached_property
    def rings_at(self) -> int:
        """Offset of the memory of the first outgoing ring in a section."""
        return self.ring_controls_at + _whole_pages((self.size - 1) * RING_CONTROL)

    @cached_property
    def relay_at(self) -> int:
        """Offset of the relay memory in a section."""
        return self.rings_at + _whole_pages((self.size - 1) * self.ring)

    @cached_property
    def stride(self) -> int:
        """Bytes from one rank's section to the next."""
        return self.relay_at + _whole_pages(self.relay)

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self.header + self.size * self.stride

    def section(self, rank: int) -> int:
        """Offset of a rank's section."""
        return self.header + rank * self.stride

    def ring_of(self, src: int, dst: int) -> tuple[int, int, int]:
        """Offsets of the head, the control words and the memory of the ring from `src` to another rank `dst`."""
        section, index = self.section(src), (dst - src) % self.size - 1
        return (
            section + self.heads_at + index * LINE,
            section + self.ring_controls_at + index * RING_CONTROL,
            section + self.rings_at + index * self.ring,
        )

    def slots_of(self, rank: int) -> tuple[int, int]:
        """Offset and bytes of a rank's slots."""
        return self.section(rank) + CONTROL, SLOTS * self.slot

    def always_there(self, rank: int) -> list[tuple[int, int]]:
        """Offset and bytes of each part of a rank's section whose memory is allocated with the segment."""
        section = self.section(rank)
        heads = section + self.heads_at, self.ring_controls_at - self.heads_at
        return [(section, CONTROL), heads] if self.size > 1 else [(section, CONTROL)]


@dataclass(frozen=True)
class SymmetricLayout(Layout):
    """Layout of a segment with a symmetric array of `slot` bytes for each rank, and no rings.

    section  = signals | the rank's array
    signals    a line for each peer: word k counts the signals on channel k to that peer (release)
    """

    cure: ClassVar[str] = "ask for smaller arrays"

    @property
    def array_at(self) -> int:
        """Offset of the array in a section."""
        return _whole_pages(self.size * LINE)

    @cached_property
    def stride(self) -> int:
        return _whole_pages(self.array_at + self.slot)

    def always_there(self, rank: int) -> list[tuple[int, int]]:
        return [(self.section(rank), self.stride)]

    def signal(self, src: int, dst: int, channel: int) -> int:
        """Offset of the counter of signals from src to dst on a channel."""
        return self.section(src) + LINE * dst + 8 * channel


def plan(size: int, bytes_per_rank: int, relay: int = 0) -> Layout:
    """Plan a layout for `size` ranks that contribute about `bytes_per_rank` of memory each, and `relay` bytes more.

    Half is for the slots, three eighths for the rings, the rest for control words. A slot has at most 256 KiB. All
    slots of a rank together are then twice as large as a large L2 cache, so data has moved to the last-level cache when
    peers read it (docs/architecture-shm.md).

    Raises:
        ResourceError: `bytes_per_rank` is too small for this many ranks.
    """
    largest = 256 << 10 if size <= 8 else 128 << 10 if size <= 16 else 64 << 10
    slot = min(largest, _power_of_two(bytes_per_rank // 2 // SLOTS))
    ring = min(2 << 20, _power_of_two(bytes_per_rank * 3 // 8 // max(1, size - 1)))
    if slot < _SMALLEST_SLOT or ring < _SMALLEST_RING:
        need = max(2 * SLOTS * _SMALLEST_SLOT, -(-8 * (size - 1) * _SMALLEST_RING // 3))
        raise ResourceError(
            f"{bytes_per_rank} bytes of shared memory a rank are too few for {size} ranks, which need {need} each; "
            "raise FASTCOLL_SHM_BYTES_PER_RANK"
        )
    return Layout(size, slot, ring, relay)


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _power_of_two(n: int) -> int:
    """Return the largest power of two that is at most n; 0 for n < 1."""
    return 1 << n.bit_length() >> 1
