"""Mesh: the connections of one rank with the others of a group, made when they are needed.

Three kinds, each a TCP socket of its own: CONTROL for notices, with every peer that anything is exchanged with;
DATA for the bytes of collectives, by stream; MAIL for messages, from the sender to the receiver. Of two ranks the
lower one dials DATA, the sender dials MAIL. `make` brings about CONTROL with all peers, or in groups of more than 32
with those at the distances 1, 2, 4, ... both ways, along which failures spread.

A peer that is refused, unreachable or drops the opening is tried again (it may be short of descriptors, or the
network between only just coming up); one that does not fit is not.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

from ...core.monitor import Wait
from ...core.processes import Member, witnesses
from ...errors import AbortedError, CollectiveTimeoutError, GroupError, RendezvousError
from ...failpoints import reach
from ...rendezvous import Store
from ...rendezvous.address import shown
from ...rendezvous.assemble import GroupMeeting
from ...rendezvous.opening import Dialing, Endpoint, Kind, Opening, OpeningError, RefusedError
from .control import Control, NetMonitor
from .interfaces import Interface, family_of, tune
from .listener import Roster, gather

_LOOK_SECONDS = 0.05
_RETRY_FIRST, _RETRY_MOST = 0.01, 0.25
_IP_BIND_ADDRESS_NO_PORT = getattr(socket, "IP_BIND_ADDRESS_NO_PORT", 24)  # Python 3.12 has the name

Wish = tuple[int, int] | float
"""A descriptor and the poll events that are waited for, or until when nothing can be done."""


class Dial:
    """One connection of a kind and stream to a group rank, in the making, from `source` to where that listens.

    Attributes:
        connection: the socket, once `is_done`.
        reason: why the last try failed.
        refused_since: when the first of the last tries was, at which nothing listened there; None: others failed.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        peer: int,
        kind: Kind,
        stream: int,
        source: Interface,
        target: tuple[str, int],
    ) -> None:
        self.peer = peer
        self.where = f"{shown(*target)} from {source}"
        self.reason = "no answer"
        self.refused_since: float | None = None
        self.is_done = False
        self.waits_for: Wish = 0.0
        self._socket: socket.socket | None = None
        self._steps = self._tries(lambda: Dialing(endpoint, peer, kind, stream), source, target)

    @property
    def connection(self) -> socket.socket:
        assert self._socket is not None, "it stands"
        return self._socket

    def step(self) -> None:
        """Go as far as possible without blocking; RendezvousError: the peer does not fit, do not try again."""
        self.waits_for = next(self._steps, 0.0)

    def close(self) -> None:
        """Give up, or close what was made."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _tries(
        self, begin: Callable[[], Dialing], source: Interface, target: tuple[str, int]
    ) -> Iterator[Wish]:
        pause = _RETRY_FIRST
        while True:
            try:
                yield from self._try(begin(), source, target)
                self.is_done = True
                return
            except RefusedError as error:
                self.close()
                raise RendezvousError(f"the rank at {self.where} cannot be joined: {error}") from error
            except OpeningError as error:
                self.reason, refused = str(error), False
            except OSError as error:
                self.reason, refused = error.strerror or str(error), error.errno == errno.ECONNREFUSED
            self.close()
            now = time.monotonic()
            self.refused_since = (self.refused_since or now) if refused else None
            while time.monotonic() < now + pause:
                yield now + pause
            pause = min(2 * pause, _RETRY_MOST)

    def _try(self, dialing: Dialing, source: Interface, target: tuple[str, int]) -> Iterator[Wish]:
        made = self._socket = socket.socket(family_of(source.address), socket.SOCK_STREAM)
        tune(made)
        # Without this the kernel takes a port for every connection of the machine, not for this destination.
        made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        made.bind((source.address, 0))
        while (status := made.connect_ex(target)) in (errno.EINPROGRESS, errno.EALREADY):
            yield made.fileno(), select.POLLOUT
        # A loopback port that nobody listens on can connect to itself.
        status = status or (errno.ECONNREFUSED if made.getsockname() == made.getpeername() else 0)
        if status:
            raise OSError(status, os.strerror(status))
        made.send(dialing.opening)
        while dialing.wants:
            yield made.fileno(), select.POLLIN
            try:
                data = made.recv(dialing.wants)
            except BlockingIOError:
                continue
            if not data:
                raise OpeningError("it closed the connection during the opening")
            if reply := dialing.take(data):
                made.send(reply)


def dial_all(
    dials: Sequence[Dial], look: Callable[[], None], stands: Callable[[Dial], None] = lambda _: None
) -> None:
    """Bring all connections about, and let `stands` take each over as soon as it stands.

    `look`, called at least every 50 ms, may raise, which ends the others. RendezvousError: a peer does not fit.
    """
    looked = time.monotonic()
    waiting = list(dials)
    try:
        while True:
            for dial in list(waiting):
                dial.step()
                if dial.is_done:
                    waiting.remove(dial)
                    stands(dial)
            if not waiting:
                return
            poller, until = select.poll(), time.monotonic() + _LOOK_SECONDS
            for dial in waiting:
                if isinstance(dial.waits_for, tuple):
                    poller.register(*dial.waits_for)
                else:
                    until = min(until, dial.waits_for)
            poller.poll(1000 * max(until - time.monotonic(), 0.0) + 0.5)
            if time.monotonic() - looked >= _LOOK_SECONDS:
                look()
                looked = time.monotonic()
    except BaseException:
        for dial in waiting:
            dial.close()
        raise


ALL_CONTROL = 32
# A rank tells where it listens when it does, until it lets go of the group, of which it tells too.
_REFUSED_SECONDS = 2.0

OnMail = Callable[[int, socket.socket], None]
"""Takes a connection from a group rank, whose messages come on it; on the listener's thread, must not block."""


