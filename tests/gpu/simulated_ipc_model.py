"""A model of shared GPU memory: the ranks' queued work and synchronising kernels in every order of their steps.

`SharedRegions.run`, the schedules and the kernels are the real ones, on words in a dict. A copy or a reduction takes
two steps: it reads, then it writes. In between, its target contains TORN, and its sources must not change. So a write
to a slot that a peer reads is detected. A kernel takes one step when it can end; words that it writes before it waits
are written earlier, when it first waits. Run by test_ipc.py, because the kernels need Numba's simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from fastcoll.core.signature import Signature
from fastcoll.gpu.ipc import regions, schedules
from fastcoll.gpu.ipc.regions import SharedRegions
from fastcoll.gpu.ipc.schedules import Schedule
from fastcoll.kernels.cuda import page as at
from fastcoll.kernels.cuda import steps

from .planting import plant

TORN = -1
WORD = 8
Item = tuple[Any, ...]
Words = dict[int, int]


class Blocked(Exception):
    """A kernel that waits."""


class Call(NamedTuple):
    """A collective.

    Attributes:
        plan: returns a rank's schedule from its rank, size and slot.
        sources: for each rank and output, the ranks and inputs whose sum it is.
        words: for each rank, the words of its outputs.
        signatures: each rank's signature of the call; a mismatch if they differ.
    """

    plan: Callable[..., Schedule]
    sources: Sequence[Sequence[Sequence[tuple[int, int]]]]
    words: Sequence[int]
    signatures: Sequence[int] = (7, 7, 7)


def all_reduce(size: int, words: int) -> Call:
    plan = partial(schedules.two_shot, nbytes=WORD * words, itemsize=WORD)
    return Call(plan, [[[(r, 0) for r in range(size)]]] * size, [words] * size)


def all_gather(size: int, words: int, *signatures: int) -> Call:
    plan = partial(schedules.all_gather, sizes=[WORD * words] * size)
    return Call(plan, [[[(r, 0)] for r in range(size)]] * size, [words] * size, signatures or (words,) * size)


def scatter(*words: int) -> Call:
    """Scatter from rank 0, with the given number of words for each rank."""

    def plan(rank: int, size: int, slot: int) -> Schedule:
        known = words if rank == 0 else words[rank : rank + 1]
        return schedules.scatter(rank, size, [WORD * n for n in known], slot, 0)

    return Call(plan, [[[(0, r)]] for r in range(len(words))], words)


class Stream:
    """One rank's stream, as the runtime to which `SharedRegions` queues; `items` are its contents."""

    def __init__(self, rank: int, size: int, slot: int) -> None:
        self.rank = rank
        self.items: list[Item] = []
        shared: Any = object.__new__(SharedRegions)
        shared.slot, shared._wait, shared._runtime, shared._rank = WORD * slot, None, self, rank
        shared._region, shared._bases = SimpleNamespace(size=size), [base(r) for r in range(size)]
        shared._page = base(rank)
        for name in ("meet", "announce", "step", "publish"):
            setattr(shared, f"_{name}", partial(self._kernel, name))
        self.shared = shared

    def _kernel(self, name: str, blocks: int, stream: int, *words: int) -> None:
        self.items.append(("kernel", name, words))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.items += [("move", dst + n, (src + n,)) for n in range(0, nbytes, WORD)]

    def launch(self, dst: int, srcs: Sequence[int], count: int, stream: int) -> None:
        self.items += [
            ("move", dst + n, tuple(src + n for src in srcs)) for n in range(0, WORD * count, WORD)
        ]


def base(rank: int) -> int:
    return (rank + 1) << 32


def control(rank: int) -> int:
    return (rank + 101) << 32


class State(NamedTuple):
    words: frozenset[tuple[int, int]]
    at: tuple[int, ...]
    read: tuple[Any, ...]  # data that a rank's move has read
    failed: bool


