"""Tunnels: a thread encrypts what passes between this process and its TCP connections.

Compiled code and Python read and write plain descriptors. So `dig` moves a TCP connection to another descriptor and
puts one end of a socket pair in its place: the program's end. One thread of the process holds the other ends. For each
of them it moves bytes between the pair and the connection, through Python's `ssl`, which releases the GIL meanwhile.
The thread waits in epoll, runs while there are tunnels, and holds at most 256 KiB for each tunnel and direction: it
reads no more before the other socket has taken these, so a slow reader stops its sender as on a TCP connection.

The end of a connection is passed on, each direction for itself. At the peer's end of stream, the program reads its end
of stream behind all bytes. If the connection breaks, or if TLS finds changed bytes, the program reads the end of stream
and can no longer send. If the program closes or shuts down its end, the thread sends the rest and closes the
connection. TLS's own closing message is not used: its absence does not tell a killed peer from an attacker who ends
connections.

At exit, the process waits up to 2 s until the kernel has taken all bytes for TCP. A child process made by fork closes
its copies.
"""

from __future__ import annotations

import atexit
import errno
import fcntl
import logging
import os
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from .address import raise_limit, shown
from .forks import at_fork

_log = logging.getLogger("fastcoll")

_CHUNK = 256 << 10
_RECORD = 17 << 10  # more than one record of TLS, of which a part may be left when the next chunk arrives
_EXIT_SECONDS, _EXIT_LOOK_SECONDS = 2.0, 0.001
_NOTHING = memoryview(b"")
_ENDS = select.EPOLLHUP | select.EPOLLRDHUP | select.EPOLLERR


