"""Ranks that make collectives in a segment, for an `Explorer`: the package's code below the entries, and a driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from shm.explorer import SHARED, Explorer, load

from fastcoll.core import signature
from fastcoll.core.monitor import FAILED
from fastcoll.core.status import AGAIN, DONE, MISMATCH, MIXED, UNALLOCATED, UNMAPPED, WORKED

CONTEXT, WHAT, ARENA, ARRAYS = (k << 20 for k in range(1, 5))
SHARED_ARRAYS = SHARED + (1 << 30)
IN, OUT, ENDING = 0, 1 << 10, -1
DIRECT = 5
LOST = -7  # a word whose memory has been freed
HAS_MEMORY = ARRAYS - 8  # of a rank: whether the memory of its slots is allocated


class Call(NamedTuple):
    """A call: words that a rank contributes, root, lag of each rank, and the ranks that choose the direct algorithm."""

    kind: str
    words: int
    root: int
    lags: tuple[int, ...]
    direct: tuple[bool, ...]

    @classmethod
    def parse(cls, text: str) -> Call:
        """Read a call as in "reduce 3 @1 +1", with its words, root and lag; "+1/0" is each rank's own.

        In a "direct" call all ranks choose the direct algorithm; "%1/0" chooses it for rank 0 only.
        """
        kind, *rest = text.split()
        given = {each[0]: each[1:] for each in rest}
        words = [int(each) for each in rest if each.isdigit()]
        lags = [int(lag) for lag in given.get("+", "0").split("/")]
        direct = [which == "1" for which in given.get("%", str(int("direct" in rest))).split("/")]
        return cls(kind, *(words or [1]), int(given.get("@", "0")), tuple(lags * 4), tuple(direct * 4))

    def words_of(self, rank: int) -> int:
        """Number of words that a rank contributes, or claims to contribute or to receive."""
        return self.words + (self.kind == ("sizes_differ" if rank != self.root else "blocks_differ"))

    def root_of(self, rank: int) -> int:
        return min(rank, 1) if self.kind == "roots_differ" else self.root

    def given(self, number: int, rank: int) -> list[int]:
        return [1000 * number + 100 * rank + k for k in range(1, self.words_of(rank) + 1)]


class World:
    """Ranks that make several calls one after the other.

    Args:
        slots, slot: number of slots, and their bytes.
        group: ranks in a group; 0: all ranks read all lines.
        hurried: every entry returns between two rounds, as if a round took long.
        arena: whether arrays are in arenas, which peers map.
        quitter: a rank that fails the group when a wait returns in vain.
        crowded: whether ranks sleep until their peers wake them.
        frees: whether a rank frees its slots before each call, if that is allowed.
    """

    def __init__(
        self,
        size: int,
        calls: str,
        slots: int = 2,
        slot: int = 8,
        group: int = 0,
        hurried: bool = False,
        arena: bool = False,
        quitter: int = -1,
        crowded: bool = False,
        frees: bool = False,
        plant: str = "",
    ) -> None:
        is_direct = "direct" in calls or "%" in calls
        # A direct call needs two words in a call line, which a real line always has.
        sizes = {"SLOTS": slots, "INLINE": 8 + 8 * is_direct, "GROUP": group or 8, "FLAT": 1 if group else 16}
        pieces = dict.fromkeys(("PIECE", "REDUCED_AT_ONCE", "PUSHED_AT_ONCE"), 8) | {"_LINE_OF_ELEMENTS": 1}
        # Less than an element, but data that fits into a call line takes one round.
        rounds = {"_ONE_WAY_ROUND": 16 if is_direct else 4}
        self.machine, self.made = load(plant, layout=sizes, single_copy=pieces, rounds=rounds)
        self.size, self.hurried, self.arena, self.quitter = size, hurried, arena, quitter
        self.crowded, self.made.rounds.wake = crowded, self.machine.wake
        self.frees, self.made.slot_memory._madvise = frees, self.lose
        self.calls = [Call.parse(each) for each in calls.split(", ")]
        # Room for a word of each rank and one more; slots are powers of two.
        room = 1 << (8 * size + 7).bit_length()
        self.layout = self.made.layout.Layout(size, max(slot, room) if is_direct else slot)
        self.arrays = SHARED_ARRAYS if is_direct else ARRAYS
        self.lag = self.algorithm = 0
        plain = self.made.autotune.choose_none

        def choose(t: int) -> None:
            plain(t)
            self.machine.store_words(t, (self.lag, self.algorithm))  # LAG, ALGORITHM

        self.made.autotune.choose_none = choose
        self.rank, plain_store = 0, self.machine.store

        def store(address: int, value: Any) -> None:
            first, nbytes = self.slots_of(self.rank)
            if 0 <= address - first < nbytes:
                assert self.machine.load(HAS_MEMORY), "no memory has ended with"
            plain_store(address, value)

        self.machine.store = store  # type: ignore[method-assign]

    def begin(self, rank: int) -> tuple[Any, dict[int, Any]]:
        at, layout, waiting = self.made.context_layout, self.layout, self.made.waiting
        words = {
            at.RANK: rank, at.SIZE: self.size, at.SECTIONS: SHARED + layout.section(0), at.STRIDE: layout.stride,
            at.SLOT: layout.slot, at.LATE: -1, at.ONE_SHOT: 8, at.DIRECT_FROM: self.made.autotune.NEVER,
            at.COMBINED: SHARED + self.made.layout.COMBINED if layout.groups else 0, at.ARENA: ARENA,
            at.BACKOFF + waiting.BUDGET: -1 if self.hurried else 1, at.CROWDED: int(self.crowded),
        }  # fmt: skip
        private = {CONTEXT + 8 * word: value for word, value in words.items()}
        private |= {ARENA: self.array(rank, IN), ARENA + 8: 2 * OUT} if self.arena else {}  # BASE, LIMIT
        return (0, 0), private

    def array(self, rank: int, which: int) -> int:
        """Address of a rank's array."""
        return self.arrays + (rank << 16) + which

    def section(self, rank: int) -> int:
        return SHARED + self.layout.section(rank)

    def slots_of(self, rank: int) -> tuple[int, int]:
        """Address and bytes of a rank's slots."""
        first, nbytes = self.layout.slots_of(rank)
        return SHARED + first, nbytes

    def lose(self, address: int, nbytes: int, advice: int) -> int:
        """Replace madvise: the content of memory is lost, and further memory has to be allocated."""
        for word in range(address, address + nbytes, 8):
            self.machine.store(word, LOST)
        self.machine.store(HAS_MEMORY, 0)
        return 0

    def go_on(self, rank: int, at: tuple[int, int]) -> tuple[int, int] | None:
        number, how = at
        r, words, m = self.made.rounds, self.made.context_layout, self.machine
        call, self.rank = self.calls[number], rank
        if how == ENDING:
            return self.end(rank, at)
        self.lag, direct = (0, False) if how & r.HELD else (call.lags[rank], call.direct[rank])
        self.algorithm = DIRECT if direct else 0
        if not how & (r.RESUMED | r.HELD):
            if self.frees and m.load(HAS_MEMORY):
                self.made.slot_memory.free(CONTEXT, *self.slots_of(rank))
            given = call.given(number + 1, rank)
            m.store_words(self.array(rank, IN), given)
            before = given if call.kind == "all_reduce" else [0] * self.outputs(call)
            m.store_words(self.array(rank, OUT), before)
        assert r.take(CONTEXT | how) == CONTEXT, "the call before has ended with the context taken"
        code = self.enter(call, rank, CONTEXT | how)
        if code == UNMAPPED:
            self.map_arena(m.load(CONTEXT + 8 * words.LATE))
            return number, r.RESUMED
        if code == AGAIN and self.quitter >= 0 and self.must_fail(rank):
            m.store_release(self.section(rank) + self.made.layout.STATE, FAILED)
            m.full_fence()  # as `publish` of kernels/shared_words.py
            return number, ENDING
        if code == UNALLOCATED:
            m.store(CONTEXT + 8 * words.ALLOCATED, 1)
            m.store(HAS_MEMORY, 1)
        if code in (AGAIN, WORKED, UNALLOCATED):
            return number, how & ~r.HELD | r.RESUMED
        if code == MIXED:
            return number, r.HELD
        if call.kind.endswith("_differ"):
            assert code == MISMATCH, f"a mismatch is seen as {code}"
            # The report of a mismatch reads the lines of all ranks.
            lines = [m.load_words(r.line_of(CONTEXT, peer), 3) for peer in range(self.size)]
            expected = [[number + 1, self.word(call, k), 8 * call.words_of(k)] for k in range(self.size)]
            assert lines == expected, f"lines of call {number + 1} are {lines}"
            m.store(CONTEXT + 8 * words.BUSY, 0)
        else:
            assert code == DONE, f"{call} has ended with {code}"
        self.check(call, number + 1, rank)
        number += 1
        return (number, 0) if number < len(self.calls) else None

    def outputs(self, call: Call) -> int:
        return self.size * call.words_of(1 - call.root)

    def map_arena(self, peer: int) -> None:
        """Map the arena that a peer has published, at the same address."""
        at, m = self.made.context_layout, self.machine
        base, nbytes = m.load_words(self.section(peer) + self.made.layout.REACH + 16, 2)
        for which, word in ((at.ARENA_BASES, base), (at.ARENA_BYTES, nbytes)):
            m.store(self.made.rounds.table(CONTEXT, which) + 8 * peer, word)

    def must_fail(self, rank: int) -> bool:
        """Whether this rank must fail the group, or a peer has failed."""
        states = [self.section(peer) + self.made.layout.STATE for peer in range(self.size) if peer != rank]
        return rank == self.quitter or any(self.machine.load_acquire(state) == FAILED for state in states)

    def end(self, rank: int, at: tuple[int, int]) -> tuple[int, int] | None:
        """End after a failure: once no peer writes into this rank's array, the caller changes it."""
        m, layout = self.machine, self.made.layout
        if m.load(CONTEXT + 8 * self.made.context_layout.EXPOSED):
            for peer in range(self.size):
                if peer != rank and m.load_acquire(self.section(peer) + layout.REACH + 8 * layout.PUSHING):
                    m.rest(0, 0)
                    return at
        call = self.calls[at[0]]
        for which, count in ((IN, call.words_of(rank)), (OUT, self.outputs(call))):
            for word in range(count):
                m.store_release(self.array(rank, which) + 8 * word, -1)
        m.store_release(self.failed_in(rank), at[0] + 1)
        return None

    def failed_in(self, rank: int) -> int:
        """Address of the number of the call in which a rank has failed, 0 if it has not."""
        return self.arrays + (rank << 16) + (1 << 12)

    def check_end(self, look: Callable[[int], Any]) -> None:
        """Check that no rank has written into an array that its owner changed after a failure."""
        for rank in range(self.size) if self.quitter >= 0 else ():
            if number := look(self.failed_in(rank)):
                count = self.outputs(self.calls[number - 1])
                found = [look(self.array(rank, OUT) + 8 * word) for word in range(count)]
                assert found == [-1] * count, f"a failed call gave rank {rank} {found} after its end"

    def word(self, call: Call, rank: int) -> int:
        kind = {"blocks_differ": "all_gather"}.get(call.kind, call.kind)
        kind = "broadcast" if kind.endswith("_differ") else kind
        return signature.encode(kind) | call.root_of(rank) << signature.ROOT_SHIFT

    def enter(self, call: Call, rank: int, h: int) -> int:
        c, made, m = CONTEXT, self.made, self.machine
        given, taken, at, v = self.array(rank, IN), self.array(rank, OUT), made.context_layout, made.validate
        nbytes = 8 * call.words_of(rank)
        word, root = self.word(call, rank), call.root_of(rank)
        m.store_words(WHAT, (word ^ root << signature.ROOT_SHIFT, 0, 0, 8))
        if call.kind == "barrier":
            return made.reductions.run_barrier(h, c, word)
        if call.kind in ("broadcast", "sizes_differ", "roots_differ"):
            return made.movement.run_broadcast(h, c, given if rank == root else taken, nbytes, WHAT, root)
        if call.kind == "all_reduce":
            return made.reductions.run_all_reduce(h, c, taken, nbytes, WHAT)
        if call.kind == "reduce":
            return made.reductions.run_reduce(h, c, taken, given, nbytes, WHAT, call.root)
        if call.kind == "reduce_scatter":
            v.list_equal(c, at.GIVES, given, nbytes // self.size)
            return made.reductions.run_reduce_scatter(h, c, taken, nbytes // self.size, WHAT)
        v.list_none(c, at.GIVES)
        v.list_none(c, at.TAKES)
        if call.kind == "all_gather":
            v.list_same(c, at.GIVES, given, nbytes)
            v.list_equal(c, at.TAKES, taken, nbytes)
        elif call.kind == "blocks_differ":  # the root expects one word more from the last rank than it sends
            v.list_same(c, at.GIVES, given, 8 * call.words)
            v.list_equal(c, at.TAKES, taken, 8 * call.words)
            v.list_one(c, at.TAKES, self.size - 1, taken, nbytes)
        elif call.kind == "all_to_all":
            v.list_equal(c, at.GIVES, given, nbytes // self.size)
            v.list_equal(c, at.TAKES, taken, nbytes // self.size)
        else:
            v.list_one(c, at.GIVES, call.root, given, nbytes)
            if rank == call.root:
                v.list_equal(c, at.TAKES, taken, nbytes)
        return made.movement.run_exchange(h, c, word & 0xFF, WHAT, call.root)

    def check(self, call: Call, number: int, rank: int) -> None:
        """Check a rank's result."""
        given = [call.given(number, peer) for peer in range(self.size)]
        total = [sum(column) for column in zip(*given, strict=False)]
        part = call.words // self.size
        mine = slice(rank * part, (rank + 1) * part)
        is_root = rank == call.root
        expected = {
            "broadcast": [] if is_root else given[call.root],
            "all_reduce": total,
            "reduce": total if is_root else [],
            "reduce_scatter": total[mine],
            "all_gather": [word for each in given for word in each],
            "gather": [word for each in given for word in each] if is_root else [],
            "all_to_all": [word for each in given for word in each[mine]],
        }.get(call.kind, [])
        found = self.machine.load_words(self.array(rank, OUT), len(expected))
        assert found == expected, f"{call.kind}, call {number}, gave rank {rank} {found} and not {expected}"
        self.machine.store_words(self.array(rank, OUT), [0] * self.outputs(call))
        self.machine.store_words(self.array(rank, IN), [0] * call.words_of(rank))


def explore(size: int, calls: str, again: bool = False, weak: int = 0, **how: Any) -> int:
    """Visit every schedule of some calls; return the number of states."""
    return Explorer(World(size, calls, **how), size, again, weak).explore()
