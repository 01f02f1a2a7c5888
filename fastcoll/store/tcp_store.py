"""TCPStore: a store that one process serves over TCP; concurrent calls of a client use separate connections."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from ..core.operands import whole
from ..core.work import Timeout
from ..errors import ResourceError, StoreError, StoreTimeoutError, UsageError
from ..system.address import (
    CURE,
    PORTLESS_SECONDS,
    UNREACHABLE,
    SockAddr,
    name_of,
    place_of,
    portless,
    probe,
    resolve,
    shown,
)
from . import frames
from .encryption import encrypt, encrypts
from .opening import (
    SAME_ENCRYPTION,
    ConnectionKind,
    Dialing,
    Endpoint,
    OpeningError,
    OpeningResult,
    RefusedError,
    Role,
)
from .secret import SAME_SECRET, job_secret, source
from .serving import acquire, release
from .store import DEFAULT_TIMEOUT, StalledError, count_in, limit_of, tries
from .table import WAITING, Missing, Op, StoreRequest, TableStore, check_process, closed_meanwhile
from .tcp_server import TCPServer
from .waiting import LateWarning

T = TypeVar("T")
logger = logging.getLogger("fastcoll")

# Seconds that an answer may take beyond the request's own timeout. After that the call raises StalledError.
# `waiting.fetch_for` then repeats the request until its own timeout, because the server may be stopped for a while.
GRACE_SECONDS = 5.0
# The time limit of one attempt to connect, and the interval at which a pending attempt checks whether to log a warning.
_TRY_SECONDS, _LOOK_SECONDS = 10.0, 0.25
# A socket's timeout is at most this long: Python passes it to poll(2) as milliseconds of 32 bits, without their higher
# bits. So with 50 days a socket timed out after 7 hours.
_MOST_SECONDS = 24 * 24 * 3600.0
# How long a client retries while the server has no free descriptor. This is short, because a server that is full stays
# full: its connections last as long as the job.
_FULL_SECONDS = 2.0
# A server can listen on these addresses ("all interfaces"), but a client on its machine must connect to these instead.
_REACHABLE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# With these two numbers the kernel detects within 11 s that the server's machine is gone. The first is for an idle
# connection: the kernel sends keep-alive probes after this many silent seconds (address.probe). While data is
# unacknowledged, the kernel sends no probes; then the second, TCP_USER_TIMEOUT, ends the connection. Without it the
# kernel would retransmit for 15 minutes.
_PROBE_AFTER_SECONDS, _SILENT_MILLISECONDS = 5, 11_000


class TCPStore(TableStore):
    """A store that the master serves at `host_name`:`port`.

    Thread safe: calls of several threads use separate connections and do not block one another. A store whose server is
    lost does not reconnect: every call raises StoreError. A child process made by fork must open its own store. Both
    ends prove that they have the job's secret (FASTCOLL_SECRET, FASTCOLL_SECRET_FILE, else the user's own secret).

    Args:
        host_name: name or address of the master's machine; the server listens on this address only.
        port: the server's port; 0 (only for the master): a free port.
        world_size: the number of processes that open the store, including the master; None: any number.
        is_master: serve the store in this process, until this object is closed or dropped.
        timeout: the time limit of blocking operations, and of connecting.
        wait_for_workers: whether the master waits here until `world_size` processes have opened the store.
        multi_tenant: whether masters in this process with the same host and port share one server.
        master_listen_fd: the descriptor of a listening socket, on which the master serves; the server closes it.
        use_libuv: has no effect, like `libuvBackend`, because fastcoll has only one kind of server.
        port_note: text to append to the warning that no connection can be made.

    Raises:
        UsageError: an argument is wrong.
        ResourceError: the port is in use; the message names the process that holds it, if it can be seen.
        StoreTimeoutError: no server was reached, or not all workers came, within `timeout`.

    Examples:
        >>> with TCPStore("localhost", 0, is_master=True) as store:
        ...     store.add("visits", 1)
        1
    """

    libuvBackend = False

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
        *,
        port_note: str = "",
    ) -> None:
        self.set_timeout(timeout)
        if not isinstance(host_name, str):
            kind = type(host_name).__name__
            raise UsageError(f"host_name is {host_name!r}, a {kind}; give a name or an address as text")
        port, size = whole("port", port), -1 if world_size is None else whole("world_size", world_size)
        if not 0 <= port <= 65535:
            raise UsageError(f"a store's port is 0 to 65535, got {port}")
        if port == 0 and not is_master:
            raise UsageError("port 0 takes a free port and is for the master only; give the master's port")
        if size < -1 or size == 0:
            raise UsageError(f"world_size counts the processes that open the store, got {size}")
        self._secret = job_secret()
        encrypts()  # raises if it is impossible here
        self._pid = os.getpid()
        self._lock = threading.RLock()  # reentrant, because a signal handler may close the store
        self._idle: list[TCPConnection] = []
        self._busy: set[TCPConnection] = set()
        self._server: TCPServer | None = None
        if is_master:
            grace = limit_of(self)
            make = partial(TCPServer, host_name, port, self._secret, grace, multi_tenant, master_listen_fd)
            self._server = acquire((host_name, port) if multi_tenant else None, make)
            self._finalizer = weakref.finalize(self, _let_go, self._server, self._pid)
            self._finalizer.atexit = False  # the server's thread ends with the process
        self.host = host_name
        self.port = port if self._server is None else self._server.port
        try:
            first = connect(self.host, self.port, self._secret, limit_of(self), port_note=port_note)
            self._instance = first.instance
            self.local_address = first.local_address
            self._idle.append(first)
            if size > 0:
                came = f"opened the store at {shown(self.host, self.port)}"
                limit = limit_of(self) if is_master and wait_for_workers else None
                count_in(self, "fastcoll/workers", "fastcoll/workers/all", size, limit, came)
        except BaseException:
            self.close()
            raise

    def close(self, linger: float = 0.0) -> None:
        """Disconnect; the master also stops serving. Calls under way on other threads fail.

        Args:
            linger: how many seconds the master waits, at most, for the other clients to disconnect.
        """
        if self._pid != os.getpid():
            # A child process made by fork closes its copies of the descriptors. It does not touch the parent's server
            # and lock.
            self._closed = True
            for connection in [*self._idle, *self._busy]:
                connection.close()
            return
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._busy:
                connection.interrupt()
        for connection in idle:
            connection.close()
        server, self._server = self._server, None
        if server is not None and self._finalizer.detach():
            release(server, linger)

    def leave(self, linger: float) -> None:
        self.close(linger)

    def clone(self) -> TCPStore:
        """Open the store once more, as a client."""
        return TCPStore(self.host, self.port, timeout=self.timeout)

    def exchange(self, key: str, value: str | bytes, wanted: str, timeout: Timeout = None) -> bytes:
        return self._do(Op.EXCHANGE, [key, wanted], [value, b""], limit_of(self, timeout))[0]

    def bequeath(self, key: str, value: str) -> Callable[[], None]:
        """Make the server set `key` to `value` when this process ends, unless the key is set by then.

        Returns:
            A function that withdraws this request. It never blocks. It may be called twice, also after the store is
            closed.
        """
        request = StoreRequest(Op.WILL, (key.encode(),), (value.encode(),), limit_of(self))
        deadline = _deadline(request)
        connection = self._another(deadline)  # closed only by `withdraw` or by this process's end
        connection.ask(request, deadline)

        def withdraw() -> None:
            with contextlib.suppress(OSError, StoreError):  # the server is gone
                connection.send(frames.encode_request(StoreRequest(Op.WILL)), time.monotonic())
            connection.close()

        return withdraw

    def _ask(self, request: StoreRequest) -> list[bytes] | Missing:
        check_process(self, self._pid)
        deadline = _deadline(request)
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        connection = connection or self._another(deadline)
        with self._lock:
            self._busy.add(connection)
        usable = False
        try:
            if self._closed:
                raise closed_meanwhile(self)
            status, fields = connection.ask(request, deadline)
            usable = True
        except StalledError:
            usable = connection.is_owed  # then the next call on this connection skips the late answer
            raise
        except LostError as error:
            if self._closed:
                raise closed_meanwhile(self) from error
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                usable = usable and not self._closed
                if usable:
                    self._idle.append(connection)
            if not usable:
                connection.close()
        if status is frames.ReplyStatus.TIMEOUT:
            return Missing(int(fields[0]), fields[1:])
        if status is frames.ReplyStatus.REFUSED:
            raise StoreError(fields[0].decode(errors="replace"))
        return fields

    def _another(self, deadline: float) -> TCPConnection:
        """Open another connection to the same server.

        LostError: this server is gone. StalledError: it does not answer; it is stopped, overloaded or unreachable.
        """
        grace = max(deadline - time.monotonic(), 0.0)
        try:
            connection = connect(self.host, self.port, self._secret, grace, was_there=True)
        except StoreTimeoutError as error:
            if isinstance(error.__cause__, ConnectionError):
                raise LostError(shown(self.host, self.port)) from error
            raise StalledError(_stalled(shown(self.host, self.port))) from error
        if connection.instance != self._instance:
            connection.close()
            raise LostError(shown(self.host, self.port))
        return connection


def _let_go(server: TCPServer, pid: int) -> None:
    if pid == os.getpid():  # a forked child has closed its copy of the server
        release(server)


def client_of(variable: str, address: str, timeout: float) -> TCPStore:
    """Connect to the launchers' store at `address`, HOST:PORT, which is the value of the setting `variable`.

    Raises:
        UsageError: the address is not HOST:PORT.
        StoreError: there is no store at the address, or it did not answer within `timeout` seconds.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"the launchers' store ({variable}) is at HOST:PORT, got {address!r}")
    return TCPStore(host.strip("[]"), int(port), timeout=timeout)


