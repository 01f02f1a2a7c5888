"""One rank of a job: its process, and the two relays that pass its output on line by line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from ..system.own_files import open_anew
from . import lifeline
from .binding import bound
from .console import is_ready
from .nodes import NodeShare
from .outputs import Outputs

_logger = logging.getLogger("fastcoll")
# Members of an ExceptionGroup are indented by bars. Tracebacks may have colours (FORCE_COLOR).
_FOLLOWED = re.compile(
    r"^(?:[ |]|\x1b\[[\d;]*m)*fastcoll\.errors\.(?:GroupError|PeerDiedError|CollectiveTimeoutError|AbortedError)\b",
    re.MULTILINE,
)
_READ_BYTES = 64 << 10
_PIPE_BYTES = 1 << 20  # the largest size of a pipe (/proc/sys/fs/pipe-max-size)
_LONGEST_LINE = 1 << 20  # longer lines are cut, to bound the memory for output without line ends
_REMEMBERED = 40  # how many of the last lines of a stream are kept

Sink = Callable[[bytes], None]
"""A function that writes whole lines of output. It may raise BrokenPipeError if the reader of the output is gone."""


class Relay:
    """Relays one stream of one rank, line by line.

    A prefix that names the rank may begin each line. Only whole lines are passed on, so that the output of two ranks is
    never mixed in one line. The relay owns `source`, the reading end of a pipe, and `log`, a file that gets the stream
    unchanged.
    """

    def __init__(self, source: int, sink: Sink, prefix: bytes, log: BinaryIO | None) -> None:
        os.set_blocking(source, False)
        self.source = source
        self._sink, self._prefix, self._log = sink, prefix, log
        self._partial = b""
        self._last: deque[bytes] = deque(maxlen=_REMEMBERED)

    def pump(self) -> bool:
        """Relay up to 64 KiB that the pipe holds now; return False when the stream has ended.

        Raises:
            BrokenPipeError: the sink has raised it, because the reader of its output is gone.
        """
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return True
        self._keep(data)
        # Progress bars end their lines with a carriage return, so that counts as a line end here.
        lines = (self._partial + data).splitlines(keepends=True)
        self._partial = lines.pop() if lines and not lines[-1].endswith((b"\n", b"\r")) else b""
        if len(self._partial) > _LONGEST_LINE:
            lines.append(self._partial + b"\n")
            self._partial = b""
        self._write(lines)
        return bool(data)

    def pump_all(self) -> None:
        """Relay the data that the pipe holds now, without waiting for the end of the stream.

        The end may never come, because a process that outlives its rank may keep the pipe open and go on writing.
        """
        for _ in range(_PIPE_BYTES // _READ_BYTES):
            if self.source < 0 or not is_ready(self.source, select.POLLIN, 0) or not self.pump():
                return

    def finish(self) -> None:
        """Relay the rest, including an unfinished last line, and close `source` and `log`. May be called twice."""
        if self.source < 0:
            return
        try:
            self.pump_all()
            if self._partial:
                self._write([self._partial + b"\n"])
        finally:
            os.close(self.source)
            self.source = -1
            self._keep(b"", is_end=True)

    def _keep(self, data: bytes, is_end: bool = False) -> None:
        """Write to the log; a failed write does not end the job."""
        if self._log is None:
            return
        try:
            self._log.write(data)
            if is_end:
                self._log.close()
        except OSError as error:
            log, self._log = self._log, None
            _logger.warning("no more is written to %s: %s", log.name, error.strerror)
            with contextlib.suppress(OSError):
                log.close()

    def last_lines(self) -> str:
        """Return the last lines that were read from the stream, at most 40."""
        return b"".join([*self._last, self._partial]).decode(errors="replace")

    def _write(self, lines: list[bytes]) -> None:
        if lines:
            self._last.extend(lines)
            self._sink(b"".join(self._prefix + line for line in lines))


class RankProcess:
    """One rank: its process and the relays of its stdout and stderr.

    Args:
        joiner: the number of this process among the joiners, which replace failed ranks; 0: it is no joiner.
    """

    def __init__(
        self,
        job: NodeShare,
        local_rank: int,
        prefix: bool,
        logs: Path | None,
        sinks: tuple[Sink, Sink],
        outputs: Outputs,
        joiner: int = 0,
    ) -> None:
        self.rank, self.local_rank = job.rank(local_rank), local_rank
        self.process_name = job.process_name(local_rank, joiner)
        self.started, self.is_joiner = time.monotonic(), joiner > 0
        self.name = f"joiner {joiner}" if joiner else f"rank {self.rank}"
        label = f"new {joiner}" if joiner else str(self.rank)
        tether = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())]
        self._error_text = b""
        relays: list[Relay] = []
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            # The rank's error file is a memfd, so that no file is left if this process is killed.
            self._error = os.memfd_create("fastcoll-error")
            undo.callback(os.close, self._error)
            error = {"TORCHELASTIC_ERROR_FILE": f"/proc/{os.getpid()}/fd/{self._error}"}
            ends = []
            for name, sink in zip(("stdout", "stderr"), sinks, strict=True):
                mode = outputs.mode(local_rank, name)
                file = logs / f"{self.name.replace(' ', '-')}.{name}" if logs and mode.to_file else None
                log = open_anew(file) if file else None
                source, end = os.pipe()
                ends.append(end)
                theirs.callback(os.close, end)
                start = f"[{label}] ".encode() if prefix else b""
                relays.append(Relay(source, sink if mode.to_console else lambda data: None, start, log))
                undo.callback(relays[-1].finish)
            self.out, self.err = relays
            with bound(job.share(local_rank)):
                self.process = subprocess.Popen(
                    [*tether, *job.command(local_rank)],
                    stdin=None if local_rank == 0 and not joiner else subprocess.DEVNULL,
                    stdout=ends[0],
                    stderr=ends[1],
                    env={**job.environment(local_rank, os.environ, joiner), **error},
                    pass_fds=job.descriptors,
                    start_new_session=True,
                )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)
            self.pidfd = os.pidfd_open(self.process.pid)
            undo.pop_all()

    def reap(self) -> int:
        """Wait for the process and return its exit code."""
        code = self.process.wait()
        self._error_text = os.pread(self._error, _LONGEST_LINE, 0)
        for file in (self.pidfd, self._error):
            os.close(file)
        return code

    def last_output(self) -> str:
        """Return the traceback of a failed rank, or its last lines on stderr.

        There is a traceback in the rank's error file if the program uses torch's decorator `record`.
        """
        try:
            message = json.loads(self._error_text)["message"]
            return str(message if isinstance(message, str) else message["extraInfo"]["py_callstack"])
        except (ValueError, KeyError, TypeError):
            return self.err.last_lines()

    def close(self) -> None:
        """Relay what the streams still hold, and close them."""
        with contextlib.ExitStack() as closing:
            for relay in (self.err, self.out):  # in reverse order
                closing.enter_context(contextlib.suppress(BrokenPipeError))
                closing.callback(relay.finish)


def follows(lines: str) -> bool:
    """Return whether a rank's last lines on stderr show a `GroupError`.

    Such an error is a consequence of another rank's failure.
    """
    return _FOLLOWED.search(lines) is not None