class Tunnel:
    """One connection: `tcp`, and this process's other end of the socket pair; the pump's thread moves the bytes.

    Attributes:
        tcp: the connection with the peer.
        error: why the connection broke; None: it has not, or the peer has closed it.
        watched: both descriptors, each with the events for which epoll watches; None: epoll does not.
    """

    def __init__(
        self,
        tcp: socket.socket,
        pair: socket.socket,
        context: ssl.SSLContext,
        is_server: bool,
        received: bytes,
    ) -> None:
        self.tcp, self._pair = tcp, pair
        self.error: OSError | None = None
        self._peer = "a peer"
        with suppress(OSError):  # the connection is broken; the first step will find that
            self._peer = shown(*tcp.getpeername()[:2])
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, is_server)
        self._incoming.write(received)
        self._opened = self._sealed = _NOTHING  # bytes that the pair, or TCP, has not taken yet
        self._is_open = False  # the handshake of TLS is complete
        self._is_sending = False  # some bytes of the program are neither in the pair nor in TCP
        self._tcp_ended = self._is_read = self._is_sent = False  # the last two: that direction is over
        self._is_left = False  # the program has closed or shut down its end
        self.watched: dict[int, int | None] = {pair.fileno(): 0, tcp.fileno(): select.EPOLLOUT}

    @property
    def is_over(self) -> bool:
        """Whether both directions are over, or can no longer begin."""
        return (self._is_sent and (self._is_read or self._is_left)) or (self._is_read and not self._is_open)

    def holds_bytes(self) -> bool:
        """Return whether some bytes that the program has sent are not in TCP yet. Any thread may call this."""
        try:
            # In the order in which bytes move, so that none is missed.
            waiting: int = struct.unpack("i", fcntl.ioctl(self._pair, termios.FIONREAD, bytes(4)))[0]
        except (OSError, ValueError):  # closed
            return False
        return not self._is_sent and (bool(waiting) or self._is_sending)

    def step(self, fd: int, events: int, space: memoryview) -> None:
        """Handle the events of one of the two descriptors; `space` is for bytes on their way."""
        is_pair = fd == self._pair.fileno()
        has_ended = bool(events & (select.EPOLLHUP | select.EPOLLERR))
        self._is_left |= is_pair and has_ended
        both = has_ended or not self._is_open
        enters, leaves = (select.EPOLLOUT, select.EPOLLIN) if is_pair else (select.EPOLLIN, select.EPOLLOUT)
        try:
            if not self._is_open:
                self._opened = self._decrypt(space)
            if both or events & enters:
                self.receive(space)
            if both or events & leaves:
                self.send(space)
        except ssl.SSLError as error:  # the peer has sent other bytes than these, or has another key
            self.error = error
            why = "its bytes were changed on their way, or it reports that this side's were"
            _log.warning(
                "the encrypted connection with %s is closed: %s (%s)", self._peer, why, error.reason or error
            )
            self._flush()  # TLS's alert, by which the peer gets the reason
            self._stop_sending()
            self._opened, self._tcp_ended, self._is_read = _NOTHING, True, True
            self._shut_pair(socket.SHUT_RDWR)

    def watch(self, epoll: select.epoll) -> None:
        """Watch for the events after which the next step can move bytes.

        epoll always reports an error or the end of both directions, so a descriptor for which there is nothing to do is
        not watched; but the pair is, until the program has left its end.
        """
        reads = not (self._tcp_ended or self._opened or (self._is_left and self._is_open))
        writes = not self._is_sent and bool(self._sealed or self._outgoing.pending)
        tcp = (select.EPOLLIN | select.EPOLLRDHUP) * reads | select.EPOLLOUT * writes
        takes = self._is_open and not (self._is_sent or self._sealed)
        pair = select.EPOLLIN * takes | select.EPOLLOUT * bool(self._opened)
        wanted = {self.tcp.fileno(): tcp or None, self._pair.fileno(): pair or (None if self._is_left else 0)}
        for fd, events in wanted.items():
            known = self.watched[fd]
            if events is None and known is not None:
                epoll.unregister(fd)
            elif events is not None and known is None:
                epoll.register(fd, events)
            elif events is not None and events != known:
                epoll.modify(fd, events)
        self.watched = wanted

    def close(self, epoll: select.epoll) -> None:
        """Close both sockets."""
        for fd, known in self.watched.items():
            if known is not None:
                with suppress(OSError):
                    epoll.unregister(fd)
        with suppress(OSError):
            # A close with unread data would reset the connection, and the peer might lose the last bytes.
            self.tcp.recv(_CHUNK)
        self.close_inherited()

    def close_inherited(self) -> None:
        """In a child of fork: close the copies of both descriptors."""
        self.tcp.close()
        self._pair.close()

    def receive(self, space: memoryview) -> None:
        """Pass on what TCP has received, at most one chunk."""
        self._deliver()
        if not (self._opened or self._tcp_ended):
            try:
                data = self.tcp.recv(_CHUNK)
            except BlockingIOError:
                return
            except OSError as error:
                self.error, data = error, b""
                self._stop_sending()
            self._tcp_ended = not data
            self._incoming.write(data)
            self._opened = self._decrypt(space)
            self._deliver()
        if self._tcp_ended and not self._opened:
            self._is_read = True
            self._shut_pair(socket.SHUT_WR)

    def _decrypt(self, space: memoryview) -> memoryview:
        """Return all bytes that can be decrypted; complete the handshake before."""
        count = 0
        with suppress(ssl.SSLWantReadError):
            if not self._is_open:
                self._tls.do_handshake()
                self._is_open = True
            while got := self._tls.read(len(space) - count, space[count:]):
                count += int(got)
        return memoryview(bytes(space[:count]))

    def _deliver(self) -> None:
        if self._is_left:
            self._opened = _NOTHING
        elif self._opened:
            try:
                self._opened = self._opened[self._pair.send(self._opened) :]
            except BlockingIOError:
                pass
            except OSError:
                self._is_left, self._opened = True, _NOTHING

    def send(self, space: memoryview) -> None:
        """Send what the program has sent, at most one chunk."""
        self._flush()
        if self._is_open and not (self._sealed or self._is_sent):
            self._is_sending = True
            try:
                count = self._pair.recv_into(space, _CHUNK)
            except BlockingIOError:
                self._is_sending = False
                return
            except ConnectionResetError:  # the program has closed its end with unread bytes
                count = 0
            if count:
                self._tls.write(space[:count])
                self._flush()
            else:
                self._is_sent = True
                with suppress(OSError):
                    self.tcp.shutdown(socket.SHUT_WR)
        self._is_sending = bool(self._sealed)

    def _flush(self) -> None:
        """Send encrypted bytes, and the handshake's."""
        if self._is_sent:
            return
        if not self._sealed:
            self._sealed = memoryview(self._outgoing.read())
        try:
            if self._sealed:
                self._sealed = self._sealed[self.tcp.send(self._sealed) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self.error = self.error or error
            self._stop_sending()

    def _stop_sending(self) -> None:
        """The connection is broken: let the program's sends fail. It can still read what has arrived."""
        self._is_sent, self._sealed = True, _NOTHING
        self._shut_pair(socket.SHUT_RD)

    def _shut_pair(self, how: int) -> None:
        with suppress(OSError):  # the program has closed its end
            self._pair.shutdown(how)


class _Pump:
    """The thread that serves the tunnels; it ends with the last one."""

    def __init__(self) -> None:
        self.tunnels: dict[int, Tunnel] = {}  # each by both descriptors
        self._epoll = select.epoll()
        self._space = memoryview(bytearray(_CHUNK + _RECORD))
        self._thread = threading.Thread(target=self._run, name="fastcoll-encryption", daemon=True)
        util = sys.modules.get("multiprocessing.util")
        # Children of multiprocessing run no hooks of `atexit`. Hooks of a higher priority close connections before.
        self._finalizer: Any = util and util.Finalize(None, flush, exitpriority=-1)

    def add(self, tunnel: Tunnel) -> None:
        self.tunnels.update(dict.fromkeys(tunnel.watched, tunnel))
        for fd, events in [*tunnel.watched.items()]:  # with TCP's, which is the last one, the thread begins
            self._epoll.register(fd, events or 0)
        if self._thread.ident is None:
            self._thread.start()

    def close_inherited(self) -> None:
        self._epoll.close()
        for tunnel in self.tunnels.values():
            tunnel.close_inherited()

    def _run(self) -> None:
        global _pump
        while True:
            over = set()
            # Ends are passed on last. Otherwise the end of a connection could overtake a notice that its rank sent
            # before on another connection, and the peers would take the end for a death.
            for fd, events in sorted(self._epoll.poll(), key=lambda event: event[1] & _ENDS != 0):
                tunnel = self.tunnels[fd]
                try:
                    tunnel.step(fd, events, self._space)
                    tunnel.watch(self._epoll)
                except Exception:  # a failure in one tunnel must not end the others
                    _log.exception("a connection could not be encrypted and is closed")
                    over.add(tunnel)
                if tunnel.is_over:
                    over.add(tunnel)
            # Not before, because a new tunnel might get a descriptor for which an event is left.
            for tunnel in over:
                for fd in tunnel.watched:
                    del self.tunnels[fd]
                tunnel.close(self._epoll)
            with _lock:
                if not self.tunnels:
                    _pump = None
                    self._epoll.close()
                    if self._finalizer:
                        self._finalizer.cancel()
                    return


_lock = threading.Lock()  # held while a tunnel is added, and while the pump ends
_pump: _Pump | None = None


def dig(connection: socket.socket, context: ssl.SSLContext, is_server: bool, received: bytes) -> Tunnel:
    """Encrypt a connection from now on; its descriptor and socket object stay the same.

    Args:
        connection: a TCP connection that no thread uses and no poller watches.
        context: for TLS.
        is_server: whether this side is TLS's server.
        received: bytes of TLS that were received already.

    Raises:
        OSError: no descriptor is free; the connection is unchanged.
    """
    global _pump
    with ExitStack() as undo:
        program, pair, tcp = (undo.enter_context(each) for each in _descriptors(connection))
        pair.setblocking(False)
        tcp.setblocking(False)
        tunnel = Tunnel(tcp, pair, context, is_server, received)
        with _lock:
            pump = _pump = _pump or _Pump()
            os.dup2(program.fileno(), connection.fileno(), inheritable=False)
            connection.settimeout(connection.gettimeout())  # a new descriptor blocks
            pump.add(tunnel)
        undo.pop_all()
    program.close()
    return tunnel


def _descriptors(connection: socket.socket) -> tuple[socket.socket, socket.socket, socket.socket]:
    """Return a socket pair, and the connection at another descriptor."""
    try:
        with ExitStack() as undo:
            program, pair = map(undo.enter_context, socket.socketpair())
            tcp = connection.dup()
            undo.pop_all()
            return program, pair, tcp
    except OSError as error:
        if error.errno != errno.EMFILE or not raise_limit("encrypted connections"):
            raise
    return _descriptors(connection)


@atexit.register
def flush() -> None:
    """Wait, at most 2 s, until all bytes that the program has sent are in TCP."""
    end = time.monotonic() + _EXIT_SECONDS
    while (pump := _pump) is not None and any(each.holds_bytes() for each in [*pump.tunnels.values()]):
        if time.monotonic() > end:
            return
        time.sleep(_EXIT_LOOK_SECONDS)


def _drop_inherited() -> None:
    """In a child of fork: replace the lock, which may be held, and close the copies of all sockets."""
    global _lock, _pump
    _lock = threading.Lock()
    pump, _pump = _pump, None
    if pump is not None:
        pump.close_inherited()


at_fork("tunnels", _drop_inherited)
