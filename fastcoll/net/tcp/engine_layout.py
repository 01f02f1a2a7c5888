"""The words of a TCP group's private context and of a prepared call: int64 tables that the engine reads and writes.

Only the thread whose call is under way touches them.
"""

from __future__ import annotations

from ...kernels.headers import HEAD_BALANCE as HEAD_BALANCE
from ...kernels.headers import HEAD_CALL as HEAD_CALL
from ...kernels.headers import HEAD_SHAPE as HEAD_SHAPE
from ...kernels.headers import NUMBER as NUMBER
from ...kernels.waiting import BACKOFF_WORDS

# ---- the context --------------------------------------------------------------------------------------
RANK = 0
SIZE = 1
STREAMS = 2  # connections to each peer
FDS = 3  # address: file descriptor of (peer, stream)
CALLS = 4  # number of the last call begun
STAGE = 5  # what the call under way is doing
FRAME = 6  # bytes from one frame to the next: a header and what may be attached to it
OUTBOX = 7  # address of the frames to send, one a peer
INBOX = 8  # address of the frames received, one a peer
STAGING = 9  # address of where bytes land that are reduced, PIECE bytes a REDUCE row of a phase and stream
BUFFERS = 10  # address: where the buffers of the plan begin
POLLFDS = 11  # address: what poll(2) is given
PROGRESS = 12  # address: bytes moved, bytes reduced, of (row of the phase, stream)
BUSY = 13  # address: for (peer, direction, stream), the sweep in which an earlier row had it
SOURCES = 14  # address: operands of a reduction
PHASE, PHASE_END = 15, 16  # rows of the phase under way
PEER = 17  # the peer whose connection is over, or who sent garbage
ERROR = 18  # why it is over, as kernels/sockets.py says it
BACKOFF_SWEEPS = 19  # sweeps in vain before the thread sleeps in poll(2)
SWEEP = 20  # number of the last sweep
SINCE = 21  # when this run of the engine began, in ns
SENT, HAVE = 22, 23  # addresses: bytes of each peer's outbox sent, and of its inbox received
MEETING = 24  # address of the prepared call that combines all headers; 0: everybody sends to everybody
WAITING = 25  # how many of the pollfds, from the first one on, are of connections that the call waits for
BACKOFF = 26  # the table of kernels/waiting.py
# What meet.py says of calls whose headers have not all been waited for:
NEXT = (
    BACKOFF + BACKOFF_WORDS
)  # address: of each peer, the number of the first call whose frame is not used up
RECORDS = NEXT + 1  # address: of the last calls, what each rank called
SYNCHRONISING = NEXT + 2  # 0: the call under way needs the frames only of those that attach something
DIFFERS = NEXT + 3  # number of the first call that did not match and was not told yet; 0: none
NOTES = NEXT + 4  # address: of each peer, a call's number and the text with which it was refused
LISTED = NEXT + 5  # how many pollfds there are
BEGINS, ENDS = (
    NEXT + 6,
    NEXT + 7,
)  # addresses: where in each outbox the call's frame begins, and where it ends
STREAK = NEXT + 8  # how many calls in a row began soon after the one before
RING = NEXT + 9  # address of the ring of the group's record (kernels/recording.py); 0: none
FINISHED = NEXT + 10  # number of the last call that is complete
BEGAN = NEXT + 11  # when the call under way began, in ns
GATHERING = NEXT + 12  # address of the prepared call that then brings all headers together, if they differ
CONTEXT_WORDS = NEXT + 13

# ---- a prepared call ----------------------------------------------------------------------------------
CALL, SHAPE = 0, 1  # the fingerprint, see core/signature.py
TABLE, ROWS = 2, 3  # address and length of the plan
PAYLOADS = 4  # how many of the first rows are PAYLOAD
REDUCER, CODE, ITEMSIZE = 5, 6, 7
ATTACHED = 8  # address: bytes that each peer attaches to its header
BALANCE = 9  # of the bytes given to each peer and expected of each (core/signature.py)
SPLIT_ARRAY = 10  # which of the arrays may be given in one piece, with a part for each rank; -1: none
BLOCK_BYTES = 11  # bytes of such a part
CAN_RETURN_EARLY = 12  # whether it may be loose (meet.py)
MOVES = 13  # whether anything is sent or received after the meeting
PREPARED_WORDS = 14

# ---- a header -----------------------------------------------------------------------------------------
# after NUMBER, HEAD_CALL, HEAD_SHAPE and HEAD_BALANCE
HEAD_ATTACHED, HEAD_DIFFERS = 4, 5

# ---- stages -------------------------------------------------------------------------------------------
IDLE, MEET, RUN, GATHER = range(4)

# Tags of the context's address:
RESUMED = 1  # go on with the call under way
MAY_RETURN_EARLY = 2  # the call may be loose (meet.py)
