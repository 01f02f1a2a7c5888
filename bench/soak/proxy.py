"""A TCP proxy that makes a network bad: it splits, holds, changes, resets, or half-closes connections."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable


class Proxy:
    """Forwards connections at `port` of 127.0.0.1 to `target`.

    Args:
        target: (address, port) of the real listener.
        transfer: most bytes to forward at a time; 0: as they arrive.
        hold: forward at most so many bytes of a connection in one direction, and set `held`.
        change: called with the number of bytes that were received before on a connection in one direction, and the
            next bytes; returns what to forward. ConnectionError: close the connection on both sides.
    """

    def __init__(
        self,
        target: tuple[str, int],
        transfer: int = 0,
        hold: int = 1 << 60,
        change: Callable[[int, bytes], bytes] = lambda at, data: data,
    ) -> None:
        self._target = target
        self._transfer, self._hold, self._change = transfer or 1 << 16, hold, change
        self.held, self._released = threading.Event(), threading.Event()
        self._ends: list[socket.socket] = []  # of each connection the dialed and the onward one
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def reset(self) -> None:
        """Reset all connections, on both sides."""
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._end_pumps(socket.SHUT_RD)  # wakes the threads, which close the connections

    def half_close(self) -> None:
        """Send end-of-file to the side that dialed; its own bytes are still forwarded."""
        for dialed in self._ends[::2]:
            with contextlib.suppress(OSError):
                dialed.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close all connections, and stop."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._threads[0].join()
        self._end_pumps(socket.SHUT_RDWR)

    def _end_pumps(self, how: int) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(how)
        self._released.set()
        for thread in self._threads[1:]:
            thread.join()
        for end in self._ends:
            end.close()

    def _start(self, run: object, *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                dialed, _ = self._listener.accept()
            except OSError:
                return
            onward = socket.create_connection(self._target)
            self._ends += (dialed, onward)
            for end in (dialed, onward):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._pump, dialed, onward)
            self._start(self._pump, onward, dialed)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        forwarded = 0
        with contextlib.suppress(OSError):
            while data := source.recv(self._transfer):
                forwarded += len(data)
                if forwarded > self._hold:
                    self.held.set()
                    self._released.wait()
                try:
                    changed = self._change(forwarded - len(data), data)
                except ConnectionError:
                    source.shutdown(socket.SHUT_RDWR)
                    break
                sink.sendall(changed)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)
