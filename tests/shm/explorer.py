"""Explorer of every schedule of the kernels of fastcoll/shm, which run as plain Python (machine.py).

An `Explorer` visits every state of a few threads (ranks, or threads of a rank) that share memory. Addresses from SHARED
on are shared, those below are private to the thread. A state is the shared words and the position of each thread. The
explorer does not suspend a thread. It runs the thread again from the beginning of its entry with the values that it
read before, until its next step. The steps are release stores, compare-and-swaps, acquire loads, and runs of plain
reads. A switch to another thread may occur between any two steps.

Plain accesses are checked for races. A word that a thread has stored plainly is TORN until that thread's next release
store or swap, because no other thread may read it before. A plain read of a TORN word is an error. So is a plain store
over another thread's unreleased store, unless both store the same value. Without such races, more switches between
plain accesses would find nothing more.

A `weak` explorer has a store buffer for each thread, as on Arm. Stores enter the buffer; a store leaves it when another
thread wants to access its word, or later. A release store leaves it after all earlier stores of the thread, a plain
store at any time: before earlier stores of other words, also before earlier release stores. So loads may run before
earlier stores. A swap empties the buffer. Nothing is TORN: a wrong order shows as a wrong value.

Other threads can only make the end of a wait possible, because the words for which kernels wait only grow. So a wait
ends as soon as it can. With `again` a wait that cannot end yet may also return in vain. A polling kernel rests until a
word that it has read changes, and then returns in vain.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator, Mapping
from itertools import permutations
from typing import Any, NamedTuple

from shm.machine import AWAIT, END, FOUND, LOAD, READ, REST, SHARED, STORE, SWAP, Machine, load

__all__ = ["FOUND", "SHARED", "Explorer", "Machine", "load"]

TORN = "a word that is being written"
PLAIN, ALL = 1, 2


class _Full(BaseException):
    """A program uses more shared words than a state has room for."""


# ---- the schedules ------------------------------------------------------------------------------------------


class Root(NamedTuple):
    """A thread that is about to call an entry."""

    thread: int
    at: Hashable
    private: tuple[tuple[int, Any], ...]
    pending: tuple[tuple[int, Any], ...] = ()


class Node:
    """A thread before a step inside an entry."""

    __slots__ = ("address", "children", "kind", "log", "pending", "root", "value")

    def __init__(self, root: Root, log: tuple[Any, ...], kind: str, address: int, value: Any) -> None:
        self.root, self.log, self.kind, self.address, self.value = root, log, kind, address, value
        self.pending: tuple[tuple[int, Any], ...] = ()
        self.children: dict[Any, Node] = {}


class Buffered(NamedTuple):
    """A store in a thread's store buffer."""

    address: int
    value: Any
    is_release: bool


Buffer = tuple[Buffered, ...]
State = tuple[tuple[Node, ...], tuple[Any, ...], tuple[Buffer, ...]]


