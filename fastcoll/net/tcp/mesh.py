"""Mesh: the connections of one rank with the other ranks of a group, made when they are needed.

There are three kinds of connection, each a TCP socket: CONTROL for notices that a rank leaves or fails; DATA for the
bytes of collectives, one for each stream; MAIL for messages. (recovery_endpoint.py uses a fourth kind, RECOVERY.) A
rank has a CONTROL connection with every peer with which it has a connection of another kind. `make` makes the CONTROL
connections with all peers; in groups of more than 32 ranks, it makes only those with the ranks at the distances 1, 2,
4, ... in both directions, along which notices of failures spread, and those with ranks that share memory with this one.

Of two ranks, the lower one dials DATA. MAIL carries both directions, and is dialed by the rank that sends first. If
both dial, the connection that the lower rank dials is used: while the lower rank is dialing, and once it has a
connection, it closes every connection that the higher rank dials. At other times, it confirms the higher rank's
connection with one byte, and the higher rank does not use the connection before that byte arrives.
"""

from __future__ import annotations

import fcntl
import select
import socket
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from ...core.monitor import Wait
from ...errors import AbortedError, GroupError, RendezvousError
from ...failpoints import reach
from ...rendezvous.assemble import GroupMeeting
from ...rendezvous.control import Control, NetMonitor
from ...rendezvous.dials import LOOK_SECONDS, RETRY_FIRST, RETRY_MOST, Dial, dial_all, dial_until
from ...rendezvous.listener import Roster, gather
from ...store import Store
from ...store.encryption import carrier, holds_bytes
from ...store.opening import ConnectionKind, Opening
from ...system.processes import Member, witnesses

ALL_CONTROL = 32
# A rank begins to listen before it publishes its address. It listens until it leaves the group, and it sends a notice
# when it leaves. So a rank whose address refuses connections for this long, and that has sent no notice, has died.
_REFUSED_SECONDS = 2.0

# How long a leaving rank waits for TCP's acknowledgements. A lost packet delays them by 0.2 s or more, and a stopped
# peer with full buffers sends none.
_ARRIVE_SECONDS, _ARRIVE_LOOK_SECONDS = 5.0, 0.001

Key = tuple[ConnectionKind, int, int]
"""The kind, peer and stream of a connection."""
OnMail = Callable[[int, socket.socket], None]
"""Called with a group rank and the connection for messages with it, on the listener's thread; must not block."""
_CONFIRMATION = b"\1"  # sent by the lower rank on a connection for messages that the higher one has dialed


def _has_unacknowledged(connection: socket.socket) -> bool:
    """Whether some sent bytes are not acknowledged by the peer's host."""
    if holds_bytes(connection):
        return True
    try:
        left: int = struct.unpack("i", fcntl.ioctl(carrier(connection), termios.TIOCOUTQ, bytes(4)))[0]
    except (OSError, ValueError):  # closed
        return False
    return left > 0


def control_peers(rank: int, size: int) -> list[int]:
    """Return the group ranks with which `rank` has control connections from the start."""
    if size <= ALL_CONTROL:
        return [peer for peer in range(size) if peer != rank]
    distances = [1 << k for k in range((size - 1).bit_length())]
    return sorted({(rank + sign * step) % size for step in distances for sign in (1, -1)} - {rank})


