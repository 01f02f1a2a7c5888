"""The words of a group's private context: an int64 table that entries read and keep their state in."""

from __future__ import annotations

from ..calls import OPERATIONS
from ..kernels.waiting import PATIENCE_WORDS

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
LAG = 23  # rounds to write ahead of reading; 0 to SLOTS - 1
WAY = 24  # how the data of the call under way goes through the slots (choosing.py)
ROW = 25  # address of the row of CHOICES to learn from this call; 0: none
NBYTES = 26  # size of the call, for the row
STARTED, SPENT = 27, 28  # ticks: the clock's last start, and what it showed when it stopped
TOOK = 29  # ticks a KiB that the last call took here; 0: not measured
LAST_ROW, LAST_WAY = 30, 31  # the last call's, for when all ranks' TOOK are known
PATIENCE = 32  # the table of kernels/waiting.py
FIXED_WORDS = PATIENCE + PATIENCE_WORDS
# Behind them: the rows of choosing.py, the memo of descriptions (border.py), five tables of a word a rank.
CHOICES = FIXED_WORDS
ROW_WORDS = 6
CLASSES = 8
MEMO = CHOICES + ROW_WORDS * CLASSES * len(OPERATIONS)
MEMO_ENTRIES = 128
MEMO_WORDS = (
    4  # of an entry: dtype's address, reduce operation's address, operation's code, description's address
)
TABLES = MEMO + MEMO_ENTRIES * MEMO_WORDS
SOURCES, GIVES, GIVES_BYTES, TAKES, TAKES_BYTES = range(5)
TABLES_A_RANK = 5
