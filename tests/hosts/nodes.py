"""Runs a program on every host of a network as a user does who starts the launcher on each node."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

from hosts.network import Host, Network

_LOOK_SECONDS = 0.05


class Node:
    """One node's launcher, under way or ended. Its output goes to memory, so nobody need read it meanwhile."""

    def __init__(self, host: Host, words: Sequence[str], env: Mapping[str, str]) -> None:
        self.host = host
        self._out, self._err = (os.memfd_create(name) for name in ("out", "err"))
        self._started = host.start(words, env, stdout=self._out, stderr=self._err)

    @property
    def code(self) -> int | None:
        """The launcher's exit code; None while it runs."""
        return self._started.process.poll()

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return _text(self._out)

    @property
    def err(self) -> str:
        """What it has written to stderr so far."""
        return _text(self._err)

    def wait(self, deadline: float) -> bool:
        """Whether it ends by itself before `deadline` (of time.monotonic)."""
        try:
            self._started.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_code(self, seconds: float = 60.0) -> int | None:
        """Its exit code; None when it still runs after so many seconds."""
        self.wait(time.monotonic() + seconds)
        return self.code

    def signal(self, number: int) -> None:
        """Send it a signal; its ranks, in sessions of their own, do not get it."""
        os.killpg(self._started.process.pid, number)

    def end(self) -> None:
        """Kill it, and with it its ranks. Twice is fine."""
        self._started.end()

    def close(self) -> None:
        """Kill it and forget what it has written."""
        self.end()
        os.close(self._out)
        os.close(self._err)


@contextmanager
def launched(
    network: Network,
    ranks: int,
    program: Sequence[str],
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    address: str | None = None,
    run_on: Sequence[Sequence[str]] | None = None,
) -> Iterator[list[Node]]:
    """Start `program` with so many ranks on every host; what still runs at the end is killed.

    Args:
        program: the script with its arguments, or "-m" and a module with its.
        env: variables on top of this process's.
        options: further ones of the launcher.
        address: where rank 0 listens; the first host's IPv4 address when None.
        run_on: for each host, the words before its launcher, such as `taskset`'s.
    """
    first = address or network.hosts[0].address
    common = [sys.executable, "-m", "fastcoll.launch", "--nnodes", str(len(network.hosts))]
    common += ["--master_addr", first, "-n", str(ranks), *options]
    with ExitStack() as stack:
        nodes: list[Node] = []
        for host in network:
            before = run_on[host.index] if run_on else ()
            words = [*before, *common, "--node_rank", str(host.index), *program]
            nodes.append(Node(host, words, {**os.environ, **(env or {})}))
            stack.callback(nodes[-1].close)
        yield nodes


def finish(nodes: Sequence[Node], seconds: float) -> None:
    """Wait for launchers to end by themselves.

    Raises:
        AssertionError: one has not after `seconds`; what all have written is shown.
    """
    deadline = time.monotonic() + seconds
    late = [node.host.name for node in nodes if not node.wait(deadline)]
    assert not late, f"still running after {seconds:g} s: {', '.join(late)}\n{told(nodes)}"


def await_line(node: Node, line: str, nodes: Sequence[Node], seconds: float = 40.0) -> None:
    """Wait until a node has printed a line.

    Raises:
        AssertionError: it ended first, or has not after `seconds`; what all have written is shown.
    """
    deadline = time.monotonic() + seconds
    while line not in node.out:
        assert node.code is None, f"{node.host.name} ended without {line!r}\n{told(nodes)}"
        assert time.monotonic() < deadline, (
            f"{node.host.name} has no {line!r} after {seconds:g} s\n{told(nodes)}"
        )
        time.sleep(_LOOK_SECONDS)


def told(nodes: Sequence[Node]) -> str:
    """What all have written, for messages."""
    return "\n".join(f"-- {node.host.name}: {node.code}\n{node.out}{node.err}" for node in nodes)


def _text(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