class Mesh:
    """The sockets of one group, which `close` closes.

    All ranks here are group ranks. Methods are thread-safe. A method that blocks ends at its timeout, when the group
    fails, when the peer dies, or at most 50 ms after Ctrl-C.
    """

    @classmethod
    def make(
        cls,
        store: Store,
        name: str,
        members: Sequence[Member],
        rank: int,
        timeout: float,
        near: Sequence[int] = (),
    ) -> Mesh:
        """Meet the other members of a group and connect with them; collective.

        Args:
            store: a view of the store with this group's prefix for keys.
            near: the group ranks for which this rank waits in shared memory, too.

        Raises:
            UsageError: an interface does not exist, or the ranks name different numbers of interfaces.
            ResourceError: a rank cannot listen.
            RendezvousError: a peer has another secret or version; StoreTimeoutError: a peer did not arrive.
            GroupError: a peer died or could not be reached in time.
        """
        mesh = cls(name, members, rank, timeout, near)
        if len(members) > 1:
            mesh._join(store)
        return mesh

    def __init__(
        self, name: str, members: Sequence[Member], rank: int, timeout: float, near: Sequence[int]
    ) -> None:
        self.rank, self.size = rank, len(members)
        self._watched = sorted({*control_peers(rank, len(members)), *near} - {rank})
        self._name, self._members, self._timeout = name, list(members), timeout
        self._control = Control(self.size)
        self.monitor = NetMonitor(members, rank, self._control)
        self.monitor.let_arrive = self._await_delivery
        self._roster: Roster | None = None
        self._made: dict[Key, socket.socket] = {}
        self._dialing_mail: set[int] = set()  # the higher ranks that this rank is dialing for MAIL
        self._on_mail: OnMail = lambda peer, connection: None
        self._sought: list[socket.socket] = []  # connections for recovery (recovery_endpoint.py)
        self._seekers: list[socket.socket] = []  # those that other ranks have made
        self._seeking: dict[int, Dial] = {}  # dials for recovery that are not complete, by peer
        self._on_seek: Callable[[socket.socket], None] = lambda connection: None
        self._changed = threading.Condition()
        self._dialing = threading.Lock()
        self._also_look: Callable[[], None] = lambda: None  # further checks while waiting
        self._is_made = self._closed = False

    @property
    def streams(self) -> int:
        """How many data connections with each peer large transfers use.

        The number is FASTCOLL_TCP_STREAMS of group rank 0.
        """
        return 1 if self._roster is None else self._roster.streams

    def data(self, peer: int, stream: int = 0, timeout: float | None = None) -> int:
        """Return the descriptor of a data connection.

        The connection is nonblocking and carries both directions. It is made when it is first asked for, which both
        ranks must do within the timeout. Each stream is a connection of its own; streams use the interfaces in turn.

        Raises:
            GroupError: the peer died, left or did not arrive in time, or another program answers at its address.
        """
        return self._connection(ConnectionKind.DATA, peer, stream, timeout).fileno()

    def connect_data(
        self, peers: Sequence[int], doing: str, timeout: float, started: float, number: int
    ) -> None:
        """Make all data connections with `peers` that a call needs, at once. Blocks and raises errors as `data` does.

        This rank dials the higher ranks, and then waits for the lower ranks, which dial it. In the other order, the
        higher ranks could time out meanwhile.

        Args:
            doing, number: the call.
            timeout, started: seconds that the call may take, and when it started, by time.monotonic.
        """
        streams = range(self.streams)
        keys = [(ConnectionKind.DATA, peer, stream) for peer in peers for stream in streams]
        keys = [key for key in keys if key not in self._made]

        def late(lower: bool) -> list[int]:
            missing = {key[1] for key in keys if key not in self._made}
            return sorted(peer for peer in missing if (peer < self.rank) == lower)

        if dialed := late(lower=False):
            reach("tcp.connection.enter")
            more = f" and {len(dialed) - 1} more" if len(dialed) > 1 else ""
            what = f"making a data connection with {self.monitor.name(dialed[0])}{more}"
            wait = Wait(self.monitor, what, lambda: late(lower=False), timeout, started, number=number)
            with self._sole_dialer(wait):
                self._dial_control([peer for peer in dialed if peer not in self._control.peers], wait)
                self._dial([key for key in keys if key[1] > self.rank and key not in self._made], wait)
        if late(lower=True):
            reach("tcp.connection.enter")
            wait = Wait(self.monitor, doing, lambda: late(lower=True), timeout, started, number=number)
            self._await(lambda: not late(lower=True), wait)
            wait.over()

    def mail(self, peer: int) -> socket.socket:
        """Return the connection for messages with `peer`; make it unless it exists.

        The peer need not ask for the connection.
        """
        return self._connection(ConnectionKind.MAIL, peer, 0, None)

    def on_mail(self, callback: OnMail) -> None:
        """Call `callback` with every connection for messages that a peer makes, or has already made."""
        with self._changed:
            self._on_mail = callback
            existing = [
                (peer, each) for (kind, peer, _), each in self._made.items() if kind is ConnectionKind.MAIL
            ]
        for peer, connection in existing:
            callback(peer, connection)

    def address(self, rank: int) -> str:
        """The address at which a rank listens on its first interface."""
        return "127.0.0.1" if self._roster is None else self._roster.places[rank].addresses[0]

    def on_seek(self, callback: Callable[[socket.socket], None]) -> None:
        """Call `callback` with every connection that a rank makes, or has already made, to seek this rank.

        Such a rank has called `seek`. `callback` is called on the listener's thread, so it must not block.
        """
        with self._changed:
            self._on_seek, existing = callback, [*self._seekers]
        for connection in existing:
            callback(connection)

    def seek(self, peer: int, deadline: float) -> socket.socket:
        """Return a connection on which `peer` publishes its recovery endpoint.

        This connection can be made after the group has failed.

        Raises:
            TimeoutError: the connection is not made by the deadline; the next call continues to make it.
            ConnectionRefusedError: the peer's process has ended.
            RendezvousError: the peer has closed the group.
        """
        dial = self._seeking.setdefault(peer, self._new_dial(peer, ConnectionKind.RECOVERY, 0))
        try:
            made = dial_until(dial, deadline)
            if not made and dial.refused_since is not None:
                raise ConnectionRefusedError(dial.where)
        except BaseException:
            self._seeking.pop(peer).close()
            raise
        if not made:
            raise TimeoutError(dial.where)
        self._sought.append(self._seeking.pop(peer).connection)
        return dial.connection

    def fail(self, error: BaseException) -> None:
        """Notify the peers that this rank could not make the group, and close all connections."""
        here = self.monitor.name(self.rank)
        why = f"{here} could not make the group {self._name}: {str(error) or type(error).__name__}"
        self.monitor.fail(error if isinstance(error, GroupError) else AbortedError(why))
        self.close()

    def close(self) -> None:
        """Close all connections. Peers can still read the bytes that were sent.

        May be called twice. Does not notify peers: call `monitor.leave` or `monitor.fail` before.
        """
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
        witnesses.discard(self.monitor)
        with ExitStack() as steps:
            for each in self._connections():
                steps.callback(each.close)
            steps.callback(self._control.close)
            if self._roster is not None:
                steps.callback(self._roster.leave)

    def disown(self) -> None:
        """Close a forked child's copies of all connections; the parent keeps its own."""
        self._closed = True
        for each in self._connections():
            each.close()
        self._control.close_inherited()

    def _await_delivery(self) -> None:
        """Wait until the peers' hosts have acknowledged all bytes that this rank has sent.

        The notice that this rank leaves travels on another connection. On a slow or lossy network it may overtake data,
        and the peer would then miss the data that is in flight. Peers on the same network are skipped: nothing is lost
        there, and an acknowledgement may take 40 ms.
        """
        end, me = time.monotonic() + _ARRIVE_SECONDS, self._members[self.rank]
        waiting = list(self._made.copy().items()) if self.monitor.failure is None else []
        waiting = [(key, each) for key, each in waiting if not self._members[key[1]].same_network(me)]
        while waiting and time.monotonic() < end:
            waiting = [
                (key, each)
                for key, each in waiting
                if _has_unacknowledged(each) and not self.monitor.is_gone(key[1])
            ]
            if waiting:
                time.sleep(_ARRIVE_LOOK_SECONDS)

    def _connections(self) -> list[socket.socket | Dial]:
        return [*self._made.values(), *self._sought, *self._seekers, *self._seeking.values()]

    # ---- making -----------------------------------------------------------------------------------------

    def _join(self, store: Store) -> None:
        witnesses.add(self.monitor)
        doing = "making a group over the network"
        try:
            with GroupMeeting(store, self._members, self.rank, self._timeout, doing) as meeting:
                self._also_look = meeting.look
                self._roster = gather(meeting, self._members, self.rank, self._on_connection)
                reach("tcp.meeting.after_listen")

                def unconnected() -> list[int]:
                    return [peer for peer in self._watched if peer not in self._control.peers]

                doing = f"connecting the ranks of the group {self._name}"
                # At least 1 s is left.
                started = max(meeting.began, time.monotonic() + 1.0 - meeting.timeout)
                wait = Wait(self.monitor, doing, unconnected, meeting.timeout, started)
                self._dial_control([peer for peer in self._watched if peer > self.rank], wait)
                self._await(lambda: not unconnected(), wait)
                reach("tcp.meeting.after_connect")
                self._also_look = lambda: None  # the store is no longer needed
                self._is_made, self.monitor.hears_all = True, len(self._watched) == self.size - 1
        except BaseException as error:
            self.fail(error)
            raise

    def _dial_control(self, peers: Sequence[int], wait: Wait) -> None:
        # The monitor watches each connection as soon as it is made, so it notices a peer that dies meanwhile.
        self._make_connections(
            [self._new_dial(peer, ConnectionKind.CONTROL, 0) for peer in peers],
            wait,
            lambda dial: self._control.add(dial.peer, dial.connection),
        )

    def _new_dial(self, peer: int, kind: ConnectionKind, stream: int) -> Dial:
        """Return a Dial on the interface that the pair of ranks and the stream select."""
        assert self._roster is not None, "a group of one has no peers"
        index = (min(self.rank, peer) + stream) % len(self._roster.interfaces)
        listens, source = self._roster.places[peer], self._roster.interfaces[index]
        target = listens.addresses[index], listens.ports[index]
        name = self.monitor.name(peer)
        return Dial(self._roster.endpoint, peer, name, kind, stream, source, target)

    def _make_connections(self, dials: Sequence[Dial], wait: Wait, enter: Callable[[Dial], object]) -> None:
        """Make connections, and call `enter` for each, unless the mesh is closed meanwhile."""

        def made(dial: Dial) -> None:
            with self._changed:
                if not self._closed:
                    enter(dial)
                    return
            dial.close()
            raise self._closed_error()

        def look() -> None:
            for dial in dials:
                since = dial.refused_since
                if not dial.is_done and since is not None and time.monotonic() - since > _REFUSED_SECONDS:
                    self.monitor.lost(dial.peer, f"nothing listens at {dial.where}")
            self._look(wait)

        def reasons() -> str:
            late = [dial for dial in dials if not dial.is_done]
            names = "; ".join(f"{self.monitor.name(d.peer)} at {d.where}: {d.reason}" for d in late[:4])
            return f" ({names})" if names else ""

        wait.hint = reasons
        try:
            dial_all(dials, look, made)
        except RendezvousError as error:
            peer = next((dial.peer for dial in dials if dial.does_not_fit), None)
            if peer is None or not self._is_made:
                raise  # unchanged; the meeting passes it on to the other ranks
            raise AbortedError(f"{self.monitor.name(peer)}: {error}", [self._members[peer].rank]) from error

    def _connection(
        self, kind: ConnectionKind, peer: int, stream: int, timeout: float | None
    ) -> socket.socket:
        """Return the connection of this kind with a peer.

        Makes the connection unless the peer or another thread has made it.
        """
        key = (kind, peer, stream)
        if key in self._made:
            return self._made[key]
        assert peer != self.rank, "a rank has no connection with itself"
        reach("tcp.connection.enter")
        # Only a send makes a connection for messages.
        what = (
            "making a data connection with" if kind is ConnectionKind.DATA else "connecting for the send to"
        )
        doing = f"{what} {self.monitor.name(peer)}"
        wait = Wait(self.monitor, doing, lambda: [peer], self._timeout if timeout is None else timeout)
        if kind is ConnectionKind.DATA and self.rank > peer:
            self._await(lambda: key in self._made, wait)
            wait.over()
            return self._made[key]
        with self._sole_dialer(wait):
            if key not in self._made:
                if peer not in self._control.peers:
                    self._dial_control([peer], wait)  # by this, the monitor notices the peer's end
                if kind is ConnectionKind.DATA:
                    self._dial([key], wait)
                elif self.rank < peer:
                    self._dial_mail_up(key, wait)
                else:
                    self._dial_mail_down(key, wait)
        return self._made[key]

    @contextmanager
    def _sole_dialer(self, wait: Wait) -> Iterator[None]:
        """Return a context manager in which no other thread dials."""
        while not self._dialing.acquire(timeout=LOOK_SECONDS):
            self._look(wait)
        try:
            yield
            wait.over()
        finally:
            self._dialing.release()

    def _dial(self, keys: Sequence[Key], wait: Wait) -> None:
        dials = {self._new_dial(peer, kind, stream): (kind, peer, stream) for kind, peer, stream in keys}
        self._make_connections([*dials], wait, lambda dial: self._made.update({dials[dial]: dial.connection}))

    def _dial_mail_up(self, key: Key, wait: Wait) -> None:
        """Dial a higher rank for MAIL.

        `_on_connection` closes any connection that this peer dials meanwhile. Does nothing if there is a connection
        already.
        """
        peer = key[1]
        with self._changed:
            if key in self._made:
                return
            self._dialing_mail.add(peer)
        try:
            self._dial([key], wait)
        finally:
            self._dialing_mail.discard(peer)

    def _dial_mail_down(self, key: Key, wait: Wait) -> None:
        """Dial a lower rank until there is a connection for messages.

        This is either the dialed connection, once the lower rank confirms it, or one that the lower rank has dialed.
        """
        pause = RETRY_FIRST
        while key not in self._made:
            new = self._new_dial(key[1], ConnectionKind.MAIL, 0)
            try:
                self._make_connections([new], wait, lambda dial: None)
                if self._is_confirmed(new.connection, key, wait):
                    with self._changed:
                        if self._closed:
                            raise self._closed_error()
                        self._made[key] = new.connection
                    return
            except BaseException:
                new.close()
                raise
            new.close()
            with self._changed:
                self._changed.wait_for(lambda: key in self._made, pause)
            pause = min(2 * pause, RETRY_MOST)
            self._look(wait)

    def _is_confirmed(self, connection: socket.socket, key: Key, wait: Wait) -> bool:
        """Wait until the lower rank confirms or closes the connection; return whether it has confirmed."""
        poller = select.poll()
        poller.register(connection, select.POLLIN)
        while not poller.poll(1000 * LOOK_SECONDS):
            if key in self._made:
                return False
            self._look(wait)
        with suppress(OSError):
            return connection.recv(len(_CONFIRMATION)) == _CONFIRMATION
        return False

    def _look(self, wait: Wait) -> None:
        if self._closed:
            raise self._closed_error()
        self._also_look()
        if self._roster is not None and (lacking := self._roster.listener.lack()):
            raise lacking
        wait.look()

    def _await(self, is_there: Callable[[], bool], wait: Wait) -> None:
        """Wait until the listener's thread has made a condition true."""
        while True:
            with self._changed:
                if self._changed.wait_for(is_there, LOOK_SECONDS):
                    return
            self._look(wait)

    def _closed_error(self) -> GroupError:
        return self.monitor.failure or AbortedError("the group was destroyed while a connection was made")

    # ---- on the listener's thread -----------------------------------------------------------------------

    def _on_connection(self, theirs: Opening, connection: socket.socket) -> None:
        key = (theirs.kind, theirs.rank, theirs.stream)
        is_lower, is_mail = theirs.rank < self.rank, theirs.kind is ConnectionKind.MAIL
        with self._changed:
            wanted = theirs.kind is ConnectionKind.CONTROL or key not in self._made
            if theirs.kind is ConnectionKind.DATA:
                wanted &= is_lower
            elif is_mail and not is_lower:
                wanted &= theirs.rank not in self._dialing_mail
            if self._closed or not wanted:
                connection.close()
                return
            if theirs.kind is ConnectionKind.CONTROL:
                self._control.add(theirs.rank, connection)
            elif theirs.kind is ConnectionKind.RECOVERY:
                self._seekers.append(connection)
            else:
                if is_mail and not is_lower:
                    with suppress(OSError):  # the connection is broken; its first use will find that
                        connection.send(_CONFIRMATION)  # before any thread of this rank can send a message
                self._made[key] = connection
            on_mail, on_seek = self._on_mail, self._on_seek
            self._changed.notify_all()
        if is_mail:
            on_mail(theirs.rank, connection)
        if theirs.kind is ConnectionKind.RECOVERY:
            on_seek(connection)
