"""The kernels that share memory as plain Python on a memory of words, for explorer.py.

`load` executes the package's own source files with decorators that compile nothing and with instructions that access
the memory of a `Machine`. So a change of a protocol changes what is explored. A `plant` replaces some text of a file,
for tests which show that the explorer finds a wrong protocol.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import fastcoll
from fastcoll.core import signature

if TYPE_CHECKING:
    from shm.explorer import Node

SHARED = 1 << 40
FENCE = SHARED + (1 << 36)
"""A full fence is a swap of this word, which stays 0."""
WAKES = 1 << 35
"""The wake-ups of a shared word are counted in another word, this much behind it."""
READ, LOAD, STORE, SWAP, AWAIT, REST, END = "read", "load", "store", "swap", "await", "rest", "end"

_FILES = (
    "kernels.primitives kernels.futex kernels.copy kernels.waiting kernels.lines kernels.pyobjects shm.layout "
    "shm.autotune shm.context_layout shm.rounds shm.validate shm.single_copy shm.movement shm.reductions shm.rings "
    "shm.ring_kernels shm.requests shm.slot_memory"
).split()

FOUND = "gave|is read while|store plainly|deadlock|has ended with|is seen as|is not allocated"
"""Matches the errors of a wrong protocol, but not those of a wrong plant."""


class _Stop(BaseException):
    """A thread has reached a step."""


class Machine:
    """The memory as seen by one thread, which is replayed with the values that it read before, up to its next step.

    Attributes:
        check: a function that is called with the address of each shared word before its first access in a step.
    """

    def __init__(self) -> None:
        self.check: Callable[[int], None] = lambda address: None

    def run(self, call: Callable[[], Any], node: Node, value: Any, look: Callable[[int], Any] | None) -> Any:
        """Run a thread again from the beginning of its entry; return the entry's result, or None at the next step.

        Args:
            node, value: the thread's last position, and the value that its step there has read.
            look: reads a shared word now, for reads that belong to the same step; None: each read is a step.
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
            for each in (address, *self.pending):
                self.check(each)
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

    def full_fence(self) -> None:
        self._step(SWAP, FENCE, (0, 0))
        self.pending.clear()

    def wait_for(self, backoff: int, address: int, want: int, event: int = 0) -> bool:
        if address < SHARED:
            return bool(self.private.get(address, 0) >= want)
        if event:
            self.wait_until_woken(address, want, event)
        return bool(self._step(AWAIT, address, want))

    def wait_until_woken(self, address: int, want: int, event: int) -> None:
        """Wait for a word, looking at it only after each `wake` of an event."""
        wakes = self.load_acquire(event)
        while self.load_acquire(address) < want:
            self._step(AWAIT, event, wakes + 1)
            wakes = self.load_acquire(event)

    def wake(self, event: int) -> None:
        """Replace `wake` of futex.py: count the wake-ups in the event."""
        while not self.swap_if_equal(event, wakes := self.load_acquire(event), wakes + 1):
            pass

    def sleep_on(self, word: int, seen: int, timeout: int) -> None:
        """Sleep until the next `wake_all` of a word, however long it takes."""
        wakes = self.load_acquire(word + WAKES)
        if self.load_acquire(word) == seen:
            self._step(AWAIT, word + WAKES, wakes + 1)

    def wake_all(self, word: int) -> None:
        self.wake(word + WAKES)

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
        "load_acquire": machine.load_acquire, "load_after_swap": machine.load_acquire,
        "store_release": machine.store_release, "full_fence": machine.full_fence,
        "swap_if_equal": machine.swap_if_equal, "call_reducer": machine.reduce, "weigh": signature.weigh,
        "memcpy": machine.copy, "memmove": machine.copy, "process_vm_readv": machine.read_peer,
        "wait_for": machine.wait_for, "sleep_on": machine.sleep_on, "wake_all": machine.wake_all,
        "rest": machine.rest, "now": lambda backoff: 1,
        "pthread_self": lambda: 1, "integer": lambda x: x, "object_at": lambda x: x,
        "take_gil": lambda thread, result: result,
    }  # fmt: skip

    def declare(function: Callable[..., Any]) -> Callable[..., Any]:
        function.twin = lambda signature: declare  # type: ignore[attr-defined]
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
