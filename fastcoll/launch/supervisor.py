"""Starts a job's ranks, passes their output on, names the one at fault, and sees to it that all of them end.

One thread, one selector: pipes to relay and pidfds to notice deaths by. Every rank leads a session of
its own. What outlives its rank is adopted and killed at the end, so nothing is left of the job.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from . import lifeline
from .job import Job
from .nodes import Failure, Nodes

CAUSE_SECONDS = 1.0
"""For the rank at fault to end too, after one that failed because of it: it lets go of its groups on its way out, which
makes the others fail, and they may be gone before it is."""

_FOLLOWED = re.compile(
    r"^fastcoll\.errors\.(?:GroupError|PeerDiedError|CollectiveTimeoutError|AbortedError)\b", re.MULTILINE
)

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TICK = 0.1  # seconds until a signal to the launcher is acted on
_LEFTOVER_SECONDS = 1.0  # for what outlives its rank to end by itself, such as multiprocessing's tracker
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|[\r\n])")  # progress bars end theirs with a carriage return
_READ_BYTES = 64 << 10
_LONGEST_LINE = 1 << 20  # a longer one is cut, so that output without line ends takes no more memory
_REMEMBERED = 40  # lines

Sink = Callable[[bytes], None]
"""What takes the lines of one write; may raise BrokenPipeError when nobody reads them."""


class Relay:
    """Passes one stream of one rank on line by line, each with the rank in front, so that ranks never share a line.

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


class RankProcess:
    """One rank: its process and its two streams."""

    def __init__(
        self, job: Job, local_rank: int, prefix: bool, logs: Path | None, sinks: tuple[Sink, Sink]
    ) -> None:
        self.rank = job.rank(local_rank)
        tether = [sys.executable, "-I", "-S", lifeline.__file__, str(os.getpid())]
        out, out_end = os.pipe()
        err, err_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*tether, *job.command(local_rank)],
                stdin=None if local_rank == 0 else subprocess.DEVNULL,
                stdout=out_end,
                stderr=err_end,
                env=job.environment(local_rank, os.environ),
                pass_fds=job.descriptors,
                start_new_session=True,
            )
        finally:
            os.close(out_end)
            os.close(err_end)
        mark = f"[{self.rank}] ".encode() if prefix else b""
        self.out = Relay(out, sinks[0], mark, _log_file(logs, f"rank-{self.rank}.stdout"))
        self.err = Relay(err, sinks[1], mark, _log_file(logs, f"rank-{self.rank}.stderr"))
        self.pidfd = os.pidfd_open(self.process.pid)

    def signal(self, number: int) -> None:
        """Send a signal to the rank and what it has started."""
        lifeline.signal_group(self.process.pid, number)

    def describe(self) -> str:
        """Which rank it is, and where."""
        return f"rank {self.rank} (pid {self.process.pid} on {os.uname().nodename})"


