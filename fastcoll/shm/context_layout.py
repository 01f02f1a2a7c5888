"""The words of a group's private context: an int64 table that entries read and keep their state in."""

from __future__ import annotations

from ..core.operations import OPERATIONS
from ..kernels.waiting import PATIENCE_WORDS
from .autotune import table_words
from .layout import MAX_LANES

RANK = 0
SIZE = 1
SECTIONS = 2  # address of rank 0's section
STRIDE = 3  # bytes from one section to the next
SLOTS_AT = 4  # offset of slot 0 in a section
SLOT = 5  # bytes of a slot
CALLS = 6  # number of the last call begun
ROUND = 7  # number of the first round of the call under way, or of the next one
SEEN = 8  # every peer has read all rounds below
WROTE = 9  # rounds of the call under way that are published here
READ = 10  # rounds of the call under way that are read here
LARGEST = 11  # largest SHAPE of the meeting, for calls whose ranks may differ in size
ONE_SHOT = 12  # all_reduce: up to this many bytes every rank reduces everything itself
LATE = 13  # the rank that the last wait was for; -1 between calls
SINCE = 14  # when this run of the entry closed its first round, in ns; 0 before
BUSY = 15  # the thread whose call is under way, 0 for none
SHUT = 16  # not 0: the group has failed or closed, all calls go through Python
PENDING = 17  # operations queued or under way on the progress thread; synchronous calls go behind them
GIVEN = 18  # address of the description of a PREPARED call
NDARRAY, TUPLE, NONE = 19, 20, 21  # addresses of Python's numpy.ndarray, tuple and None
MET = 22  # 1: the calls of all ranks have been compared
SYMMETRIC = 23  # address of the table of symmetric arrays (symmetric.py); 0: there are none
DID = 24  # bytes that are done, of this rank's part of a call in symmetric memory, or of a peer's in a direct one
LANE = 25  # 0: the group's own context; else which lane's it is, counted from 1
LANES = 26  # how many lanes large calls can be divided among; 1: they are not
CALLS_DIVIDED = 27  # how many there were so far
FINISHED = 28  # number of the last call that is complete (release)
WAYS = 29  # the ways of autotune.py that calls through the slots may go, as bits
DIRECT_FROM = 30  # bytes from which calls may go direct (single_copy.py)
VECTORS = 31  # 31 to 34: two vectors of address and bytes for the system call that reads a peer's memory
TURN = 35  # of a direct call: which peer is read, counted from this rank
ARENA = 36  # address of the table of this process's arena (arena.py)
ONLY_SHARED = 37  # 1: ranks cannot read one another's memory, only map their arenas
EXPOSED, EXPOSED_BYTES = (
    38,
    39,
)  # this rank's array that peers may write into, while a call is under way; 0: none
RING = 40  # address of the ring of the group's record (kernels/recording.py); 0: none, as of a lane
LANE_CONTEXTS = 41  # addresses of the contexts of all lanes
COMBINED = LANE_CONTEXTS + MAX_LANES  # address of the combined lines; 0: the ranks meet at once
PATIENCE = COMBINED + 1  # the table of kernels/waiting.py
# Behind them: the table of autotune.py, the memo of descriptions (validate.py), nine tables of a word a rank.
CHOOSING = PATIENCE + PATIENCE_WORDS
MEMO = CHOOSING + table_words(2 * len(OPERATIONS))  # once more for shared arrays
MEMO_ENTRIES = 128
MEMO_WORDS = (
    4  # of an entry: addresses of dtype and reduce operation, the operation's code, description's address
)
TABLES = MEMO + MEMO_ENTRIES * MEMO_WORDS
SOURCES, GIVES, GIVES_BYTES, TAKES, TAKES_BYTES, PIDS = range(6)
ARENA_BASES, ARENA_BYTES, ARENA_SHIFTS = (
    6,
    7,
    8,
)  # of the mapped arenas of peers: where there, how long, here minus there
TABLES_A_RANK = 9