def control_peers(rank: int, size: int) -> list[int]:
    """The group ranks that `rank` has control connections with from the start."""
    if size <= ALL_CONTROL:
        return [peer for peer in range(size) if peer != rank]
    distances = [1 << k for k in range((size - 1).bit_length())]
    return sorted({(rank + sign * step) % size for step in distances for sign in (1, -1)} - {rank})


class Mesh:
    """All ranks here are group ranks. Thread-safe. Sockets stay the mesh's, which closes them in `close`.

    What blocks ends with the timeout, with the failure of the group, with a peer's death; Ctrl-C takes 50 ms at most.
    """

    @classmethod
    def make(cls, store: Store, name: str, members: Sequence[Member], rank: int, timeout: float) -> Mesh:
        """Meet the other members in the group's own (prefixed) store and connect with them; collective.

        Raises:
            UsageError: an interface does not exist, or the ranks name different numbers of them.
            ResourceError: a rank cannot listen.
            RendezvousError: a peer has another secret or version, or (StoreTimeoutError) did not come.
            GroupError: a peer died or could not be reached in time.
        """
        mesh = cls(name, members, rank, timeout)
        if len(members) > 1:
            mesh._join(store)
        return mesh

    def __init__(self, name: str, members: Sequence[Member], rank: int, timeout: float) -> None:
        self.rank, self.size = rank, len(members)
        self._name, self._members, self._timeout = name, list(members), timeout
        self._control = Control(self.size)
        self.monitor = NetMonitor(members, rank, self._control)
        self._roster: Roster | None = None
        self._made: dict[tuple[Kind, int, int], socket.socket] = {}  # by kind, peer and stream
        self._mail_in: list[tuple[int, socket.socket]] = []
        self._on_mail: OnMail = lambda peer, connection: None
        self._changed = threading.Condition()
        self._dialing = threading.Lock()
        self._between: Callable[[], None] = lambda: None  # what else to look at while waiting
        self._closed = False

    @property
    def streams(self) -> int:
        """How many data connections with each peer large messages use: FASTCOLL_TCP_STREAMS of group rank 0."""
        return 1 if self._roster is None else self._roster.streams

    def data(self, peer: int, stream: int = 0, timeout: float | None = None) -> int:
        """The descriptor of a data connection: nonblocking, both ways. Made at its first use, for which both must ask
        within the timeout; each stream is a connection of its own, on the interfaces in turn.

        Raises:
            GroupError: the peer died, left or did not come in time, or what answers at its address does not fit.
        """
        return self._connection(Kind.DATA, peer, stream, timeout).fileno()

    def dial_mail(self, peer: int) -> socket.socket:
        """The connection on which this rank sends messages to `peer`, and hears of them; as `data`."""
        return self._connection(Kind.MAIL, peer, 0, None)

    def on_mail(self, callback: OnMail) -> None:
        """Give `callback` the connections on which peers send messages, those of before and of later."""
        with self._changed:
            self._on_mail, held = callback, list(self._mail_in)
        for peer, connection in held:
            callback(peer, connection)

    def close(self) -> None:
        """Close all connections; those that the peers have not read to the end keep what was sent. Tells
        nobody: `monitor.leave` or `monitor.fail` come before. Closing twice is fine."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        witnesses.discard(self.monitor)
        with ExitStack() as steps:
            for connection in self._connections():
                steps.callback(connection.close)
            steps.callback(self._control.close)
            if self._roster is not None:
                steps.callback(self._roster.leave)

    def disown(self) -> None:
        """In a child of fork: close the copies of all connections, which stay the parent's."""
        self._closed = True
        for connection in self._connections():
            connection.close()
        self._control.close_inherited()

    def _connections(self) -> list[socket.socket]:
        return [*self._made.values(), *(connection for _, connection in self._mail_in)]

    # ---- making -----------------------------------------------------------------------------------------

    def _join(self, store: Store) -> None:
        witnesses.add(self.monitor)
        doing = "making a group over the network"
        try:
            with GroupMeeting(store, self._members, self.rank, self._timeout, doing) as meeting:
                self._between = meeting.look
                self._roster = gather(meeting, self._members, self.rank, self._arrived)
                reach("tcp.meeting.after_listen")
                peers = control_peers(self.rank, self.size)

                def unconnected() -> list[int]:
                    return [peer for peer in peers if peer not in self._control.peers]

                doing = f"connecting the ranks of the group {self._name}"
                wait = Wait(self.monitor, doing, unconnected, max(meeting.left(), 1.0))
                self._dial_control([peer for peer in peers if peer > self.rank], wait)
                self._await(lambda: not unconnected(), wait)
                reach("tcp.meeting.after_connect")
                self._between = lambda: None  # the store need not be there any more
        except BaseException as error:
            here = self.monitor.name(self.rank)
            why = f"{here} could not make the group {self._name}: {error or type(error).__name__}"
            self.monitor.fail(error if isinstance(error, GroupError) else AbortedError(why))
            self.close()
            raise

    def _dial_control(self, peers: Sequence[int], wait: Wait) -> None:
        # Each is looked at as soon as it stands: who dies meanwhile is seen by its end.
        self._bring_about(
            [self._new_dial(peer, Kind.CONTROL, 0) for peer in peers],
            wait,
            lambda dial: self._control.add(dial.peer, dial.connection),
        )

    def _new_dial(self, peer: int, kind: Kind, stream: int) -> Dial:
        """A connection on the interface whose turn it is, by the pair of ranks and the stream."""
        assert self._roster is not None, "a group of one has no peers"
        turn = (min(self.rank, peer) + stream) % len(self._roster.interfaces)
        place, source = self._roster.places[peer], self._roster.interfaces[turn]
        target = place.addresses[turn], place.ports[turn]
        return Dial(self._roster.endpoint, peer, kind, stream, source, target)

    def _bring_about(self, dials: Sequence[Dial], wait: Wait, enter: Callable[[Dial], object]) -> None:
        """Make connections, and enter each into the tables, unless the mesh was closed meanwhile."""

        def stands(dial: Dial) -> None:
            with self._changed:
                if not self._closed:
                    enter(dial)
                    return
            dial.close()
            raise self._gone()

        def look() -> None:
            for dial in dials:
                since = dial.refused_since
                if since is not None and time.monotonic() - since > _REFUSED_SECONDS:
                    self.monitor.lost(dial.peer, f"nothing listens at {dial.where} any more")
            self._look(wait)

        try:
            dial_all(dials, look, stands)
        except CollectiveTimeoutError as error:
            late = [dial for dial in dials if not dial.is_done]
            names = "; ".join(f"{self.monitor.name(d.peer)} at {d.where}: {d.reason}" for d in late[:4])
            raise CollectiveTimeoutError(f"{error} ({names})", error.ranks) from error

    def _connection(self, kind: Kind, peer: int, stream: int, timeout: float | None) -> socket.socket:
        """The connection of this kind with a peer, made unless it or another thread has done so."""
        key = (kind, peer, stream)
        if key in self._made:
            return self._made[key]
        assert peer != self.rank, "there is no connection with oneself"
        reach("tcp.connection.enter")
        what = "a data connection with" if kind is Kind.DATA else "a connection for messages to"
        doing = f"making {what} {self.monitor.name(peer)}"
        wait = Wait(self.monitor, doing, lambda: [peer], self._timeout if timeout is None else timeout)
        if kind is Kind.DATA and self.rank > peer:
            self._await(lambda: key in self._made, wait)
            wait.over()
            return self._made[key]
        while not self._dialing.acquire(timeout=_LOOK_SECONDS):
            self._look(wait)
        try:
            if key not in self._made:
                if peer not in self._control.peers:
                    self._dial_control([peer], wait)  # its end is seen there
                new = self._new_dial(peer, kind, stream)
                self._bring_about([new], wait, lambda dial: self._made.update({key: dial.connection}))
            wait.over()
            return self._made[key]
        except RendezvousError as error:
            raise AbortedError(f"{self.monitor.name(peer)}: {error}", [self._members[peer].rank]) from error
        finally:
            self._dialing.release()

    def _look(self, wait: Wait) -> None:
        if self._closed:
            raise self._gone()
        self._between()
        wait.look()

    def _await(self, is_there: Callable[[], bool], wait: Wait) -> None:
        """Wait for what the listener's thread brings."""
        while True:
            with self._changed:
                if self._changed.wait_for(is_there, _LOOK_SECONDS):
                    return
            self._look(wait)

    def _gone(self) -> GroupError:
        return self.monitor.failure or AbortedError("the group was destroyed while a connection was made")

    # ---- on the listener's thread -----------------------------------------------------------------------

    def _arrived(self, theirs: Opening, connection: socket.socket) -> None:
        key = (theirs.kind, theirs.rank, theirs.stream)
        with self._changed:
            if self._closed or (theirs.kind is Kind.DATA and (key in self._made or theirs.rank > self.rank)):
                connection.close()
                return
            if theirs.kind is Kind.CONTROL:
                self._control.add(theirs.rank, connection)
            elif theirs.kind is Kind.DATA:
                self._made[key] = connection
            else:
                self._mail_in.append((theirs.rank, connection))
            on_mail = self._on_mail
            self._changed.notify_all()
        if theirs.kind is Kind.MAIL:
            on_mail(theirs.rank, connection)
