"""The words of a TCP group's private context and of a prepared call: int64 tables that the engine reads and writes.

Only the thread whose call is under way touches them.
"""

from __future__ import annotations

from ...kernels.waiting import PATIENCE_WORDS
from .plans.shape import MEET_RANKS

# ---- the context --------------------------------------------------------------------------------------
RANK = 0
SIZE = 1
STREAMS = 2  # connections to each peer
FDS = 3  # address: file descriptor of (peer, stream)
CALLS = 4  # number of the last call begun
STAGE = 5  # what the call under way is doing
HEADER = 6  # bytes of a header
FRAME = 7  # bytes from one frame to the next: a header and what may be attached to it
OUTBOX = 8  # address of the frames to send, one a peer
INBOX = 9  # address of the frames received, one a peer
STAGING = 10  # address of where bytes land that are reduced, PIECE bytes a REDUCE row of a phase and stream
BUFFERS = 11  # address: where the buffers of the plan begin
POLLFDS = 12  # address: what poll(2) is given
PARTS = 13  # address: bytes moved, bytes reduced, of (row of the phase, stream)
BUSY = 14  # address: for (peer, direction, stream), the sweep in which an earlier row had it
SOURCES = 15  # address: operands of a reduction
PHASE, PHASE_END = 16, 17  # rows of the phase under way
PEER = 18  # the peer whose connection is over, or who sent garbage
ERROR = 19  # why it is over, as kernels/sockets.py says it
PATIENT_SWEEPS = 20  # sweeps in vain before the thread sleeps in poll(2)
SWEEP = 21  # number of the last sweep
SINCE = 22  # when this run of the engine began, in ns
SENT, HAVE = 23, 24  # addresses: bytes of each peer's frame sent, and received
MEETING = 25  # address of the prepared call that brings the headers together; 0: everybody sends to everybody
WAITING = 26  # how many pollfds there are
PATIENCE = 27  # the table of kernels/waiting.py
CONTEXT_WORDS = PATIENCE + PATIENCE_WORDS

# ---- a prepared call ----------------------------------------------------------------------------------
CALL, SHAPE = 0, 1  # the fingerprint, see core/signature.py
TABLE, ROWS = 2, 3  # address and length of the plan
PAYLOADS = 4  # how many of the first rows are PAYLOAD
REDUCER, CODE, ITEMSIZE = 5, 6, 7
ATTACHED = 8  # address: bytes that each peer attaches to its header
GIVES = 9  # address: bytes given to each peer, then bytes expected of each
BALANCE = 10  # of these sizes (core/signature.py)
PREPARED_WORDS = 11

# ---- a header -----------------------------------------------------------------------------------------
NUMBER, HEAD_CALL, HEAD_SHAPE, HEAD_ATTACHED = 0, 1, 2, 3
HEAD_BALANCE = 4
SIZES = 8  # where everybody sends to everybody: bytes given to each peer, then bytes expected of each

# ---- stages -------------------------------------------------------------------------------------------
IDLE, MEET, RUN = 0, 1, 2

RESUMED = 1  # tag of the context's address: go on with the call under way


def header_bytes(size: int) -> int:
    """The length of a header in a group of `size` ranks: whole cache lines, so that what follows is aligned."""
    sizes = 2 * size if size <= MEET_RANKS else 0
    return -(-8 * (SIZES + sizes) // 64) * 64
