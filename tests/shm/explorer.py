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
ends as soon as it can. A step that no other thread can notice or change is also taken at once (a persistent set of one
step): a load of a word that no other thread ever stores and, without store buffers, a store or swap of words that no
other thread ever accesses. Which threads access a word is learnt on the way: as soon as a thread accesses a word that
was taken for another thread's own, the search begins again. With `again` a wait that cannot end yet may also return in
vain. A polling kernel rests until a word that it has read changes, and then returns in vain.
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
_ROUNDS = 1000  # of steps that concern no other thread; a thread that takes so many may poll for ever


class _Full(BaseException):
    """A program uses more shared words than a state has room for."""


class _Shared(BaseException):
    """A thread accesses a word that was taken for another thread's own."""


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
Step = tuple[int, "Node | Buffered"]  # a thread, and what it does or which of its stores leaves the buffer


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
        # Sets of threads, as bits, by address: those that access and store the word; those that took it for their own.
        self._users: dict[int, int] = {}
        self._writers: dict[int, int] = {}
        self._trusting: dict[int, int] = {}
        self._owning: dict[int, int] = {}

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
            except _Shared:
                self._trusting, self._owning = {}, {}

    def _explore(self, most: int) -> int:
        words: list[Any] = [0] * self._room
        for address, value in getattr(self.program, "shared", {}).items():
            words[self._at(address)] = value
        nodes = [self._enter(Root(k, *_frozen(*self.program.begin(k)))) for k in range(self.threads)]
        buffers: list[Buffer] = [()] * self.threads
        for thread, node in enumerate(nodes):
            self._mark(thread, node, (), words, buffers)
        start = self._settle(nodes, words, buffers)
        known: dict[State, tuple[State, Step] | None] = {start: None}
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

    def _successors(self, state: State) -> Iterator[tuple[Step, State]]:
        """Yield the steps that are possible, each with the state after it."""
        nodes, words, buffers = state
        for thread, node in enumerate(nodes):
            if node.kind in (READ, LOAD, STORE, SWAP) or (self.again and node.kind == AWAIT):
                yield (thread, node), self._after(state, thread)
        for thread, buffer in enumerate(buffers if self.weak else ()):
            wanted = {each for other, node in enumerate(nodes) if other != thread for each in _accessed(node)}
            seen = set()
            for place, item in enumerate(buffer):
                if item.address in wanted - seen:
                    left, after = list(buffers), list(words)
                    self._drain(after, left, thread, place)
                    yield (thread, item), self._settle(list(nodes), after, left)
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

    def _story(self, known: Mapping[State, tuple[State, Step] | None], state: State) -> str:
        """Describe the steps to a state and the next step of each thread."""
        steps = [f"{thread} is at {_shown(node)}" for thread, node in enumerate(state[0])]
        while (before := known[state]) is not None:
            state, (thread, what) = before
            steps.append(f"{thread}: {_shown(what)}")
        return "\n".join(reversed(steps))

    def _at(self, address: int) -> int:
        """Describe the address of a shared word."""
        place = self._index.get(address)
        if place is None:
            assert address % 8 == 0
            place = self._index[address] = len(self._index)
        if place >= self._room:
            raise _Full
        return place

    def _after(self, state: State, thread: int) -> State:
        """Return the state after a thread's step."""
        nodes, words, buffers = list(state[0]), list(state[1]), list(state[2])
        self._step(thread, nodes, words, buffers)
        return self._settle(nodes, words, buffers)

    def _step(self, thread: int, nodes: list[Node], words: list[Any], buffers: list[Buffer]) -> None:
        before = node = nodes[thread]
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
                item.address for other, buffer in enumerate(buffers) if other != thread for item in buffer
            }
            while node.kind == READ and node.address not in others:
                node = self._follow(node, self._seen(words, buffers[thread], node.address), words)
        nodes[thread] = node
        self._mark(thread, node, () if kind in (STORE, SWAP) else before.pending, words, buffers)

    def _is_own(self, thread: int, node: Node) -> bool:
        """Return whether no other thread can notice or change a thread's next step, as far as is known."""
        own, others = 1 << thread, ~(1 << thread)
        if node.kind in (READ, LOAD):
            if self._writers.get(node.address, 0) & others:
                return False
            self._trusting[node.address] = self._trusting.get(node.address, 0) | own
            return True
        if self.weak or node.kind not in (STORE, SWAP):
            return False
        addresses = [node.address, *(address for address, _ in node.pending)]
        if any(self._users.get(address, 0) & others for address in addresses):
            return False
        for address in addresses:
            self._owning[address] = own
        return True

    def _learn(self, thread: int, node: Node) -> None:
        """Note which words a thread accesses at a new position."""
        own, others = 1 << thread, ~(1 << thread)
        stored = [address for address, _ in node.pending]
        stored += [node.address] if node.kind in (STORE, SWAP) else []
        for address in (*stored, *_accessed(node)):
            self._users[address] = self._users.get(address, 0) | own
            if self._owning.get(address, 0) & others:
                raise _Shared
        for address in stored:
            self._writers[address] = self._writers.get(address, 0) | own
            if self._trusting.get(address, 0) & others:
                raise _Shared

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
        for item in reversed(own):
            if item.address == address:
                return item.value
        return self._look(words, address)

    def _look(self, words: list[Any], address: int) -> Any:
        found = words[self._at(address)]
        assert found is not TORN, f"word {address - SHARED:#x} is read while it may be written"
        return found

    def _settle(self, nodes: list[Node], words: list[Any], buffers: list[Buffer]) -> State:
        """Take all steps that are waits and can end, and those that concern no other thread."""
        moved, rounds = True, 0
        while moved and rounds < _ROUNDS:
            moved, rounds = False, rounds + 1
            for thread, node in enumerate(nodes):
                own = buffers[thread]
                if self._is_own(thread, node):
                    self._step(thread, nodes, words, buffers)
                    moved = True
                    continue
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
                self._learn(root.thread, self._roots[root])
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
            self._learn(root.thread, inner)
            node, value, log = inner, found, (*log, found)
        if at is None:
            after = Node(root, log, *machine.stop)
            after.pending = tuple(machine.pending.items())
            self._learn(root.thread, after)
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


def _shown(node: Node | Buffered) -> str:
    if isinstance(node, Buffered):
        return f"{node.value} reaches {node.address - SHARED:#x}"
    where = f" {node.address - SHARED:#x}" if node.address else ""
    return f"{node.root.at}: {node.kind}{where} {node.value or ''}"
