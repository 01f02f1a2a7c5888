"""Passes a rank's output on line by line, each with the rank in front, so that ranks never share a line."""

from __future__ import annotations

import os
import re
import select
from collections import deque
from collections.abc import Callable
from typing import BinaryIO

_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])")  # progress bars end theirs with a carriage return
_READ_BYTES = 64 << 10
_LONGEST_LINE = 1 << 20  # a longer one is cut, so that output without line ends takes no more memory
_REMEMBERED = 40  # lines

Sink = Callable[[bytes], None]
"""What takes the lines of one write; may raise BrokenPipeError when nobody reads them."""


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`. Not through a buffer, which would still hold it when the reader has gone.

    Raises:
        BrokenPipeError: nobody reads any more.
    """
    while data:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # another program has made the terminal nonblocking
            _wait(descriptor, select.POLLOUT, None)


def _wait(descriptor: int, event: int, milliseconds: int | None) -> bool:
    poll = select.poll()  # select() refuses descriptors above 1023
    poll.register(descriptor, event)
    return bool(poll.poll(milliseconds))


class Relay:
    """One stream of one rank.

    Args:
        source: the pipe's reading end, which the relay owns.
        sink: takes the lines.
        prefix: put in front of each line.
        log: a file that gets the stream as it is, or None; owned as well.
    """

    def __init__(self, source: int, sink: Sink, prefix: bytes, log: BinaryIO | None) -> None:
        os.set_blocking(source, False)
        self.source = source
        self._sink, self._prefix, self._log = sink, prefix, log
        self._partial = b""
        self._last: deque[bytes] = deque(maxlen=_REMEMBERED)

    def pump(self) -> bool:
        """Pass on what is there now, never blocking on the source; False when it has ended.

        Raises:
            BrokenPipeError: nobody reads the sink any more.
        """
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return True
        if self._log is not None:
            self._log.write(data)
        self._write(self._lines(data))
        return bool(data)

    def pump_all(self) -> None:
        """Pass on all that is there now."""
        while _wait(self.source, select.POLLIN, 0) and self.pump():
            pass

    def finish(self) -> None:
        """Pass on what is left, with a last line that has no end, and close; nobody writes any more."""
        self.pump_all()
        if self._partial:
            self._write([self._partial + b"\n"])
        os.close(self.source)
        if self._log is not None:
            self._log.close()

    def last_lines(self) -> str:
        """The end of what was passed on."""
        return b"".join(self._last).decode(errors="replace")

    def _lines(self, data: bytes) -> list[bytes]:
        text = self._partial + data
        lines = _LINE.findall(text)
        self._partial = text[sum(map(len, lines)) :]
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._partial + b"\n")
            self._partial = b""
        return lines

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._last.extend(lines)
            self._sink(b"".join(self._prefix + line for line in lines))
