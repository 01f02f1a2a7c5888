"""One client's connection to a store's server: opening, then one request and answer at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time

from ..errors import ResourceError, StoreError, StoreTimeoutError
from .address import CURE, resolve, shown
from .secret import PROOF_SIZE, is_proof
from .table import Request
from .waiting import LateWarning
from .wire import (
    HEADER,
    HELLO,
    NONCE_SIZE,
    Hello,
    ProtocolError,
    Role,
    Status,
    Verdict,
    decode_answer,
    encode_request,
    frame_length,
    prove,
)

# How much longer than the request's own timeout an answer may take before the server counts as stuck.
GRACE_SECONDS = 5.0
_RETRY_FIRST, _RETRY_MOST = 0.01, 0.25
# How long a server may be full; its connections last as long as the job, so few become free.
_FULL_SECONDS = 2.0


class _FullError(ConnectionError):
    """The server has no file descriptor left for this connection."""


class LostError(StoreError, ConnectionError):
    """The other end closed the connection, or its machine is gone."""


class TCPConnection:
    """An open connection. For one thread at a time; after an exception it must be closed.

    Attributes:
        instance: 16 bytes that name the server; another server on the same port has others.
        local_address: this end's address, as the server sees it.
    """

    def __init__(self, connected: socket.socket, host: str, port: int) -> None:
        self._socket = connected
        self._where = shown(host, port)
        self.instance = b""
        self.local_address = str(connected.getsockname()[0])

    def ask(self, request: Request) -> tuple[Status, list[bytes]]:
        """Send `request` and return the server's answer.

        Raises:
            StoreError: what answers is no store; as LostError, the server is gone.
            StoreTimeoutError: the server does not answer.
        """
        deadline = time.monotonic() + request.timeout + GRACE_SECONDS
        self._send(encode_request(request), deadline)
        try:
            header = self._receive(HEADER.size, deadline)
            return decode_answer(header, self._receive(frame_length(header), deadline))
        except ProtocolError as error:
            raise StoreError(f"what the store at {self._where} answers cannot be read: {error}") from error

    def close(self) -> None:
        """Close the connection. Closing twice is fine."""
        self._socket.close()

    def interrupt(self) -> None:
        """Make a call that waits on another thread fail now."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def open(self, secret: bytes, deadline: float) -> None:
        """Exchange the openings, and the proofs when there is a secret.

        Raises:
            StoreError: no store, another protocol version, or another secret at the other end.
        """
        mine = Hello(Role.CLIENT, os.urandom(NONCE_SIZE), bool(secret)).to_bytes()
        self._send(mine, deadline)
        data = self._receive(HELLO.size, deadline)
        try:
            server = Hello.from_bytes(data, Role.SERVER)
        except ProtocolError as error:
            raise StoreError(f"{self._where} answers, but is no fastcoll store: {error}") from error
        self._check(server, bool(secret))
        self.instance = server.instance
        if secret:
            expected = prove(secret, Role.SERVER, mine, data)
            if not is_proof(self._receive(PROOF_SIZE, deadline), expected):
                raise StoreError(_other_secret(self._where))
            self._send(prove(secret, Role.CLIENT, mine, data), deadline)

    def _check(self, server: Hello, has_secret: bool) -> None:
        if server.verdict is Verdict.FULL:
            raise _FullError(errno.EMFILE, "the server has no file descriptor left")
        if server.verdict is Verdict.PROTOCOL:
            raise StoreError(
                f"the store at {self._where} speaks protocol {server.protocol}, this process another; run one "
                "version of fastcoll on all ranks"
            )
        if server.verdict is Verdict.SECRET or server.has_secret != has_secret:
            raise StoreError(_other_secret(self._where))

    def _send(self, data: bytes, deadline: float) -> None:
        try:
            self._arm(deadline)
            self._socket.sendall(data)
        except TimeoutError as error:
            raise self._stuck() from error
        except OSError as error:
            raise self._gone() from error

    def _receive(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            try:
                self._arm(deadline)
                got = self._socket.recv_into(view)
            except TimeoutError as error:
                raise self._stuck() from error
            except OSError as error:
                raise self._gone() from error
            if got == 0:
                raise self._gone()
            view = view[got:]
        return bytes(data)

    def _arm(self, deadline: float) -> None:
        self._socket.settimeout(max(deadline - time.monotonic(), 0.001))

    def _gone(self) -> LostError:
        return LostError(f"the process that holds the store at {self._where} (rank 0) is gone")

    def _stuck(self) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"the store at {self._where} does not answer: the process that holds it (rank 0) is stopped, or the "
            "network between is down"
        )


def connect(host: str, port: int, secret: bytes, timeout: float) -> TCPConnection:
    """A connection to the store at `host`:`port`, tried again until `timeout` seconds have passed.

    Raises:
        StoreTimeoutError: nothing listens there.
        StoreError: something else listens there, or the secrets do not match.
        ResourceError: the server may not open as many file descriptors as there are ranks.
    """
    deadline = time.monotonic() + timeout
    full_since: float | None = None
    late = LateWarning()
    pause = _RETRY_FIRST
    while True:
        try:
            return _connect_once(host, port, secret, deadline)
        except OSError as error:
            reason = error
        full_since = (full_since or time.monotonic()) if isinstance(reason, _FullError) else None
        if full_since is not None and time.monotonic() - full_since >= min(_FULL_SECONDS, timeout):
            raise ResourceError(
                f"the store at {shown(host, port)} takes no more connections: the process that serves it (rank 0) has "
                f"reached its limit of file descriptors; {CURE}"
            ) from reason
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreTimeoutError(
                f"no store at {shown(host, port)} within {timeout:g} s (last: {reason.strerror or reason}); is rank 0 "
                "running there, with the same address and port?"
            ) from reason
        late.look(f"connecting to the store at {shown(host, port)}", lambda: "rank 0, which serves it")
        time.sleep(min(pause, left))
        pause = min(2 * pause, _RETRY_MOST)


def _connect_once(host: str, port: int, secret: bytes, deadline: float) -> TCPConnection:
    """Raises OSError where another try may help."""
    connection = TCPConnection(_connected(host, port, deadline), host, port)
    try:
        connection.open(secret, max(deadline, time.monotonic() + 1.0))
    except BaseException:
        connection.close()
        raise
    return connection


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    reason: OSError | None = None
    for family, address in resolve(host, port):
        candidate = socket.socket(family, socket.SOCK_STREAM)
        try:
            candidate.settimeout(min(max(deadline - time.monotonic(), 0.05), 10.0))
            candidate.connect(address)
            if candidate.getsockname() == candidate.getpeername():
                # A loopback port that nobody listens on can connect to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
            candidate.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_lost_hosts(candidate)
            return candidate
        except OSError as error:
            candidate.close()
            reason = error
        except BaseException:
            candidate.close()
            raise
    assert reason is not None, "a resolved name has an address"
    raise reason


def _notice_lost_hosts(connected: socket.socket) -> None:
    """Let the kernel find out within 11 s that the other machine is gone (it sends nothing then)."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # Keepalive rests while a request is under way; this counts then, else the kernel tries on for 15 minutes.
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 11_000)


def _other_secret(where: str) -> str:
    return (
        f"the store at {where} has another secret; give every rank of the job the same FASTCOLL_SECRET or "
        "FASTCOLL_SECRET_FILE"
    )