def _deadline(request: StoreRequest) -> float:
    """Return the time by which the server must have answered."""
    return time.monotonic() + request.timeout + GRACE_SECONDS


def _stalled(where: str) -> str:
    return (
        f"the store at {where} does not answer: the process that holds it (rank 0) is stopped, or the network between "
        "is down"
    )


class _FullError(ConnectionError):
    """The server has no file descriptor left for this connection."""


class LostError(StoreError, ConnectionError):
    """The other end closed the connection, or its machine is gone; `reason` is the kernel's error, if there is one."""

    def __init__(self, where: str, reason: OSError | None = None) -> None:
        why = f" ({reason.strerror})" if reason is not None and reason.strerror else ""
        super().__init__(f"the process that holds the store at {where} (rank 0) is gone{why}")


class TCPConnection:
    """An open connection, for one thread at a time.

    After an error, the connection must be closed. There is one exception: after a StalledError with `is_owed` True it
    can be used again, and the next call skips the late answer. `instance` identifies the server: another server on the
    same port has another value. `local_address` is the address of this end.
    """

    def __init__(self, connected: socket.socket, host: str, port: int) -> None:
        self._socket = connected
        self._where, self._name = shown(host, port), name_of(host, port)
        self.instance = b""
        self.is_owed = False  # a request was sent, and no byte of its answer has arrived
        self._warn_at = math.inf  # when to warn that the server is silent
        self.local_address = str(connected.getsockname()[0])

    def ask(self, request: StoreRequest, deadline: float) -> tuple[frames.ReplyStatus, list[bytes]]:
        """Send `request` and return the server's answer.

        StoreError: the peer is not a store. LostError: the server is gone. StalledError: the server does not answer.
        """
        waits = request.timeout if request.op in WAITING else 0.0
        self._warn_at = time.monotonic() + waits + GRACE_SECONDS
        if self.is_owed:
            self._answer(deadline)
        self.send(frames.encode_request(request), deadline)
        self.is_owed = True
        return self._answer(deadline, request)

    def _answer(
        self, deadline: float, request: StoreRequest | None = None
    ) -> tuple[frames.ReplyStatus, list[bytes]]:
        try:
            header = self.receive(frames.HEADER.size, deadline)
            answer = frames.decode_answer(header, self.receive(frames.frame_length(header), deadline))
            if request is not None:
                frames.check_answer(request, *answer)
            return answer
        except frames.ProtocolError as error:
            raise StoreError(f"the answer of the store at {self._where} cannot be read: {error}") from error

    def close(self) -> None:
        """Close the connection. Closing twice is fine."""
        self._socket.close()

    def interrupt(self) -> None:
        """Make a call that is waiting in this connection on another thread fail."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def open(self, secret: bytes, deadline: float) -> None:
        """Exchange the openings, and the proofs if there is a secret; encrypt the connection if FASTCOLL_ENCRYPT=1."""
        self._warn_at = time.monotonic() + GRACE_SECONDS
        try:
            place = place_of(*self._socket.getpeername()[:2])
        except OSError as error:  # the connection was reset
            raise LostError(self._where, error) from error
        me = Endpoint(self._name, 1, 2, secret, bool(secret), encrypts())
        dialing = Dialing(me, 0, ConnectionKind.STORE, 0, place)
        self.send(dialing.opening, deadline)
        try:
            while dialing.wants:
                data = self._receive(deadline, self._socket.recv, dialing.wants)
                if not data:
                    raise LostError(self._where)
                if reply := dialing.take(data):
                    self.send(reply, deadline)
        except RefusedError as error:
            with contextlib.suppress(LostError):
                self.send(error.answer, deadline)
            if error.result is OpeningResult.FULL:
                raise _FullError(errno.EMFILE, "the server has no file descriptor left") from error
            assert dialing.theirs is not None, "a refusal comes after the peer's opening"
            its = dialing.theirs.protocol
            why = f"speaks protocol {its}, this process another; run one version of fastcoll on all ranks"
            if error.result is OpeningResult.SECRET:
                other = "another secret" if dialing.theirs.has_secret else "no secret"
                why = f"has {other}, and this process has {source()}; {SAME_SECRET}"
            if error.result is OpeningResult.ENCRYPTION:
                does = ("encrypts", "does not") if dialing.theirs.encrypts else ("does not encrypt", "does")
                why = f"{does[0]} its connections, and this process {does[1]}; {SAME_ENCRYPTION}"
            if error.result is OpeningResult.PLACE:
                why = (
                    "has another address: a mapped port, a tunnel or a stranger forwards connections to it. The "
                    f"secret, {source()}, opens all of your jobs and so does not identify this one; give this job one "
                    "of its own: on every rank the same FASTCOLL_SECRET or FASTCOLL_SECRET_FILE"
                )
            raise StoreError(f"the store at {self._where} {why}") from error
        except OpeningError as error:
            raise StoreError(f"{self._where} answers, but is not a fastcoll store: {error}") from error
        assert dialing.theirs is not None, "the handshake is complete"
        self.instance = dialing.theirs.group
        try:
            encrypt(self._socket, dialing.seed, Role.DIALS)
        except OSError as error:
            raise LostError(self._where, error) from error

    def send(self, data: bytes, deadline: float) -> None:
        """Send all of `data`; raises the same errors as `ask`."""
        self._do(deadline, self._socket.sendall, data)

    def receive(self, count: int, deadline: float) -> bytes:
        """Return the next `count` bytes; raises the same errors as `ask`."""
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._receive(deadline, self._socket.recv_into, view)
            if got == 0:
                raise LostError(self._where)
            self.is_owed = False
            view = view[got:]
        return bytes(data)

    def _receive(self, deadline: float, operation: Callable[[Any], T], data: memoryview | int) -> T:
        """Run a receiving operation; warn once if the server sends nothing for 5 s more than the request may take."""
        if self._warn_at + GRACE_SECONDS <= deadline:
            try:
                return self._do(self._warn_at, operation, data)
            except StalledError as error:
                self._warn_at = math.inf
                logger.warning("%s; it has %.0f s more", error, deadline - time.monotonic())
        return self._do(deadline, operation, data)

    def _do(self, deadline: float, operation: Callable[[Any], T], data: bytes | memoryview | int) -> T:
        try:
            self._socket.settimeout(min(max(deadline - time.monotonic(), 0.001), _MOST_SECONDS))
            return operation(data)
        except TimeoutError as error:
            raise StalledError(_stalled(self._where)) from error
        except OSError as error:
            raise LostError(self._where, error) from error


def connect(
    host: str, port: int, secret: bytes, timeout: float, was_there: bool = False, port_note: str = ""
) -> TCPConnection:
    """Connect to the store at `host`:`port`, with retries for `timeout` seconds.

    If this takes longer than half of FASTCOLL_WARN_AFTER (by default longer than 5 s), log one warning with the reason
    and `port_note`.

    Args:
        was_there: whether this process was connected to the store before. Then an address at which no process listens
            means that the store is lost, so this is not retried.

    Raises:
        LostError: no process listens at the address, and `was_there` is True.
        StoreTimeoutError: no store was reached within `timeout`.
        StoreError: another program listens there, or the secrets differ.
        ResourceError: the server has reached its limit of file descriptors, or this host has no port left.
    """
    where = shown(host, port)
    deadline, full_since, portless_since = time.monotonic() + timeout, float("inf"), float("inf")
    late = LateWarning(0.5)
    reason: OSError | None = None

    def look(why: str) -> None:
        late.look(
            f"connecting to the store at {where}", f"rank 0, which serves it ({why}){port_note}".__str__
        )

    for _ in tries(timeout, 0.01, 0.25):
        try:
            connection = TCPConnection(_connected(host, port, deadline, look), host, port)
            try:
                connection.open(secret, max(deadline, time.monotonic() + 1.0))
            except BaseException:
                connection.close()
                raise
            return connection
        except OSError as error:
            reason = error
            if was_there and isinstance(error, ConnectionRefusedError):
                raise LostError(where, error) from error
        full_since = min(full_since, time.monotonic()) if isinstance(reason, _FullError) else float("inf")
        if time.monotonic() - full_since >= min(_FULL_SECONDS, timeout):
            raise ResourceError(
                f"the store at {where} takes no more connections: the process that serves it (rank 0) has reached its "
                f"limit of file descriptors; {CURE}"
            ) from reason
        lacking = reason and portless(reason, f"the store at {where}")
        portless_since = min(portless_since, time.monotonic()) if lacking else float("inf")
        if lacking and time.monotonic() - portless_since >= min(PORTLESS_SECONDS, timeout):
            raise lacking from reason
        look(_why(reason, host))
    assert reason is not None, "it was tried at least once"
    raise StoreTimeoutError(
        f"no store at {where} within {timeout:g} s (last: {_why(reason, host)}); is rank 0 running there, with "
        "the same address and port?"
    ) from reason


def _why(error: OSError, host: str) -> str:
    """Return why an attempt to connect has failed."""
    text = str(error.strerror or error)
    return f"the name {host} does not resolve: {text}" if isinstance(error, socket.gaierror) else text


def _connected(host: str, port: int, deadline: float, look: Callable[[str], None]) -> socket.socket:
    """Open a TCP connection to one of the host's addresses. While there is no answer, call `look` every 0.25 s."""
    reason: OSError | None = None
    for family, address in resolve(_REACHABLE.get(host, host), port):
        try:
            return _connected_to(family, address, deadline, look)
        except OSError as error:
            # localhost may have an IPv6 address on a machine without IPv6. Then the error of its IPv4 address is the
            # reason.
            if reason is None or error.errno not in UNREACHABLE:
                reason = error
    assert reason is not None, "a resolved name has an address"
    raise reason


