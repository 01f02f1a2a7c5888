"""The private words of a group's mail, on which mail_kernels.py works: one table, and a row for each peer."""

from __future__ import annotations

from ...kernels.waiting import PATIENCE_WORDS

# Words of the table, behind the patience table (of which CLOCK and BUDGET are used).
BELL = PATIENCE_WORDS  # not 0: somebody wants the kernel back
BELL_FD = BELL + 1  # an eventfd that wakes a thread in poll(2), written before BELL is set
CHANNELS = BELL + 2  # address of the row of rank 0
SIZE = BELL + 3
RANK = BELL + 4
TURN = BELL + 5  # the rank to serve first, so that nobody starves
SOURCE = BELL + 6  # receive from any: the rank chosen plus 1, 0 before
BUSY = BELL + 7  # not 0: a thread drives the connections
SPIN = BELL + 8  # ns that a waiting thread tries again before it sleeps
SINCE = BELL + 9  # when the wait under way began, in ns
POLLFDS = BELL + 10  # address: what poll(2) is given
OWNERS = BELL + 11  # address: of each pollfd, 2 * peer + side
BEHIND = BELL + 12  # not 0: operations are under way, or the end has come; blocking calls come after them
# Of mail_answers.py:
DEFERRED = BELL + 13  # the rank whose message was taken and not answered yet, plus 1; 0: none
DEFERRALS = BELL + 14  # how often there was one
MINDED = BELL + 15  # not 0: a thread sees to it that no answer stays deferred
STOP = BELL + 16  # not 0: that thread is to end
LAST_TAKEN = BELL + 17  # the rank whose message the last blocking receive took, plus 1; 0 after a send
TAKEN_AT = BELL + 18  # when that was, in ns
TOLD = BELL + 19  # events that `advance` has told
EVENT = BELL + 20  # the last of them
MAIL_WORDS = BELL + 21

# Words of a row. The way out, by the connection that this rank has dialed:
OUT_FD = 0  # -1: there is none yet
OUT_GONE = 1  # not 0: it is over, and why, as kernels/sockets.py says it, or GARBLED
OUT_BUFFER = 2  # address: the header of the frame that enters, and the beginning of its payload
OUT_POSITION = 3  # bytes of the frame sent
OUT_END = 4  # bytes of the frame; equal to OUT_POSITION when none enters
OUT_STAGED = 5  # how many of them lie in the buffer
OUT_FROM = 6  # address of the payload
SENDING = 7  # a blocking send is under way: 1 with its first part, 2 with its rest
SENT = 8  # number of the last message begun
UNACKED = 9  # how many messages have no ack yet, but perhaps GO
ACK_BUFFER = 10  # address: acks received; bytes received, bytes read
ACK_HAVE = 11
ACK_USED = 12
ACK_NUMBER = 13  # the last ack read
ACK_VERDICT = 14
ACK_NBYTES = 15
ACK_KIND = 16
# The way in, by the connection that the peer has dialed:
IN_FD = 17
IN_GONE = 18
IN_BUFFER = 19  # address: headers and small payloads received; bytes received, bytes read
IN_HAVE = 20
IN_USED = 21
IN_STAGE = 22  # see below
IN_TO = 23  # where the next byte of the payload goes; 0: nowhere
IN_LEFT = 24  # bytes of it that have not come yet
IN_NUMBER = 25  # the header read last
IN_KIND = 26
IN_NBYTES = 27
IN_ATTACHED = 28
REST_NUMBER = 29  # and that of a REST
REST_NBYTES = 30
ASKING = 31  # not 0: a blocking receive has a GO that is not on its way
ANSWER = 32  # address of the ack that is being sent
ANSWER_LEFT = 33  # how many of its bytes are left
WATCHED = 34  # how many posted receives may match a message of this peer; set from Python
EXPECTED = 35  # how many rests have been asked for; set from Python
OWED = 36  # acks that wait for space; set from Python
TAKING = 37  # number of the message that a blocking receive takes
# Of mail_answers.py:
TURNS = 38  # how many blocking receives in a row were followed at once by a send, to the same peer
TURNS_NEEDED = 39  # so many, and answers are deferred
ACK_AHEAD = 40  # whether the last ack came ahead of a message
ROW_WORDS = 48

# IN_STAGE. The engine knows IDLE and ARRIVING, a blocking receive goes through all of them.
IDLE, ARRIVING, AWAITING_REST, REST_ARRIVING, ANSWERING = range(5)
