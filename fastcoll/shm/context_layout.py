"""Words of a group's private context.

The context is an int64 table. *Entries*, the compiled functions that Python calls, read it and keep their state in it.
"""

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
ROUND = 6  # number of the first round of the current call, or of the next one
SEEN = 7  # every peer has read all rounds below this one
WROTE = 8  # rounds of the current call that this rank has published
READ = 9  # rounds of the current call that this rank has read
LARGEST = 10  # largest SHAPE of the meeting, for calls whose ranks may differ in size
ONE_SHOT = 11  # up to this many bytes every rank reduces everything itself
LATE = 12  # the rank for which the last wait waited; -1 between calls
SINCE = 13  # when this run of the entry closed its first round, in ns; 0 before
BUSY = 14  # the thread whose call owns the context, 0 for none, OPEN for an open call (open_calls.py), or FREEING
SHUT = 15  # not 0: the group has failed or was closed, so all calls go through Python
PENDING = 16  # operations queued or running on the progress thread; synchronous calls queue behind them
GIVEN = 17  # address of the spec of a PREPARED call
NDARRAY, TUPLE, NONE = 18, 19, 20  # addresses of Python's numpy.ndarray, tuple and None
MET = 21  # 1: this rank has compared the calls of all ranks
SYMMETRIC = 22  # address of the table of symmetric arrays (symmetric.py); 0: there are none
DID = 23  # finished bytes of this rank's slice in a reduction, or of a peer's data in a direct call
FINISHED = 24  # number of the last complete call (release)
ALGORITHMS = 25  # algorithms that calls through the slots may use, as bits (autotune.py)
DIRECT_FROM = 26  # smallest size of a direct call, in bytes (single_copy.py)
VECTORS = 27  # 27 to 30: two vectors of address and bytes for the system call that reads a peer's memory
NEXT = 31  # the peer that a direct call reads next, counted from this rank
ARENA = 32  # address of the table of this process's arena (arena.py)
ONLY_SHARED = 33  # 1: ranks can map one another's arenas, but not read one another's memory
EXPOSED = 34  # address of this rank's array that peers may write into during the current call; 0: none
EXPOSED_BYTES = 35
RING = 36  # address of the ring of the group's record (kernels/recording.py); 0: none
COMBINED = 37  # address of the combined lines; 0: all ranks read all lines
# How long a call waits before its entry returns, as SPINS, YIELDS and BUDGET of kernels/waiting.py; then the same for
# a run of the entry with the tag BRIEF (rounds.py), and for calls while operations are PENDING.
FULL_WAIT, BRIEF_WAIT, PENDING_WAIT, WAIT_WORDS = 38, 41, 44, 3
ALLOCATED = 47  # 1: the memory of this rank's slots is allocated
CROWDED = 48  # 1: there are more ranks than cores, so a rank that waits soon sleeps on the EVENT of its peer
BACKOFF = 49  # the table of kernels/waiting.py
FREEING = -2  # while a thread frees the slots (slot_memory.py), between two calls
# Behind them: the table of autotune.py, the memo of call specs (validate.py), nine tables with one word for each rank.
CHOOSING = BACKOFF + BACKOFF_WORDS
MEMO = CHOOSING + table_words(2 * len(OPERATIONS))  # every operation twice: the second time for shared arrays
MEMO_ENTRIES = 128
MEMO_WORDS = 4  # address of the dtype, address of the ReduceOp, the operation's code, address of the spec
TABLES = MEMO + MEMO_ENTRIES * MEMO_WORDS
SOURCES, GIVES, GIVES_BYTES, TAKES, TAKES_BYTES, PIDS = range(6)
# For each peer's mapped arena: its address in the peer, its size, and its address here minus its address in the peer.
ARENA_BASES, ARENA_BYTES, ARENA_SHIFTS = 6, 7, 8
TABLES_A_RANK = 9