class Model:
    """All ranks of a program of calls; `stopped` is the rank that may fail, at any time."""

    def __init__(self, size: int, slot: int, program: Sequence[Call], stopped: int | None = None) -> None:
        self.size, self.stopped = size, stopped
        self.streams = [Stream(rank, size, slot) for rank in range(size)]
        self.words: Words = {}
        for rank, stream in enumerate(self.streams):
            page = base(rank)
            self.words |= {page + at.SIZE: size, page + at.RANK: rank, page + at.CONTROL: control(rank)}
            self.words |= {page + at.PEERS + WORD * peer: base(peer) for peer in range(size)}
            self.differs = False
            for number, call in enumerate(program, 1):
                self._queue(stream, number, call)

    def _queue(self, stream: Stream, number: int, call: Call) -> None:
        rank = stream.rank
        ins, outs = ([_array(rank, number, kind, k) for k in range(self.size)] for kind in (0, 1))
        for k, x in enumerate(ins):
            self.words |= {x.address + WORD * index: _value(rank, number, k, index) for index in range(8)}
        made = call.plan(rank, self.size, slot=stream.shared.slot)
        stream.shared.run(0, number, made, Signature(call.signatures[rank], 0, 0), ins, outs, stream)
        want = {
            outs[k].address + WORD * index: sum(_value(r, number, of, index) for r, of in sources)
            for k, sources in enumerate(call.sources[rank])
            for index in range(call.words[rank])
        }
        self.differs |= len(set(call.signatures)) > 1
        stream.items.append(("end", number, want, self.differs))

    def explore(self) -> int:
        """Visit all states; return their number."""
        size = self.size
        first = State(frozenset(self.words.items()), (0,) * size, (None,) * size, False)
        seen, left = {first}, [first]
        while left:
            state = left.pop()
            following = [after for rank in range(size) if (after := self._after(state, rank)) is not None]
            if self.stopped is not None and not state.failed:
                following.append(self._stop(state, self.stopped))
            ends = all(at == len(stream.items) for at, stream in zip(state.at, self.streams, strict=True))
            assert ends or state.failed or any(after != state for after in following), (
                f"deadlock at {state.at}"
            )
            new = [after for after in following if after not in seen]
            seen.update(new)
            left += new
        return len(seen)

    def _stop(self, state: State, rank: int) -> State:
        """Let a rank fail: it publishes that to its peers first, then to its kernels."""
        words = dict(state.words)
        words[control(rank) + at.STOP] = 1
        return state._replace(words=frozenset(words.items()), failed=True)

    def _after(self, state: State, rank: int) -> State | None:
        items, index = self.streams[rank].items, state.at[rank]
        if index == len(items):
            return None
        words, read, what = dict(state.words), state.read[rank], items[index][0]
        if what == "kernel":
            done = self._run_kernel(words, *items[index][1:])
        elif what == "move":
            done, read = self._move(words, read, *items[index][1:])
        else:
            done = True
            self._check_the_end(state, words, rank, *items[index][1:])
        return State(
            frozenset(words.items()),
            (*state.at[:rank], index + done, *state.at[rank + 1 :]),
            (*state.read[:rank], read, *state.read[rank + 1 :]),
            state.failed,
        )

    @staticmethod
    def _run_kernel(words: Words, name: str, arguments: Sequence[int]) -> bool:
        HERE.words = words
        try:
            getattr(steps, name)(*arguments)
        except Blocked:
            return False
        return True

    @staticmethod
    def _move(words: Words, read: Any, dst: int, srcs: Sequence[int]) -> tuple[bool, Any]:
        now = tuple(words.get(src, TORN) for src in srcs)
        if read is None:
            words[dst] = TORN
            return False, now
        words[dst] = sum(now) if now == read and TORN not in now else TORN
        return True, None

    @staticmethod
    def _check_the_end(
        state: State, words: Words, rank: int, number: int, want: Words, differs: bool
    ) -> None:
        stopped = 0 < words.get(control(rank) + at.STOPPED, 0) <= number
        assert differs or state.failed or not stopped, f"call {number} was compared with another one"
        if differs and not state.failed:
            assert stopped, "a rank goes on after a mismatch"
            assert words[control(rank) + at.WHY] == at.MISMATCH
        wrong = [address for address, value in want.items() if words.get(address, TORN) != value]
        assert stopped or state.failed or not wrong, f"call {number} of rank {rank} has a wrong result"