class Supervisor:
    """Runs one node's ranks to their end.

    Args:
        job: what to start.
        grace: seconds between asking ranks to end and killing them.
        prefix: whether lines of output get their rank in front.
        logs: a directory for one file per rank and stream, or None.
        nodes: the launchers of the other nodes, or None.
        sinks: take what ranks write to stdout and stderr; None: this process's descriptors do.
    """

    def __init__(
        self,
        job: Job,
        grace: float,
        prefix: bool = True,
        logs: Path | None = None,
        nodes: Nodes | None = None,
        sinks: tuple[Sink, Sink] | None = None,
    ) -> None:
        self._sinks = sinks or (
            partial(write_all, sys.stdout.fileno()),
            partial(write_all, sys.stderr.fileno()),
        )
        self._job, self._grace, self._prefix, self._logs, self._nodes = job, grace, prefix, logs, nodes
        self._ranks: list[RankProcess] = []
        self._running: set[RankProcess] = set()
        self._not_ours = set(lifeline.children_of(os.getpid()))
        self._selector = selectors.DefaultSelector()
        self._signals: list[int] = []  # received and not yet acted on
        self._exit_code = 0
        self._failed: RankProcess | None = None  # the one to name as the first, at _name_at at the latest
        self._name_at = 0.0
        self._kill_at: float | None = None  # when the grace ends; None: nobody was asked to end
        self._hurries = False  # whether a signal to this launcher, while ranks are ending, ends the grace

    def run(self) -> int:
        """Start the ranks and return when all are gone.

        Returns:
            0, the exit code of the first rank that failed on any node (128+n for signal n), or 128+n
            when signal n ended the launcher.
        """
        with self._handle_signals():
            try:
                for local_rank in range(self._job.local_size):
                    self._start(local_rank)
                self._watch()
            except BrokenPipeError:  # nobody reads our output any more
                self._exit_code = 128 + signal.SIGPIPE
            finally:
                self._end()
        return self._exit_code

    def _start(self, local_rank: int) -> None:
        rank = RankProcess(self._job, local_rank, self._prefix, self._logs, self._sinks)
        self._ranks.append(rank)
        self._running.add(rank)
        self._selector.register(rank.pidfd, selectors.EVENT_READ, lambda: self._reap(rank))
        for relay in (rank.out, rank.err):
            self._selector.register(relay.source, selectors.EVENT_READ, self._pumping(relay))

    def _pumping(self, relay: Relay) -> Callable[[], None]:
        def pump() -> None:
            if not relay.pump():
                self._selector.unregister(relay.source)

        return pump

    def _watch(self) -> None:
        while self._running or self._failed:
            for key, _ in self._selector.select(_TICK):
                key.data()
            if self._nodes and self._kill_at is None and (elsewhere := self._nodes.failure()):
                self._end_because_of(elsewhere)
            if self._failed and self._is_time_to_name():
                self._name(self._failed)
            while self._signals:
                self._pass_on(self._signals.pop(0))
            if self._kill_at is not None and time.monotonic() >= self._kill_at:
                self._signal_running(signal.SIGKILL)
                self._kill_at = float("inf")

    def _reap(self, rank: RankProcess) -> None:
        code = rank.process.wait()
        self._selector.unregister(rank.pidfd)
        self._running.discard(rank)
        if code == 0 or self._kill_at is not None:
            return
        rank.err.pump_all()
        at_fault = not self._follows(rank)
        if self._failed is None or (at_fault and self._follows(self._failed)):
            self._failed = rank
            self._name_at = time.monotonic() + (0 if at_fault else CAUSE_SECONDS)

    def _follows(self, rank: RankProcess) -> bool:
        """Whether a rank that has failed did so because of another one."""
        return follows(rank.err.last_lines())

    def _is_time_to_name(self) -> bool:
        nobody_else = not self._running and self._nodes is None
        return bool(self._signals) or nobody_else or time.monotonic() >= self._name_at

    def _name(self, rank: RankProcess) -> None:
        """Tell how a rank failed, and end the others."""
        code = rank.process.returncode
        self._exit_code = code if code > 0 else 128 - code
        said = f"{rank.describe()} failed first: {lifeline.describe_exit(code)}"
        if self._nodes is not None:
            self._nodes.tell(Failure(self._exit_code, said))
        self._say(said, rank.err.last_lines())
        self._failed = None
        self._hurries = True
        self._ask_to_end(signal.SIGTERM)

    def _end_because_of(self, failure: Failure) -> None:
        """End this node's ranks, as one of another node has failed."""
        self._exit_code, self._failed = failure.code, None
        self._tell(f"on another node {failure.text}\n")
        self._ask_to_end(signal.SIGTERM)

    def _pass_on(self, number: int) -> None:
        if self._hurries:  # the second request
            self._kill_at = 0.0
            return
        # The first one may come after another launcher's, as all get a signal at about the same time.
        self._hurries = True
        self._exit_code = 128 + number
        if self._nodes is not None:
            said = f"the launcher on host {os.uname().nodename} was ended: {lifeline.describe_exit(-number)}"
            self._nodes.tell(Failure(self._exit_code, said))
        self._ask_to_end(number)

    def _ask_to_end(self, number: int) -> None:
        self._kill_at = time.monotonic() + self._grace
        self._signal_running(number)

    def _signal_running(self, number: int) -> None:
        for rank in self._running:
            rank.signal(number)

    def _end(self) -> None:
        self._signal_running(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.wait()
            os.close(rank.pidfd)
        self._end_leftovers()
        self._selector.close()
        for rank in self._ranks:
            for relay in (rank.out, rank.err):
                with contextlib.suppress(BrokenPipeError):
                    relay.finish()

    def _end_leftovers(self) -> None:
        """End every process that this one has adopted."""
        start = time.monotonic()
        while children := set(lifeline.children_of(os.getpid())) - self._not_ours:
            waited = time.monotonic() - start
            for pid in children:
                if waited >= _LEFTOVER_SECONDS:
                    os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
            if waited >= 2 * _LEFTOVER_SECONDS:
                sys.stderr.write(
                    f"fastcoll.launch: SIGKILL has not ended {sorted(children)}, look at them with ps\n"
                )
                return
            time.sleep(0.01)

    def _say(self, message: str, quoted: str) -> None:
        lines = "".join(f"    {line}\n" for line in quoted.splitlines())
        told = "; its last lines on stderr:" if quoted else "; it wrote nothing on stderr"
        self._tell(f"{message}{told}\n{lines}")

    def _tell(self, text: str) -> None:
        write_all(sys.stderr.fileno(), f"fastcoll.launch: {text}".encode(errors="replace"))

    @contextlib.contextmanager
    def _handle_signals(self) -> Iterator[None]:
        before = {number: signal.getsignal(number) for number in HANDLED}
        try:
            for number in HANDLED:
                if before[number] != signal.SIG_IGN:  # as under nohup
                    signal.signal(number, lambda received, _: self._signals.append(received))
            yield
        finally:
            for number in HANDLED:
                signal.signal(number, before[number])


def _log_file(folder: Path | None, name: str) -> BinaryIO | None:
    return None if folder is None else (folder / name).open("wb")


def follows(lines: str) -> bool:
    """Whether a rank that ended with these lines on stderr shows the failure of a group (`GroupError`)."""
    return _FOLLOWED.search(lines) is not None


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
