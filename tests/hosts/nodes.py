"""Run a program on every host of a network, with a launcher on each node, as users do."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

import programs

from hosts.network import Host, Network

SECRET = {"FASTCOLL_SECRET": "of this test"}
LIMIT = 300.0  # a limit that only ends a test that hangs, in seconds


class Node:
    """The launcher of one node, running or ended. Its output goes to memory, so it need not be read meanwhile."""

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
        """The output so far."""
        return _text(self._out)

    @property
    def err(self) -> str:
        """The text on stderr so far."""
        return _text(self._err)

    def wait_for_code(self, deadline: float | None = None) -> int | None:
        """Wait until `deadline` (of time.monotonic), or for LIMIT, for its exit code; None: it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._started.process.wait(LIMIT if deadline is None else max(0.0, deadline - time.monotonic()))
        return self.code

    def end(self) -> None:
        """Kill it, which ends its ranks. Calling it twice is fine."""
        self._started.end()

    def close(self) -> None:
        """Kill it and discard its output."""
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
    """Start `program` with `ranks` ranks on every host; kill what still runs at the end.

    Args:
        program: the script with its arguments, or "-m" and a module with its.
        env: variables on top of this process's.
        options: further ones of the launcher.
        address: where rank 0 listens; the first host's IPv4 address when None.
        run_on: for each host, words before the launcher's command, for example `taskset`.
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


@contextmanager
def ranks_on(
    hosts: Sequence[Host], words: Sequence[str], variables: Callable[[int], Mapping[str, str]] | None = None
) -> Iterator[list[Node]]:
    """Start Python with `words` as a rank on each of `hosts`, in which a host may occur repeatedly; as `launched`.

    Args:
        variables: returns the environment variables of a rank; None: those that users set by hand.
    """

    def by_hand(rank: int) -> Mapping[str, str]:
        place = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500"}
        return {"RANK": str(rank), "WORLD_SIZE": str(len(hosts)), **place, **SECRET}

    with ExitStack() as stack:
        nodes = []
        for rank, host in enumerate(hosts):
            env = {**os.environ, **(variables or by_hand)(rank)}
            nodes.append(Node(host, [sys.executable, *words], env))
            stack.callback(nodes[-1].close)
        yield nodes


def finish(nodes: Sequence[Node], seconds: float = LIMIT) -> None:
    """Wait for launchers to end by themselves; AssertionError, with what all have written: one has not in time."""
    deadline = time.monotonic() + seconds
    late = [node.host.name for node in nodes if node.wait_for_code(deadline) is None]
    assert not late, f"still running after {seconds:g} s: {', '.join(late)}\n{output_of(nodes)}"


def await_line(node: Node, line: str, nodes: Sequence[Node]) -> None:
    """Wait until a node has printed a line; AssertionError, with what all have written: it ended first."""
    until(lambda: line in node.out or node.code is not None, nodes)
    assert line in node.out, f"{node.host.name} ended without {line!r}\n{output_of(nodes)}"


def until(is_so: Callable[[], object], nodes: Sequence[Node]) -> None:
    """Wait for a condition that programs fulfil; AssertionError, with what all have written: not in time."""
    programs.until(is_so, lambda: output_of(nodes), LIMIT)


def output_of(nodes: Sequence[Node]) -> str:
    """Return the output of all nodes, for messages."""
    return "\n".join(f"-- {node.host.name}: {node.code}\n{node.out}{node.err}" for node in nodes)


def _text(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")