def _connected_to(
    family: socket.AddressFamily, address: SockAddr, deadline: float, look: Callable[[str], None]
) -> socket.socket:
    """Open a TCP connection. While there is no answer, call `look` every 0.25 s, with a likely reason."""
    candidate = socket.socket(family, socket.SOCK_STREAM)
    try:
        candidate.setblocking(False)
        end = time.monotonic() + min(max(deadline - time.monotonic(), 0.05), _TRY_SECONDS)
        status = candidate.connect_ex(address)
        while status == errno.EINPROGRESS and time.monotonic() < end:
            if _is_decided(candidate, min(end, time.monotonic() + _LOOK_SECONDS)):
                status = candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            else:
                look("no answer; a firewall may drop the packets")
        # A socket that connects to a loopback port without a listener can become connected to itself.
        if status == 0 and candidate.getsockname() == candidate.getpeername():
            status = errno.ECONNREFUSED
        if status:
            status = errno.ETIMEDOUT if status == errno.EINPROGRESS else status
            raise OSError(status, os.strerror(status))
        probe(candidate, _PROBE_AFTER_SECONDS)
        candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENT_MILLISECONDS)
        return candidate
    except BaseException:
        candidate.close()
        raise


def _is_decided(candidate: socket.socket, end: float) -> bool:
    """Wait until `end` for a pending connect; return whether it has succeeded or failed."""
    poller = select.poll()
    poller.register(candidate, select.POLLOUT)
    return bool(poller.poll(1000 * max(end - time.monotonic(), 0.0) + 0.5))
