"""The words of a TCP group's private context and of a prepared call: int64 tables that the engine reads and writes.

Only the thread whose call is in progress accesses them. The engine is executor.py. A word described as "address: ..."
holds the address of a table with what follows; in a table "for each peer", the ranks' entries are in rank order.
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
FDS = 3  # address: for (peer, stream), the file descriptor
CALLS = 4  # number of the last call that has begun
STAGE = 5  # stage of the current call, see below
FRAME = 6  # bytes from one frame (a header and its attached data) to the next, in the inbox
OUTBOX = 7  # address of the frames to send, one for each rank
INBOX = 8  # address of the frames received, one for each rank
STAGING = 9  # address: received bytes to reduce, 2 * IO_BYTES for each stream of each REDUCE row of a phase
BUFFERS = 10  # address: the addresses of the plan's buffers (plans/plan.py)
POLLFDS = 11  # address: the argument of poll(2)
PROGRESS = 12  # address: for (row of the phase, stream), bytes moved and bytes reduced
BUSY = 13  # address: for (peer, direction, stream), the last sweep in which a row used the connection
SOURCES = 14  # address: the addresses of a reduction's operands
PHASE, PHASE_END = 15, 16  # first row of the current phase, and of the next one
PEER = 17  # the peer whose connection is lost, or that sent invalid data
ERROR = 18  # why the connection is lost; an error of kernels/sockets.py
BACKOFF_SWEEPS = 19  # after this many sweeps in which nothing moved, the thread sleeps in poll(2)
SWEEP = 20  # number of the last sweep
SINCE = 21  # when Python last called the engine, in ns
SENT, HAVE = 22, 23  # addresses: for each peer, bytes sent of its outbox, and bytes received into its inbox
MEETING = 24  # address of the prepared call that combines all headers; 0: ranks exchange headers directly
WAITING = 25  # how many pollfds, counted from the first, are of connections for which the call waits
BACKOFF = 26  # the table of kernels/waiting.py
# The following words serve early-return calls, which do not wait for all headers (meet.py).
# Address: for each peer, the number of the first call whose frame is not consumed.
NEXT = BACKOFF + BACKOFF_WORDS
RECORDS = NEXT + 1  # address: for each of the last calls, the call word and shape of each rank
SYNCHRONISING = NEXT + 2  # 0: the current call returns early; it needs only the frames that have data for it
DIFFERS = NEXT + 3  # number of the first call with a mismatch that is not yet reported; 0: none
NOTES = NEXT + 4  # address: for each peer, the number of a call that it refused, and the text of the refusal
LISTED = NEXT + 5  # how many pollfds there are
# Addresses: for each peer, where in its outbox the call's frame begins and ends.
BEGINS, ENDS = NEXT + 6, NEXT + 7
STREAK = NEXT + 8  # how many calls in a row have begun soon (SOON, meet.py) after the call before
RING = NEXT + 9  # address of the ring of the group's record (kernels/recording.py); 0: none
FINISHED = NEXT + 10  # number of the last complete call
BEGAN = NEXT + 11  # when the current call began, in ns
# Address of the prepared call that sends all headers to all ranks if the combined headers show a mismatch.
GATHERING = NEXT + 12
# The lines of the ranks of this node and of the result, for headers (plans/node_meeting.py) and then for relayed data
# (plans/relayed.py): the address of a table with their addresses; and the address of the line for which the thread
# waits, 0 if it waits for connections.
LINES, AWAITED = NEXT + 13, NEXT + 14
CARRYING = NEXT + 15  # address of the prepared call whose data the combined headers carry; 0: none
RUNNING = (
    NEXT + 16
)  # address of the prepared call whose plan runs after the meeting: the current one, or its EVEN
CONTEXT_WORDS = NEXT + 17

# ---- a prepared call ----------------------------------------------------------------------------------
CALL, SHAPE = 0, 1  # see core/signature.py
TABLE, ROWS = 2, 3  # address and length of the plan
PAYLOADS = 4  # how many rows are PAYLOAD; they are the first ones
REDUCER, CODE, ITEMSIZE = 5, 6, 7
ATTACHED = 8  # address: for each peer, bytes that it attaches to its header
BALANCE = 9  # hash of the sizes that this rank sends, minus hash of those that it expects (core/signature.py)
SPLIT_ARRAY = 10  # which of two arrays may hold the blocks of all ranks; BOTH; -1: neither
BLOCK_BYTES = 11  # bytes of each of these blocks
CAN_RETURN_EARLY = 12  # whether the call may return before all headers have arrived (meet.py)
MOVES = 13  # whether anything is sent or received after the meeting
LACKS_PEERS = 14  # whether connections with peers of the plan may be missing; they are made after the meeting
# The bytes of data that combined headers carry, and how many items they are for the REDUCER (plans/node_meeting.py).
CARRIED, CARRIED_ITEMS = 15, 16
BLOCK = 17  # see HEAD_BLOCK in meet.py
EVEN = (
    18  # address of the call that the engine makes instead if all blocks of all ranks have one size; 0: none
)
PREPARED_WORDS = 19

BOTH = 2

# ---- a header -----------------------------------------------------------------------------------------
# These words follow NUMBER, HEAD_CALL, HEAD_SHAPE and HEAD_BALANCE; meet.py has their meanings.
HEAD_ATTACHED, HEAD_DIFFERS, HEAD_BLOCK = 4, 5, 6

# ---- stages -------------------------------------------------------------------------------------------
IDLE, MEET, RUN, GATHER = range(4)

# Tags of the context's address:
RESUMED = 1  # continue the current call
MAY_RETURN_EARLY = 2  # the call may return early if its CAN_RETURN_EARLY is set, too