class Explorer:
    """The states of a program of some threads.

    Args:
        program: has the `machine` and two functions. `begin(thread)` returns a thread's first position and private
            words. `go_on(thread, at)` calls the thread's next entry and returns its next position, or None if the
            thread has ended. The thread's whole state is its words and its position. A program may have `shared`, a
            dict of addresses and values: the shared words that do not begin at 0. It may have `check_end(look)`, which
            is called when all threads have ended; `look(address)` reads a shared word.
        again: whether waits may return in vain.
        weak: PLAIN or ALL: the stores that enter a store buffer. With PLAIN, a release store empties it.
    """

    def __init__(self, program: Any, threads: int, again: bool = False, weak: int = 0) -> None:
        self.program, self.threads, self.again, self.weak = program, threads, again, weak
        self._index: dict[int, int] = {}
        self._room = (
            32  # shared words of a state; it takes twice as long to visit states of 512 words as of 128
        )
        self._roots: dict[Root, Node] = {}

    def explore(self, most: int = 1 << 20) -> int:
        """Visit every state; return the number of states.

        Raises:
            AssertionError: a wrong result, a race or a deadlock, with the steps that lead to it.
        """
        while True:
            try:
                return self._explore(most)
            except _Full:
                self._room *= 2

    def _explore(self, most: int) -> int:
        words: list[Any] = [0] * self._room
        for address, value in getattr(self.program, "shared", {}).items():
            words[self._at(address)] = value
        nodes = [self._enter(Root(k, *_frozen(*self.program.begin(k)))) for k in range(self.threads)]
        buffers: list[Buffer] = [()] * self.threads
        for thread, node in enumerate(nodes):
            self._mark(thread, node, (), words, buffers)
        start = self._settle(nodes, words, buffers)
        known: dict[State, tuple[State, str] | None] = {start: None}
        todo = [start]
        while todo:
            state = todo.pop()
            try:
                stuck = True
                for step, after in self._successors(state):
                    stuck &= after == state
                    if after not in known:
                        known[after] = state, step
                        todo.append(after)
                if stuck:
                    assert all(node.kind == END for node in state[0]), "deadlock"
                    self._check_end(state)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._story(known, state)}") from error
            assert len(known) < most, "too many states"
        return len(known)

    def _successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the steps that are possible, each with the state after it."""
        nodes, words, buffers = state
        for thread, node in enumerate(nodes):
            if node.kind in (READ, LOAD, STORE, SWAP) or (self.again and node.kind == AWAIT):
                yield f"{thread}: {_shown(node)}", self._after(state, thread)
        for thread, buffer in enumerate(buffers):
            wanted = {each for other, node in enumerate(nodes) if other != thread for each in _accessed(node)}
            seen = set()
            for place, item in enumerate(buffer):
                if item.address in wanted - seen:
                    left, after = list(buffers), list(words)
                    self._drain(after, left, thread, place)
                    what = f"{item.value} reaches {item.address - SHARED:#x}"
                    yield f"{thread}: {what}", self._settle(list(nodes), after, left)
                seen.add(item.address)

    def _drain(self, words: list[Any], buffers: list[Buffer], thread: int, place: int) -> None:
        """Let a store leave a thread's buffer, and before a release store all earlier ones."""
        buffer = buffers[thread]
        first = 0 if buffer[place].is_release else place
        for item in buffer[first : place + 1]:
            words[self._at(item.address)] = item.value
        buffers[thread] = buffer[:first] + buffer[place + 1 :]

    def _check_end(self, state: State) -> None:
        """Let the program check the words after all threads have ended, whichever buffer is emptied last."""
        if (check := getattr(self.program, "check_end", None)) is None:
            return
        for order in permutations(range(self.threads)):
            words = list(state[1])
            for thread in order:
                for item in state[2][thread]:
                    words[self._at(item.address)] = item.value
            check(functools.partial(self._look, words))

    def _story(self, known: Mapping[State, tuple[State, str] | None], state: State) -> str:
        """Describe the steps to a state and the next step of each thread."""
        steps = [f"{thread} is at {_shown(node)}" for thread, node in enumerate(state[0])]
        while (before := known[state]) is not None:
            state, step = before
            steps.append(step)
        return "\n".join(reversed(steps))

    def _at(self, address: int) -> int:
        """Describe the address of a shared word."""
        assert address % 8 == 0
        place = self._index.setdefault(address, len(self._index))
        if place >= self._room:
            raise _Full
        return place

    def _after(self, state: State, thread: int) -> State:
        """Return the state after a thread's step."""
        nodes, words, buffers = list(state[0]), list(state[1]), list(state[2])
        node = nodes[thread]
        kind, value = node.kind, 0
        if self.weak == ALL and kind == STORE:
            buffers[thread] += (Buffered(node.address, node.value, True),)
        elif self.weak and kind in (STORE, SWAP):
            for item in buffers[thread]:
                words[self._at(item.address)] = item.value
            buffers[thread] = ()
        elif kind in (STORE, SWAP):
            for address, stored in node.pending:
                place = self._at(address)
                assert words[place] in (TORN, stored), f"two store plainly to {address - SHARED:#x} at a time"
                words[place] = stored
        if kind in (READ, LOAD):
            value = self._seen(words, buffers[thread], node.address)
        elif kind == STORE and self.weak != ALL:
            words[self._at(node.address)] = node.value
        elif kind == SWAP:
            value = words[self._at(node.address)] == node.value[0]
            if value:
                words[self._at(node.address)] = node.value[1]
        node = self._follow(node, value, words)
        if kind in (READ, LOAD):
            others = {
                item.address for other in range(self.threads) if other != thread for item in buffers[other]
            }
            while node.kind == READ and node.address not in others:
                node = self._follow(node, self._seen(words, buffers[thread], node.address), words)
        nodes[thread] = node
        self._mark(thread, node, () if kind in (STORE, SWAP) else state[0][thread].pending, words, buffers)
        return self._settle(nodes, words, buffers)

    def _mark(
        self,
        thread: int,
        node: Node,
        before: tuple[tuple[int, Any], ...],
        words: list[Any],
        buffers: list[Buffer],
    ) -> None:
        """Mark the words that a thread has stored plainly since its last release as TORN, or buffer these stores."""
        for address, value in node.pending:
            if (address, value) in before:
                continue
            if self.weak:
                buffers[thread] += (Buffered(address, value, False),)
            elif words[self._at(address)] != value:
                words[self._at(address)] = TORN

    def _seen(self, words: list[Any], own: Buffer, address: int) -> Any:
        """Return the value that a thread with the buffer `own` sees."""
        latest = [item.value for item in own if item.address == address]
        return latest[-1] if latest else self._look(words, address)

    def _look(self, words: list[Any], address: int) -> Any:
        found = words[self._at(address)]
        assert found is not TORN, f"word {address - SHARED:#x} is read while it may be written"
        return found

    def _settle(self, nodes: list[Node], words: list[Any], buffers: list[Buffer]) -> State:
        """Take all steps that are waits and can end."""
        moved = True
        while moved:
            moved = False
            for thread, node in enumerate(nodes):
                own = buffers[thread]
                if node.kind == AWAIT and self._seen(words, own, node.address) >= node.value:
                    nodes[thread] = self._follow(node, True, words)
                elif node.kind == REST and any(
                    self._seen(words, own, each) != seen for each, seen in node.value
                ):
                    nodes[thread] = self._follow(node, False, words)
                if nodes[thread] is not node:
                    self._mark(thread, nodes[thread], node.pending, words, buffers)
                    moved = True
        return tuple(nodes), tuple(words), tuple(buffers)

    def _enter(self, root: Root) -> Node:
        """Return a thread's first step in its next entry."""
        if root not in self._roots:
            if root.at is None:
                self._roots[root] = Node(root, (), END, 0, 0)
                self._roots[root].pending = root.pending
            else:
                self._roots[root] = self._follow(Node(root, (), "", 0, 0), None, [])
        return self._roots[root]

    def _follow(self, node: Node, value: Any, words: list[Any]) -> Node:
        """Return a thread's position after a step that has read a value."""
        if value in node.children:
            return node.children[value]
        machine, root = self.program.machine, node.root
        call, look = self.program.go_on, None if self.weak else functools.partial(self._look, words)
        at = machine.run(lambda: (call(root.thread, root.at),), node, value, look)
        # The reads of the same step.
        log = node.log if node.kind == "" else (*node.log, value)
        for address, found in machine.trail:
            inner = node.children[value] = Node(root, log, READ, address, 0)
            node, value, log = inner, found, (*log, found)
        if at is None:
            after = Node(root, log, *machine.stop)
            after.pending = tuple(machine.pending.items())
        else:
            pending = tuple(machine.pending.items())
            after = self._enter(Root(root.thread, *_frozen(*at, machine.private), pending))
        node.children[value] = after
        return after


def _accessed(node: Node) -> list[int]:
    """Return the addresses of the words that a thread accesses in its next step, or for which it waits."""
    if node.kind == REST:
        return [address for address, _ in node.value]
    return [node.address] if node.kind in (READ, LOAD, SWAP, AWAIT) else []


def _frozen(at: Hashable, private: Mapping[int, Any]) -> tuple[Hashable, tuple[tuple[int, Any], ...]]:
    return at, tuple(sorted((address, value) for address, value in private.items() if value != 0))


def _shown(node: Node) -> str:
    where = f" {node.address - SHARED:#x}" if node.address else ""
    return f"{node.root.at}: {node.kind}{where} {node.value or ''}"
