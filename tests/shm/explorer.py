"""Explorer of every schedule of the kernels of fastcoll/shm, which run as plain Python on a memory of words.

`load` executes the package's own source files with decorators that compile nothing and with instructions that access
the memory of a `Machine`. So a change of a protocol changes what is explored. A `plant` replaces some text of a file,
for tests which show that the explorer finds a wrong protocol.

An `Explorer` visits every state of a few threads (ranks, or threads of a rank) that share memory. Addresses from SHARED
on are shared, those below are private to the thread. A state is the shared words and the position of each thread. The
explorer does not suspend a thread. It runs the thread again from the beginning of its entry with the values that it
read before, until its next step. The steps are release stores, compare-and-swaps, acquire loads, and runs of plain
reads. A switch to another thread may occur between any two steps.

Plain accesses are checked for races. A word that a thread has stored plainly is TORN until that thread's next release
store or swap, because no other thread may read it before. A plain read of a TORN word is an error. So is a plain store
over another thread's unreleased store, unless both store the same value. Without such races, more switches between
plain accesses would find nothing more.

Other threads can only make the end of a wait possible, because the words for which kernels wait only grow. So a wait
ends as soon as it can. With `again` a wait that cannot end yet may also return in vain. A polling kernel rests until a
word that it has read changes, and then returns in vain.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Hashable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import fastcoll
from fastcoll.core import signature

SHARED = 1 << 40
TORN = "a word that is being written"
READ, LOAD, STORE, SWAP, AWAIT, REST, END = "read", "load", "store", "swap", "await", "rest", "end"

_FILES = (
    "kernels.primitives kernels.copy kernels.waiting kernels.pyobjects shm.layout shm.autotune shm.context_layout "
    "shm.rounds shm.validate shm.single_copy shm.movement shm.reductions shm.rings shm.ring_kernels "
    "shm.requests"
).split()

FOUND = "gave|is read while|store plainly|deadlock|has ended with|is seen as"
"""Matches the errors of a wrong protocol, but not those of a wrong plant."""


class _Stop(BaseException):
    """A thread has reached a step."""


class _Full(BaseException):
    """A program uses more shared words than a state has room for."""


class Machine:
    """The memory as seen by one thread, which is replayed with the values that it read before, up to its next step."""

    def run(self, call: Callable[[], Any], node: Node, value: Any, look: Callable[[int], Any]) -> Any:
        """Run a thread again from the beginning of its entry; return the entry's result, or None at the next step.

        Args:
            node, value: the thread's last position, and the value that its step there has read.
            look: reads a shared word now, for reads that belong to the same step.
        """
        self.private, self.pending = dict(node.root.private), dict(node.root.pending)
        self.log = node.log if node.kind == "" else (*node.log, value)
        self.polled: dict[int, Any] = {}
        self.trail: list[tuple[int, Any]] = []
        self._place, self._look = 0, look if node.kind in (READ, LOAD) else None
        try:
            return call()
        except _Stop as stop:
            self.stop = stop.args
            return None

    def _step(self, kind: str, address: int, value: Any = 0) -> Any:
        if self._place == len(self.log):
            if kind != READ or self._look is None:
                raise _Stop(kind, address, value)
            found = self._look(address)
            self.trail.append((address, found))
            self.log = (*self.log, found)
        self._place += 1
        return self.log[self._place - 1]

    def load(self, address: int) -> Any:
        if address < SHARED:
            return self.private.get(address, 0)
        return self.pending[address] if address in self.pending else self._step(READ, address)

    def store(self, address: int, value: Any) -> None:
        (self.private if address < SHARED else self.pending)[address] = value

    def load_acquire(self, address: int) -> Any:
        if address < SHARED:
            return self.private.get(address, 0)
        if address in self.pending:
            return self.pending[address]
        found = self._step(LOAD, address)
        self.polled.setdefault(address, found)
        return found

    def store_release(self, address: int, value: Any) -> None:
        if address < SHARED:
            self.private[address] = value
        else:
            self._step(STORE, address, value)
            self.pending.clear()

    def swap_if_equal(self, address: int, expected: Any, value: Any) -> bool:
        if address < SHARED:
            found = self.private.get(address, 0) == expected
            if found:
                self.private[address] = value
            return found
        found = self._step(SWAP, address, (expected, value))
        self.pending.clear()
        return bool(found)

    def wait_for(self, backoff: int, address: int, want: int) -> bool:
        if address < SHARED:
            return bool(self.private.get(address, 0) >= want)
        return bool(self._step(AWAIT, address, want))

    def rest(self, table: int, turn: int) -> bool:
        """Rest until a word that the thread has read changes, then return to Python."""
        self._step(REST, 0, tuple(self.polled.items()))
        return False

    def copy(self, dst: int, src: int, nbytes: int) -> int:
        for place in range(0, nbytes, 8):
            self.store(dst + place, self.load(src + place))
        return nbytes

    def read_peer(self, pid: int, to: int, _one: int, source: int, *_: int) -> int:
        """Replace process_vm_readv; addresses are the same in all processes here."""
        return self.copy(self.load(to), self.load(source), self.load(to + 8))

    def reduce(self, function: int, code: int, dst: int, sources: int, n: int, count: int) -> None:
        """Replace a reducer: add the elements, which are words."""
        for place in range(count):
            parts = [self.load(self.load(sources + 8 * k) + 8 * place) for k in range(n)]
            self.store(dst + 8 * place, sum(parts))

    def load_words(self, address: int, count: int) -> list[Any]:
        return [self.load(address + 8 * k) for k in range(count)]

    def store_words(self, address: int, values: Iterable[Any]) -> None:
        for k, value in enumerate(values):
            self.store(address + 8 * k, value)


# ---- the source files ---------------------------------------------------------------------------------------


@functools.cache
def _compiled(file: str, change: str) -> CodeType:
    path = Path(fastcoll.__file__).parent / (file.replace(".", "/") + ".py")
    text = path.read_text()
    if change:
        old, new = change.split(" => ")
        assert text.count(old) == 1, f"{file}.py has {text.count(old)} times: {old}"
        text = text.replace(old, new)
    return compile(text, path, "exec")


def load(plant: str = "", **constants: Mapping[str, Any]) -> tuple[Machine, SimpleNamespace]:
    """Execute the source files of the kernels; return the memory that they access, and the modules by name.

    Args:
        plant: a fault such as "shm.rounds: this => that"; it replaces text that occurs once in the file.
        constants: by module, such as `layout`: other values of names that later files import.
    """
    planted, _, change = plant.partition(": ")
    machine = Machine()

    def nothing(*_: Any) -> int:
        return 0

    primitives: dict[str, Any] = {
        "word_at": machine.load, "load_word": lambda base, k: machine.load(base + 8 * k),
        "_store": machine.store, "store_word": lambda base, k, value: machine.store(base + 8 * k, value),
        "load_acquire": machine.load_acquire, "store_release": machine.store_release,
        "swap_if_equal": machine.swap_if_equal, "call_reducer": machine.reduce, "weigh": signature.weigh,
        "memcpy": machine.copy, "memmove": machine.copy, "process_vm_readv": machine.read_peer,
        "wait_for": machine.wait_for, "rest": machine.rest, "now": lambda backoff: 1,
        "pthread_self": lambda: 1, "integer": lambda x: x, "object_at": lambda x: x,
        "take_gil": lambda thread, result: result,
    }  # fmt: skip

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        return primitives.get(function.__name__, function)

    jit = ModuleType("fastcoll.compiler.jit")
    jit.__dict__.update(vars(importlib.import_module(jit.__name__)))
    jit.__dict__.update(dict.fromkeys(("inlined", "kernel", "entry", "locked_entry"), declare))
    jit.instruction = lambda *kinds: lambda emit: primitives.get(emit.__name__, nothing)  # type: ignore[attr-defined]
    jit.external = lambda name, signature: primitives.get(name, nothing)  # type: ignore[attr-defined]
    failing = ModuleType("fastcoll.kernels.failing")
    failing.failing = lambda function: nothing  # type: ignore[attr-defined]
    failing.reached = failing.reached_by = nothing  # type: ignore[attr-defined]

    modules = {"compiler.jit": jit, "kernels.failing": failing}
    with ExitStack() as stack:

        def put(name: str, module: ModuleType) -> None:
            room, _, last = name.rpartition(".")
            stack.enter_context(patch.dict(sys.modules, {f"fastcoll.{name}": module}))
            stack.enter_context(patch.object(importlib.import_module(f"fastcoll.{room}"), last, module))

        for name in _FILES:
            importlib.import_module(f"fastcoll.{name}")
        for name, module in modules.items():
            put(name, module)
        for name in _FILES:
            module = ModuleType(f"fastcoll.{name}")
            module.__package__ = module.__name__.rpartition(".")[0]
            put(name, module)
            exec(_compiled(name, change if name == planted else ""), module.__dict__)
            modules[name] = module
            module.__dict__.update(constants.get(name.rpartition(".")[2], {}))
            if name == "kernels.primitives":  # Python's integers do not overflow
                module.__dict__["np"] = SimpleNamespace(int64=int)
    return machine, SimpleNamespace(**{name.rpartition(".")[2]: module for name, module in modules.items()})


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


State = tuple[tuple[Node, ...], tuple[Any, ...]]


class Explorer:
    """The states of a program of some threads.

    Args:
        program: has the `machine` and two functions, and may have `shared`, a dict of addresses and values: the shared
            words that do not begin at 0. `begin(thread)` returns a thread's first position and private
            words. `go_on(thread, at)` calls the thread's next entry and returns its next position, or None if the
            thread has ended. The thread's whole state is its words and its position.
        again: whether waits may return in vain.
    """

    def __init__(self, program: Any, threads: int, again: bool = False) -> None:
        self.program, self.threads, self.again = program, threads, again
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
        for node in nodes:
            self._mark(node, (), words)
        start = self._settle(nodes, words)
        known: dict[State, tuple[State, int] | None] = {start: None}
        todo = [start]
        while todo:
            state = todo.pop()
            try:
                stuck = True
                for thread, node in enumerate(state[0]):
                    if node.kind in (READ, LOAD, STORE, SWAP) or (self.again and node.kind == AWAIT):
                        after = self._after(state, thread)
                        stuck &= after == state
                        if after not in known:
                            known[after] = state, thread
                            todo.append(after)
                assert not stuck or all(node.kind == END for node in state[0]), "deadlock"
            except AssertionError as error:
                raise AssertionError(f"{error}\n{self._story(known, state)}") from error
            assert len(known) < most, "too many states"
        return len(known)

    def _story(self, known: Mapping[State, tuple[State, int] | None], state: State) -> str:
        """Describe the steps to a state and the next step of each thread."""
        steps = [f"{thread} is at {_shown(node)}" for thread, node in enumerate(state[0])]
        while (before := known[state]) is not None:
            state, thread = before
            steps.append(f"{thread}: {_shown(state[0][thread])}")
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
        nodes, words = list(state[0]), list(state[1])
        node = nodes[thread]
        kind, value = node.kind, 0
        if kind in (STORE, SWAP):
            for address, stored in node.pending:
                place = self._at(address)
                assert words[place] in (TORN, stored), f"two store plainly to {address - SHARED:#x} at a time"
                words[place] = stored
        if kind in (READ, LOAD):
            value = self._look(words, node.address)
        elif kind == STORE:
            words[self._at(node.address)] = node.value
        elif kind == SWAP:
            value = words[self._at(node.address)] == node.value[0]
            if value:
                words[self._at(node.address)] = node.value[1]
        node = self._follow(node, value, words)
        if kind in (READ, LOAD):
            while node.kind == READ:
                node = self._follow(node, self._look(words, node.address), words)
        nodes[thread] = node
        self._mark(node, () if kind in (STORE, SWAP) else state[0][thread].pending, words)
        return self._settle(nodes, words)

    def _mark(self, node: Node, before: tuple[tuple[int, Any], ...], words: list[Any]) -> None:
        """Mark the words that a thread has stored plainly since its last release as TORN."""
        for address, value in node.pending:
            place = self._at(address)
            if words[place] != value and (address, value) not in before:
                words[place] = TORN

    def _look(self, words: list[Any], address: int) -> Any:
        found = words[self._at(address)]
        assert found is not TORN, f"word {address - SHARED:#x} is read while it may be written"
        return found

    def _settle(self, nodes: list[Node], words: list[Any]) -> State:
        """Take all steps that are waits and can end."""
        moved = True
        while moved:
            moved = False
            for thread, node in enumerate(nodes):
                if node.kind == AWAIT and words[self._at(node.address)] >= node.value:
                    nodes[thread] = self._follow(node, True, words)
                elif node.kind == REST and any(words[self._at(each)] != seen for each, seen in node.value):
                    nodes[thread] = self._follow(node, False, words)
                if nodes[thread] is not node:
                    self._mark(nodes[thread], node.pending, words)
                    moved = True
        return tuple(nodes), tuple(words)

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
        call, look = self.program.go_on, functools.partial(self._look, words)
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


def _frozen(at: Hashable, private: Mapping[int, Any]) -> tuple[Hashable, tuple[tuple[int, Any], ...]]:
    return at, tuple(sorted((address, value) for address, value in private.items() if value != 0))


def _shown(node: Node) -> str:
    where = f" {node.address - SHARED:#x}" if node.address else ""
    return f"{node.root.at}: {node.kind}{where} {node.value or ''}"
