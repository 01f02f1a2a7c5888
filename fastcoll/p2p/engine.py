"""The progress engine of messages: send, recv, isend, irecv of one rank, carried on by whoever waits.

Who drives. One thread at a time has the *turn*: the words BUSY of all pipes. Posting takes it if it is free, does all
that can be done at once, and lets it go. Whoever waits for an operation takes it and drives everything that is under
way until that operation has ended. The engine's own thread takes it only when operations are under way and nobody has
driven for a millisecond; whoever waits gets the turn from it at once.

Who writes what. With the turn: `_exchange`, and whatever the pipes keep. Without it, by any thread: `inbox`, posted
operations in their order, whose end only the holder of the turn takes from; and `_sleepers`, who wait for the turn.
Nobody's post is lost: a poster appends, and then tries to take the turn; a holder lets it go, and then looks at the
inbox. One of them comes second and sees what the other did. Blocking calls on the pipes' compiled short cuts take BUSY
unless the word BEHIND is set; posting sets it after appending, the holder clears it before its last look.

Interrupts. A signal handler may run, and raise, between any two steps of the thread that drives. Nearly always that is
when `advance` returns: nothing is half-done then, the pipe says the same event again, and handlers may even wait for
messages themselves. An exception in the middle of an event's handling leaves the books torn, and fails the group.

An operation's callbacks run on the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ..arrays.adopted import Adopted
from ..core.message import Status
from ..core.monitor import Monitor
from ..core.status import DONE, LATER, REFUSED
from ..core.work import ENDLESS, Work, forks
from ..errors import AbortedError, FastcollError, GroupError, NotInitializedError, UsageError
from ..record.record import WAITS
from .exchange import Exchange
from .pipe import ANY, ARMED, EVENTS, NOT_MINE, NOTHING, Pipe
from .transfers import Array, Probe, Receive, Send, Transfer, kind_of, tag_of

_NAP = 1e-3  # seconds without progress after which the engine's thread drives
_NAPS = 50  # of them without operations, before that thread sleeps
_POLL = 5e-5
_BUDGET = 0.05  # seconds that a pipe waits before somebody looks at signals, deadlines and peers
_LOOK_EVERY = 64  # events, where there is always one
_CLOSE_SECONDS = 5.0  # kernels come back within 0.1 s; longer means a thread killed while it had the turn
_T = TypeVar("_T", bound=Transfer)


class Engine:
    """Messages between the ranks of a group. All ranks here are group ranks; all methods are thread-safe.

    A send is complete when a receive has taken its message; a send to this rank, when it is buffered. Messages
    between two ranks with one tag arrive in order. Receives match in the order in which they were posted. A
    message that the matching receive cannot hold (size, dtype) is dropped and raises on both ranks; the engine
    stays usable. Any other error fails the group: a peer's death, or an operation that is not complete `timeout`
    seconds after it was posted.

    Args:
        routes: by rank, the pipe to it and its number there; whatever for this rank.
        rank: this process's group rank.
        vigil: the group's.
        timeout: seconds that an operation may take.

    Attributes:
        adopts: called with the number and the operation when the engine takes over a compiled caller's request.
        inbox: posted operations that have not begun, in their order; a short cut may not post while there are any.
        queued: by rank, sends that have been admitted and not begun; a short cut may not send past them.
    """

    def __init__(self, routes: list[tuple[Pipe, int]], rank: int, vigil: Monitor, timeout: float) -> None:
        self.rank, self.vigil, self.timeout = rank, vigil, timeout
        self.forks = forks()
        self.adopts: Callable[[int, Transfer], object] = lambda number, transfer: None
        self._routes = routes
        self._pipes = list(dict.fromkeys(pipe for pipe, _ in routes))
        self._ranks = [{n: r for r, (p, n) in enumerate(routes) if p is pipe} for pipe in self._pipes]
        self._is_single = len(self._pipes) == 1
        self._exchange = Exchange(routes, rank)
        self.queued = {other: peer.queued for other, peer in enumerate(self._exchange.peers)}
        self.inbox: deque[Transfer] = deque()
        self._sleepers: deque[threading.Event] = deque()
        self._handled = [0] * len(self._pipes)  # events
        self._first = 0  # the pipe whose turn it is, of two
        self._driving = False  # somebody has the turn, not merely a short cut
        self._resting = True  # and is in `advance`; or nobody has it
        self._nested = 0  # how often a signal handler has driven meanwhile
        self._stamp = 0  # counts who has driven
        self._wanted = False  # the engine's thread is to let go
        self._look_in = _LOOK_EVERY
        self._next_look = 0.0
        self._told = 0  # how many waits are in the record
        self._closed = False
        self._given_up: BaseException | None = None  # closed by a signal handler of the thread that drives
        self._adopting = threading.RLock()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._asleep = True  # the engine's thread must be woken
        self._called_back: deque[Transfer] = deque()

    # ---- the four operations ----------------------------------------------------------------------

    def send(self, x: Adopted, dst: int, tag: int) -> None:
        """Send and wait until it is taken; to oneself, until it is buffered.

        Raises:
            MismatchError: the receiver's array has another size or dtype.
            GroupError: a peer died, left or did not come in time.
        """
        array = x.array
        if dst == self.rank:
            self.isend(x, dst, tag)
            return
        self._refuse_nesting("send")
        self._prepare(dst)
        pipe, number = self._routes[dst]
        try:
            status = pipe.send(array, number, kind_of(tag, array.dtype))
            if status != DONE:
                self.resume_send(status, array, dst, tag)
        except BaseException as error:
            self.torn(error, "send")
            raise

    def recv(self, x: Adopted, src: int | None, tag: int, status: Status | None = None) -> int:
        """Receive from `src`, or from any rank; returns the sender.

        `status` is filled; with one, the message may be shorter than the array.

        Raises:
            MismatchError: the message has another size or dtype.
            GroupError: a peer died, left or did not come in time.
        """
        self._refuse_nesting("recv")
        if tag < 0 or status is not None:
            return int(self._finish_blocking(Receive(self, x.array, src, tag, x, status), LATER))
        code = LATER
        try:
            if src != self.rank and (src is not None or len(self._pipes) == 1):
                pipe, number = self._pipes[0], ANY
                if src is not None:
                    pipe, number = self._routes[src]
                code = pipe.receive(x.array, number, kind_of(tag, x.array.dtype))
            if code >= DONE:
                return self.resume_receive(code, x.array, src, tag, x)
            x.finish()
        except BaseException as error:
            self.torn(error, "recv")
            raise
        return -1 - code if src is None else src

    def isend(self, x: Adopted, dst: int, tag: int) -> Work:
        """Post a send; the Work is complete when a receive has taken it, to this rank at once."""
        return self._post(Send(self, x.array.copy() if dst == self.rank else x.array, dst, tag))

    def irecv(self, x: Adopted, src: int | None, tag: int, status: Status | None = None) -> Work:
        """Post a receive; the Work's result is the sender. `status`: as for `recv`."""
        return self._post(Receive(self, x.array, src, tag, x, status))

    def probe(self, src: int | None, tag: int) -> Status:
        """Wait for a message from `src`, or any rank, that no receive has taken; it stays for the next such receive.

        Raises:
            GroupError: a peer died, left or did not send in time.
        """
        status: Status = self._finish_blocking(Probe(self, src, tag, at_once=False), LATER)
        return status

    def iprobe(self, src: int | None, tag: int) -> Status | None:
        """Return what `probe` would find among the messages that have arrived, or None. Never waits."""
        status: Status | None = self._finish_blocking(Probe(self, src, tag, at_once=True), LATER)
        return status

    # ---- short cuts that came back early ----------------------------------------------------------

    def resume_send(self, status: int, array: Array, dst: int, tag: int) -> None:
        """Go on with a blocking send whose short cut came back with `status`, which is not DONE."""
        send = Send(self, array, dst, tag)
        if status == REFUSED:
            pipe, number = self._routes[dst]
            ack = pipe.last_ack(number)
            self._let_go(pipe)
            raise send.misfit(ack.kind, ack.nbytes)
        send.watch.hint = partial(self._crossing, dst)
        self._finish_blocking(send, status)

    def resume_receive(
        self, status: int, array: Array, src: int | None, tag: int, adopted: Adopted | None = None
    ) -> int:
        """Go on with a blocking receive whose short cut came back with `status`, at least DONE; the sender."""
        return int(self._finish_blocking(Receive(self, array, src, tag, adopted), status))

    def _adopt(self, transfer: Transfer, pipe: Pipe) -> None:
        """Go on with what a short cut has left half-way, which still has its pipe.

        Another thread may do so at the same time with another pipe; nobody has the turn then.
        """
        try:
            if self._closed:
                raise _destroyed(transfer)
            with self._adopting:
                if isinstance(transfer, Send):
                    self._exchange.adopt_send(transfer)
                elif isinstance(transfer, Receive):
                    self._exchange.adopt_receive(transfer, pipe)
            for other in self._pipes:
                other.set_behind(True)
        finally:
            pipe.let_go()

    def _finish_blocking(self, transfer: Transfer, status: int) -> Any:
        """Post a blocking operation, or go on with it, and wait for it; its result."""
        try:
            if status == LATER:
                self._refuse_waiting(transfer)
                self._post(transfer)
            else:
                pipe = self._pipes[0] if transfer.peer is None else self._routes[transfer.peer][0]
                self._adopt(transfer, pipe)
            self._await(transfer, ENDLESS)
            return transfer.result()
        except BaseException as error:
            if not transfer.ended and not (status == LATER and isinstance(error, FastcollError)):
                self._blame(error, transfer.describe)
            raise

    def _crossing(self, peer: int) -> str:
        """What else may be the matter with a send that is not taken."""
        pipe, number = self._routes[peer]
        if not pipe.has_unread(number) and not self._exchange.peers[peer].kept_messages:
            return ""
        return (
            f"; a message of {self.vigil.name(peer)} lies here, too, which no receive has taken: if both ranks wait "
            "in send, neither goes on; let one of them receive first, or post both with isend or batch_isend_irecv"
        )

    def torn(self, error: BaseException, doing: str) -> None:
        """After an exception between a short cut's return and what follows: fail if it was half-way."""
        for pipe in self._pipes:
            if pipe.is_mine():
                self._blame(error, doing)
                self._let_go(pipe)

    def sent(self, number: int, array: Array, dst: int, tag: int) -> Work:
        """A short cut has put the whole message `number` into its pipe, which it still has."""
        send = Send(self, array, dst, tag)
        self._let_go(self._exchange.note_sent(send, number))
        return send

    def armed(self, array: Array, src: int, tag: int) -> Work:
        """A short cut has armed a receive in its pipe, which it still has."""
        receive = Receive(self, array, src, tag)
        self._let_go(self._exchange.note_armed(receive))
        return receive

    def received(self, array: Array, src: int, tag: int) -> Work:
        """A short cut has received a message at once."""
        receive = Receive(self, array, src, tag)
        receive.complete(src)
        return receive

    # ---- life -------------------------------------------------------------------------------------

    def is_in_vain(self, work: Work) -> bool:
        """Whether no live peer can complete this posted receive (or message to this rank)."""
        if not isinstance(work, Transfer):
            return False
        peers = range(len(self.vigil.members)) if work.peer is None else (work.peer,)
        if not all(peer == self.rank or self.vigil.has_left(peer) for peer in peers):
            return False
        # In this order. What the peers had sent was matched before they left. Two operations of this rank may be made
        # for each other, so none may be in the inbox. What has its partner needs nobody, though it may be live still:
        # another thread may be copying the message just now.
        return not self.inbox and self._exchange.is_unmatched(work)

    def is_entered(self) -> bool:
        """Whether messages cannot go on until this thread does: it is the engine's, or a signal handler in a call."""
        return self._on_own_thread() or self.has_turn()

    def abort(self) -> None:
        """Have everything under way look at the group's state at once. From any thread."""
        for pipe in self._pipes:
            pipe.ring_bell()
        self._wake()

    def close(self, error: GroupError | None) -> None:
        """End what is under way with `error`, and use the pipes no more. Closing twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            for pipe in self._pipes:
                pipe.set_behind(True)
            thread = self._thread
        self.abort()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_SECONDS)
        end = error or AbortedError("the group was destroyed before the operation was complete")
        held, deadline = False, time.monotonic() + _CLOSE_SECONDS
        nested = self.has_turn()  # a signal handler, in the middle of the very call that it would wait for
        while not nested and not (held := self._seize()) and time.monotonic() < deadline:
            for pipe in self._pipes:
                pipe.ring_bell()
            time.sleep(_POLL)
        if nested:
            self._given_up = end
        elif held:
            self._take_over(ended=True)
            self._end_all(end)
        if nested or held:
            for pipe in self._pipes:
                pipe.retire()
            for sleeper in list(self._sleepers):
                sleeper.set()
        self._hand_out()
        self._run_callbacks()

    # ---- the turn ---------------------------------------------------------------------------------

    def _seize(self) -> bool:
        """Take the turn, unless somebody has it."""
        pipes = self._pipes
        if not pipes[0].seize():
            return False
        if len(pipes) == 2 and not pipes[1].seize():
            pipes[0].let_go()
            return False
        self._driving, self._resting = True, False
        try:
            for pipe in pipes:
                if pipe.has_posted():
                    self._take_over(ended=False)
        except BaseException:
            self._release()
            raise
        return True

    def _take_over(self, ended: bool) -> None:
        """Take over the requests of compiled callers; needs the turn. An interrupt fails the group."""
        for pipe in self._pipes:
            self._turn(self._adopt_posted, pipe, ended)

    def _adopt_posted(self, pipe: Pipe, ended: bool) -> None:
        pipe.set_behind(True)
        ranks = self._ranks[self._pipes.index(pipe)]
        for posted in pipe.take_posted(ended):
            kind = Send if posted.sends else Receive
            transfer = kind(self, posted.array, ranks[posted.peer], tag_of(posted.kind))
            transfer.be_of(posted.kind)
            self._exchange.take_over(transfer, posted)
            self.adopts(posted.number, transfer)

    def take_over(self) -> None:
        """Take over all requests of compiled callers; blocks while another thread drives."""
        while not self._closed and not self.has_turn():
            if self._seize():
                try:
                    self._take_over(ended=True)
                finally:
                    self._release()
                return
            self._sleep(None)

    def has_turn(self) -> bool:
        """Whether this thread drives a pipe: then this is a signal handler, or a callback of an Adopted."""
        return any(pipe.is_mine() for pipe in self._pipes)

    def _release(self) -> None:
        """Let the turn go; carry on what was posted meanwhile."""
        if self._told and not self._exchange.live:  # no thread may drive again
            self._tell(0.0)
        if not self._exchange.is_busy() and not self._closed:
            for pipe in self._pipes:
                pipe.set_behind(False)
            if self.inbox or self._closed:
                for pipe in self._pipes:
                    pipe.set_behind(True)
        self._driving, self._resting = False, True
        for pipe in self._pipes:
            pipe.let_go()
        if self._exchange.ended:
            self._hand_out()
        if self.inbox or self._sleepers or self._asleep:
            self._hand_on()

    def _let_go(self, pipe: Pipe) -> None:
        """As `_release`, of what a short cut has taken."""
        pipe.let_go()
        if self.inbox or self._sleepers or self._asleep:
            self._hand_on()

    def _hand_on(self) -> None:
        """After letting go: see to what was posted meanwhile, and wake who waits for the turn."""
        while self._next_is_ready() is True and not self._closed and self._seize():
            try:
                self._turn(self._admit_posts)
            finally:
                self._driving, self._resting = False, True
                for pipe in self._pipes:
                    pipe.let_go()
        for sleeper in list(self._sleepers)[:1]:  # which may go meanwhile
            sleeper.set()
        if self._asleep and (self._exchange.live or self.inbox):
            self._wake()

    def _sleep(self, end: float | None) -> None:
        """Wait until the turn may be free."""
        sleeper = threading.Event()
        self._sleepers.append(sleeper)
        try:
            for pipe in self._pipes:
                pipe.ring_bell()
            sleeper.wait(_NAP if end is None else max(0.0, min(_NAP, end - time.monotonic())))
        finally:
            self._sleepers.remove(sleeper)

    def _turn(self, step: Callable[..., object], *args: Any) -> None:
        """Do something with the turn. Whatever goes wrong there ends every operation."""
        try:
            step(*args)
        except BaseException as error:
            if self._resting and not isinstance(error, GroupError):
                raise  # a signal handler's, and nothing is half-done
            self._blame(error, "carrying messages")
            self._end_all(self.vigil.failure or error)
            if not isinstance(error, Exception):
                raise

    def _admit_posts(self) -> None:
        while self.inbox and self._is_ready(self.inbox[0]):
            self._resting = False
            self._exchange.admit(self.inbox[0])
            transfer = self.inbox.popleft()  # after `admit`: `is_in_vain` reads both queues without the turn
            if isinstance(transfer, Probe) and transfer.at_once:
                self._look_for(transfer)
        self._resting = True

    # ---- driving ----------------------------------------------------------------------------------

    def await_end(self, transfer: Transfer, limit: float) -> bool:
        """Block until a transfer has ended, at most so many seconds; whether it has."""
        if self._thread is not None and threading.get_ident() == self._thread.ident:
            raise UsageError(f"waiting for {transfer.describe}: a Work's callback may not wait for messages")
        if transfer.is_small and self._is_single and limit >= ENDLESS and not self.inbox:
            self._drive_closely(transfer)
        return transfer.ended or self._await(transfer, limit)

    def _drive_closely(self, transfer: Transfer) -> None:
        """As `_await`, by one call of a pipe, for what its short cut has posted and what mostly ends at once."""
        assert transfer.peer is not None
        pipe, number = self._routes[transfer.peer]
        nested = self._nested
        try:
            event = pipe.complete(self._handled[0], number, transfer.number)
        except BaseException:  # a signal handler's
            if pipe.is_mine() and not self._driving:
                self._release()
            raise
        if event == NOT_MINE:
            return
        self._driving = True
        try:
            self._turn(self._deal, 0, event, nested)
        finally:
            self._release()

    def _await(self, transfer: Transfer, limit: float) -> bool:
        end = None if limit >= ENDLESS else time.monotonic() + limit
        while not transfer.ended:
            if not self._closed and self._seize():
                try:
                    self._turn(self._drive, transfer, end)
                finally:
                    self._release()
            elif self.has_turn():
                self._drive_nested(transfer, end)
            elif self._given_up is not None:
                self._end_all(self._given_up)
            else:
                self._sleep(end)
            if self.inbox and not transfer.ended:
                self._prepare_posts()
            if end is not None and not transfer.ended and time.monotonic() >= end:
                return False
        if self._told:
            self._tell(time.monotonic() - _BUDGET)
        return True

    def _drive(self, transfer: Transfer, end: float | None) -> None:
        """Carry on what is under way until a transfer has ended, or something needs to be done without the turn."""
        self._stamp += 1
        self._resting = True
        while not transfer.ended and not self._exchange.ended and not self._closed:
            if self.inbox:
                if not self._is_ready(self.inbox[0]):
                    return
                self._admit_posts()
            near = end is not None and end - time.monotonic() < _BUDGET
            if not (self._advance_one(0, not near) if self._is_single else self._advance(not near)):
                self._look()
                if near:
                    assert end is not None
                    if time.monotonic() >= end:
                        return
                    time.sleep(_POLL)

    def _drive_nested(self, transfer: Transfer, end: float | None) -> None:
        """In a signal handler whose thread has the turn: drive if nothing is half-done, which a blocking call is."""
        if not self._resting:
            raise UsageError(
                f"waiting for {transfer.describe}: a signal handler may not wait for messages while its thread does"
            )
        self._nested += 1
        try:
            self._turn(self._drive, transfer, end)
            self._hand_out()
        finally:
            self._resting = True

    def poll(self) -> None:
        """Let messages get on as far as they can without waiting."""
        if self._closed or self.forks != forks() or self._on_own_thread():
            return
        if self._seize():
            try:
                self._turn(self._drive_at_once)
            finally:
                self._release()
        elif not self.has_turn():
            self._wanted = True
            for pipe in self._pipes:
                pipe.ring_bell()

    def _drive_at_once(self) -> None:
        self._stamp += 1
        self._admit_posts()
        while self._exchange.live and self._advance(False):
            pass
        if time.monotonic() >= self._next_look:
            self._look()

    def _advance(self, wait: bool) -> bool:
        """Let bytes move, and deal with the next event; False: there was none."""
        if self._is_single:
            return self._advance_one(0, wait)
        return self._advance_both() if wait else self._try_both()

    def _try_both(self) -> bool:
        """Let both pipes' bytes move, in turn, so that neither starves."""
        for index in (self._first, 1 - self._first):
            if self._advance_one(index, False):
                self._first = 1 - index
                return True
        return False

    def _advance_one(self, index: int, wait: bool) -> bool:
        nested, pipe = self._nested, self._pipes[index]
        event = pipe.advance(self._handled[index], wait)
        return self._deal(index, event, nested)

    def _deal(self, index: int, event: int, nested: int) -> bool:
        """Deal with what `advance` said when `_nested` was `nested`; False: nothing."""
        self._resting = False
        if event == NOTHING and self._nested == nested:
            self._pipes[index].silence_bell()
            self._resting = True
            return False
        if self._nested == nested and not self._closed:  # else it was dealt with, or is not to be
            self._exchange.on_event[event % EVENTS](self._ranks[index][event // EVENTS])
            self._handled[index] += 1
            self._look_in -= 1
        self._resting = True
        if self._look_in <= 0:
            self._look()
        return True

    def _advance_both(self) -> bool:
        """Wait for both pipes: try them in turn, with naps in between."""
        awaited = [any(self._needs(t, pipe) for t in self._exchange.live) for pipe in self._pipes]
        if sum(awaited) == 1:
            return self._advance_one(awaited.index(True), True)
        start = now = time.monotonic()
        while now - start < _BUDGET:
            if self._try_both():
                return True
            if self.inbox or self._sleepers or self._closed or self.vigil.failure is not None:
                return False
            # As kernels/waiting.py has it: first others may run, then this thread sleeps.
            time.sleep(0 if now - start < _POLL else _POLL)
            now = time.monotonic()
        return False

    def _needs(self, transfer: Transfer, pipe: Pipe) -> bool:
        return transfer.peer is None or (
            transfer.peer != self.rank and self._routes[transfer.peer][0] is pipe
        )

    def _look(self) -> None:
        """Look after the oldest operation of each kind with each peer; the others share its fate.

        Raises:
            GroupError: the peers or the clock make going on hopeless.
        """
        self._look_in = _LOOK_EVERY
        now = time.monotonic()
        if self.vigil.failure is not None:
            raise self.vigil.failure.with_traceback(None)
        if now < self._next_look:
            return
        self._next_look = now + _BUDGET
        self._tell(now - _BUDGET)
        seen = set()
        for transfer in list(self._exchange.live):
            key = (type(transfer), transfer.peer)
            if key not in seen:
                seen.add(key)
                transfer.watch.look()
                if transfer.peer is None:
                    for pipe in self._pipes:
                        pipe.check(None)
                elif transfer.peer != self.rank:
                    pipe, number = self._routes[transfer.peer]
                    pipe.check(number)

    def _tell(self, before: float) -> None:
        """Record which messages wait that were posted before then; a few of them."""
        record = self.vigil.record
        if record is None:
            return
        waiting = [transfer for transfer in list(self._exchange.live) if transfer.posted <= before]
        for slot in range(1, WAITS):
            if slot <= len(waiting):
                transfer = waiting[slot - 1]
                record.waits(slot, transfer.describe, transfer.needed(), transfer.posted, message=True)
            elif slot <= self._told:
                record.waits_no_more(slot)
        self._told = min(len(waiting), WAITS - 1)

    def _hand_out(self) -> None:
        """Give received arrays what is owed to them. Without the turn, as it may take long."""
        ended = self._exchange.ended
        while ended:
            try:
                receive, source = ended.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                receive.finish()
            except Exception as error:
                receive.complete(None, error)
            else:
                receive.complete(source)
            for pipe in self._pipes:  # whoever drives may wait for just this
                pipe.ring_bell()

    # ---- posting ----------------------------------------------------------------------------------

    def _post(self, transfer: _T) -> _T:
        """Begin an operation, here if nobody has the turn."""
        if self.vigil.failure is not None:
            raise self.vigil.failure
        if self._closed:
            raise NotInitializedError(f"{transfer.describe}: the group was destroyed; make a new one")
        if self.inbox:
            pass  # behind those
        elif self._takes_short_cut(transfer):
            return transfer
        elif self._is_ready(transfer) and self._seize():
            try:
                for pipe in self._pipes:
                    pipe.set_behind(True)
                self._turn(self._admit, transfer)
            finally:
                self._release()
            return transfer
        self.inbox.append(transfer)
        for pipe in self._pipes:
            pipe.set_behind(True)
            pipe.ring_bell()
        if self._closed:  # meanwhile, perhaps after the inbox was emptied
            self._end_all(_destroyed(transfer))
        self._hand_on()
        if not self._is_ready(transfer):
            self._wake()
        return transfer

    def _takes_short_cut(self, transfer: Transfer) -> bool:
        """Begin an operation by one compiled call, if it is one for that."""
        if transfer.peer is None or transfer.peer == self.rank or not transfer.is_plain:
            return False
        pipe, number = self._routes[transfer.peer]
        try:
            if isinstance(transfer, Send):
                if not self._exchange.may_begin(transfer):
                    return False
                sent = pipe.post_send(transfer.array, number, transfer.kind)
                if sent is None:
                    return False
                self._exchange.note_sent(transfer, *sent)
            elif isinstance(transfer, Receive):
                status = LATER if transfer.owes else pipe.post_receive(transfer.array, number, transfer.kind)
                if status == DONE:
                    transfer.complete(transfer.peer)
                if status != ARMED:
                    return status == DONE
                self._exchange.note_armed(transfer)
        except BaseException as error:
            self.torn(error, transfer.describe)
            raise
        self._let_go(pipe)
        return True

    def _admit(self, transfer: Transfer) -> None:
        """Take an operation on, and do what can be done at once."""
        self._stamp += 1
        self._exchange.admit(transfer)
        self._resting = True
        if isinstance(transfer, Probe) and transfer.at_once:
            self._look_for(transfer)
        elif isinstance(transfer, Receive) or self._exchange.is_entering(transfer):
            while not transfer.ended and self._advance(False):
                pass

    def _look_for(self, probe: Probe) -> None:
        """Complete a probe that does not wait: with a message that has arrived, or with none."""
        self._resting = True
        while not probe.ended and self._advance(False):
            pass
        self._resting = False
        if not probe.ended:
            self._exchange.end_probe(probe)
        self._resting = True

    def _is_ready(self, transfer: Transfer) -> bool:
        """Whether the way to its peer is there."""
        if not isinstance(transfer, Send) or transfer.peer == self.rank:
            return True
        pipe, number = self._routes[transfer.peer]
        return pipe.is_ready(number)

    def _next_is_ready(self) -> bool | None:
        """Whether the first of the posted operations can begin; None: there is none. Others may take it meanwhile."""
        first = list(self.inbox)[:1]
        return self._is_ready(first[0]) if first else None

    def _prepare(self, dst: int) -> None:
        """Make the way to a rank ready."""
        pipe, number = self._routes[dst]
        if not pipe.is_ready(number):
            try:
                pipe.prepare(number)
            except BaseException as error:
                self._blame(error, f"reaching {self.vigil.name(dst)}")
                raise

    def _prepare_posts(self) -> None:
        """Make ready what new sends need; if that fails, the group has failed, which ends what was posted."""
        for transfer in tuple(self.inbox):
            if isinstance(transfer, Send) and not self._is_ready(transfer) and self.vigil.failure is None:
                try:
                    self._prepare(transfer.peer)
                except Exception:
                    break
        if self.vigil.failure is not None and self._seize():
            try:
                self._end_all(self.vigil.failure)
            finally:
                self._release()

    # ---- what is refused, and what goes wrong -----------------------------------------------------

    def _refuse_nesting(self, name: str) -> None:
        if self.has_turn():
            raise UsageError(f"{name}: a signal handler may not wait for messages while its thread does")

    def _refuse_waiting(self, transfer: Transfer) -> None:
        if self._on_own_thread():
            raise UsageError(
                f"{transfer.describe}: a callback of a Work may not wait for messages while others are under way; "
                "use isend or irecv there"
            )

    def _blame(self, error: BaseException, doing: str) -> None:
        """After an error in the middle of a message the streams are torn: the group fails."""
        if isinstance(error, UsageError):
            return
        if not isinstance(error, GroupError):
            error = AbortedError(f"{doing} was interrupted by {error!r}")
        self.vigil.fail(error)
        self.abort()

    def _end_all(self, error: BaseException) -> None:
        """End every operation, under way or only posted, with an error."""
        while self.inbox:
            self._exchange.live[self.inbox.popleft()] = None
        self._exchange.fail(error)

    # ---- the engine's own thread ------------------------------------------------------------------

    def call_back(self, transfer: Transfer) -> None:
        """Have the callbacks of a transfer that has ended called, on the engine's thread."""
        self._called_back.append(transfer)
        self._wake()

    def _run_callbacks(self) -> None:
        while self._called_back:
            try:
                transfer = self._called_back.popleft()
            except IndexError:
                return
            transfer.call_back()

    def stay_awake(self) -> None:
        """Have the engine's thread check every millisecond for receives of compiled callers."""
        self._wake(anyway=True)

    def _wake(self, anyway: bool = False) -> None:
        """Have the engine's thread look at what is new; it starts with the first such thing."""
        with self._changed:
            if self._thread is None and not self._closed:
                if not (anyway or self.inbox or self._exchange.live or self._called_back):
                    return
                thread = threading.Thread(target=self._run, name="fastcoll-messages", daemon=True)
                thread.start()  # may fail, or be interrupted when it has begun
                self._thread = thread
            self._asleep = False
            self._changed.notify_all()

    def _on_own_thread(self) -> bool:
        return self._thread is not None and threading.get_ident() == self._thread.ident

    def _run(self) -> None:
        idle, stamp, touched = 0, -1, 0
        with self._changed:
            if not self._on_own_thread():  # whoever started it was interrupted
                return
        for pipe in self._pipes:
            pipe.stay_awake()
        while not self._closed:
            self._run_callbacks()
            if self._next_is_ready() is False:
                self._prepare_posts()
                self._hand_on()
            before, touched = touched, sum(pipe.touched() for pipe in self._pipes)
            if touched != before:  # compiled callers make progress themselves
                idle = 0
            elif not (self._exchange.live or self.inbox or any(pipe.has_posted() for pipe in self._pipes)):
                idle += 1
            elif stamp == self._stamp and self._seize():  # nobody has driven for a while
                idle = 0
                try:
                    self._turn(self._drive_unattended)
                finally:
                    self._release()
                continue
            else:
                idle = 0
            stamp = self._stamp
            with self._changed:
                if self._closed or self._called_back:
                    continue
                if idle > _NAPS and all([pipe.may_sleep() for pipe in self._pipes]):
                    self._asleep = True
                    if not (self._exchange.live or self.inbox):
                        self._changed.wait(ENDLESS)
                    self._asleep, idle = False, 0
                    for pipe in self._pipes:
                        pipe.stay_awake()
                else:
                    self._changed.wait(_NAP)

    def _drive_unattended(self) -> None:
        """Carry on what is under way, until somebody wants the turn or something is to be done without it."""
        self._wanted = False
        self._resting = True
        while self._exchange.live or self.inbox:
            if self.inbox:
                if not self._is_ready(self.inbox[0]):
                    break
                self._admit_posts()
            if self._sleepers or self._wanted or self._closed or self._exchange.ended or self._called_back:
                break
            if not self._advance(True):
                self._look()
        self._stamp += 1


def _destroyed(transfer: Transfer) -> AbortedError:
    return AbortedError(f"{transfer.describe}: the group was destroyed before the operation was complete")