def _array(rank: int, call: int, kind: int, number: int) -> Any:
    address = (1000 * call + rank + 1) << 50 | kind << 40 | number << 30
    return SimpleNamespace(address=address, dtype=SimpleNamespace(itemsize=WORD))


def _value(rank: int, call: int, number: int, index: int) -> int:
    """Return a number of an input, chosen so that sums of different inputs differ."""
    return 8 ** (rank + 4 * number) * (1 + index + 8**16 * call)


@pytest.fixture(autouse=True)
def kernels_on_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernels run with one thread and access `HERE.words`."""

    def store(address: int, value: int) -> None:
        HERE.words[address] = value

    def blocked() -> None:
        raise Blocked

    for name in ("load_acquire", "load_relaxed"):
        monkeypatch.setattr(steps, name, lambda address: HERE.words.get(address, 0))
    for name in ("store_release", "store_relaxed"):
        monkeypatch.setattr(steps, name, store)
    monkeypatch.setattr(steps, "nap", blocked)
    monkeypatch.setattr(steps, "_SPINS", 1)
    one = SimpleNamespace(
        threadIdx=SimpleNamespace(x=0), blockDim=SimpleNamespace(x=1), syncthreads=lambda: None
    )
    monkeypatch.setattr(steps, "cuda", one)


HERE = SimpleNamespace(words={})
PROGRAMS = {
    "gathers": (2, 1, [all_gather(2, words) for words in (1, 4, 1, 1)]),
    "reductions": (2, 2, [all_reduce(2, 2), all_reduce(2, 4)]),
    "mismatch": (2, 1, [all_gather(2, 1), all_gather(2, 2, 7, 8), all_gather(2, 1)]),
    "three ranks": (3, 1, [all_gather(3, 1), all_gather(3, 1)]),
    "steps differ": (3, 3, [scatter(1, 1, 2), scatter(0, 1, 0)]),
}
"""Ranks, words of a slot, and calls."""


def long(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.long)


@pytest.mark.parametrize("name", [long(name) if name == "three ranks" else name for name in PROGRAMS])
def test_every_order_ends_well(name: str) -> None:
    assert Model(*PROGRAMS[name]).explore() > 100


@pytest.mark.parametrize("name", ["reductions", long("mismatch")])
def test_no_call_succeeds_with_a_wrong_result_when_a_rank_fails(name: str) -> None:
    assert Model(*PROGRAMS[name], stopped=1).explore() > 100


ONE_LINE = [(steps, name, "(number % 2)", "0") for name in ("_line", "_publish_line")]
WRONG = "wrong result"
PLANTS: dict[str, tuple[list[tuple[Any, str, str, str]], str, int | str]] = {
    "two slots in all": (
        [(regions, "slot_of", "call % 2 if step == 0 else 2 + step % 2", "(call + step) % 2")], "gathers", WRONG
    ),
    "one slot of first steps": ([(regions, "slot_of", "call % 2 if step", "0 if step")], "gathers", WRONG),
    "one slot of later steps": ([(regions, "slot_of", "2 + step % 2", "2")], "gathers", WRONG),
    "one line of each rank": (ONE_LINE, "gathers", "compared with another"),
    "nobody says that it was its last step": (
        [(schedules, "scatter", "(root,))]), Last()", "(root,))]),")], "steps differ", "deadlock"
    ),
    "steps do not wait": (
        [(steps, "step", "_wait(page, page + at.LINES + at.RANK_BYTES * peer + at.STEP, word)", "pass")], "gathers",
        WRONG,
    ),
    "the dead speak": ([(steps, "step", "dead = load_relaxed(page + at.DEAD)", "dead = 0")], "mismatch", "MISMATCH"),
    "a mismatch is not reported": ([(steps, "_mismatch", "_report_to_host", "(lambda *_: 0)")], "mismatch", "goes on"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_the_model_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, program, message = PLANTS[name]
    for change in changes:
        plant(monkeypatch, *change)
    with pytest.raises(AssertionError, match=message):
        Model(*PROGRAMS[program]).explore()
