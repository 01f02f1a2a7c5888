"""The words of a group's private context: an int64 table that entries read and keep their state in."""

from __future__ import annotations

from ..core.operations import OPERATIONS
from ..kernels.waiting import BACKOFF_WORDS
from .autotune import table_words

RANK = 0
SIZE = 1
SECTIONS = 2  # address of rank 0's section
STRIDE = 3  # bytes from one section to the next
SLOT = 4  # bytes of a slot
CALLS = 5  # number of the last call begun
ROUND = 6  # number of the first round of the call under way, or of the next one
SEEN = 7  # every peer has read all rounds below
WROTE = 8  # rounds of the call under way that are published here
READ = 9  # rounds of the call under way that are read here
LARGEST = 10  # largest SHAPE of the meeting, for calls whose ranks may differ in size
ONE_SHOT = 11  # all_reduce: up to this many bytes every rank reduces everything itself
LATE = 12  # the rank that the last wait was for; -1 between calls
SINCE = 13  # when this run of the entry closed its first round, in ns; 0 before
BUSY = 14  # the thread whose call is under way, 0 for none
SHUT = 15  # not 0: the group has failed or closed, all calls go through Python
PENDING = 16  # operations queued or under way on the progress thread; synchronous calls go behind them
GIVEN = 17  # address of the description of a PREPARED call
NDARRAY, TUPLE, NONE = 18, 19, 20  # addresses of Python's numpy.ndarray, tuple and None
MET = 21  # 1: the calls of all ranks have been compared
SYMMETRIC = 22  # address of the table of symmetric arrays (symmetric.py); 0: there are none
DID = 23  # bytes that are done, of this rank's part of a call in symmetric memory, or of a peer's in a direct one
FINISHED = 24  # number of the last call that is complete (release)
ALGORITHMS = 25  # the ways of autotune.py that calls through the slots may go, as bits
DIRECT_FROM = 26  # bytes from which calls may go direct (single_copy.py)
VECTORS = 27  # 27 to 30: two vectors of address and bytes for the system call that reads a peer's memory
NEXT = 31  # of a direct call: which peer is read, counted from this rank
ARENA = 32  # address of the table of this process's arena (arena.py)
ONLY_SHARED = 33  # 1: ranks cannot read one another's memory, only map their arenas
EXPOSED = 34  # this rank's array that peers may write into, while a call is under way; 0: none
EXPOSED_BYTES = 35
RING = 36  # address of the ring of the group's record (kernels/recording.py); 0: none
COMBINED = 37  # address of the combined lines; 0: the ranks meet at once
BACKOFF = 38  # the table of kernels/waiting.py
# Behind them: the table of autotune.py, the memo of descriptions (validate.py), nine tables of a word a rank.
CHOOSING = BACKOFF + BACKOFF_WORDS
MEMO = CHOOSING + table_words(2 * len(OPERATIONS))  # once more for shared arrays
MEMO_ENTRIES = 128
MEMO_WORDS = 4  # addresses of dtype and reduce operation, the operation's code, description's address
TABLES = MEMO + MEMO_ENTRIES * MEMO_WORDS
SOURCES, GIVES, GIVES_BYTES, TAKES, TAKES_BYTES, PIDS = range(6)
# Of the mapped arenas of peers: where there, how long, here minus there.
ARENA_BASES, ARENA_BYTES, ARENA_SHIFTS = 6, 7, 8
TABLES_A_RANK = 9
