"""The words of a TCP group's private context and of a prepared call: int64 tables that the engine reads and writes.

Only the thread whose call is under way touches them.
"""

from __future__ import annotations

from ...kernels.waiting import PATIENCE_WORDS

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
PARTS = 12  # address: bytes moved, bytes reduced, of (row of the phase, stream)
BUSY = 13  # address: for (peer, direction, stream), the sweep in which an earlier row had it
SOURCES = 14  # address: operands of a reduction
PHASE, PHASE_END = 15, 16  # rows of the phase under way
PEER = 17  # the peer whose connection is over, or who sent garbage
ERROR = 18  # why it is over, as kernels/sockets.py says it
PATIENT_SWEEPS = 19  # sweeps in vain before the thread sleeps in poll(2)
SWEEP = 20  # number of the last sweep
SINCE = 21  # when this run of the engine began, in ns
SENT, HAVE = 22, 23  # addresses: bytes of each peer's frame sent, and received
MEETING = 24  # address of the prepared call that brings the headers together; 0: everybody sends to everybody
WAITING = 25  # how many pollfds there are
PATIENCE = 26  # the table of kernels/waiting.py
CONTEXT_WORDS = PATIENCE + PATIENCE_WORDS

# ---- a prepared call ----------------------------------------------------------------------------------
CALL, SHAPE = 0, 1  # the fingerprint, see core/signature.py
TABLE, ROWS = 2, 3  # address and length of the plan
PAYLOADS = 4  # how many of the first rows are PAYLOAD
REDUCER, CODE, ITEMSIZE = 5, 6, 7
ATTACHED = 8  # address: bytes that each peer attaches to its header
BALANCE = 9  # of the bytes given to each peer and expected of each (core/signature.py)
WHOLE = 10  # which of the arrays may be given in one piece, with a part for each rank; -1: none
PART = 11  # bytes of such a part
PREPARED_WORDS = 12

# ---- a header -----------------------------------------------------------------------------------------
NUMBER, HEAD_CALL, HEAD_SHAPE, HEAD_BALANCE, HEAD_ATTACHED = range(5)

# ---- stages -------------------------------------------------------------------------------------------
IDLE, MEET, RUN = 0, 1, 2

RESUMED = 1  # tag of the context's address: go on with the call under way
