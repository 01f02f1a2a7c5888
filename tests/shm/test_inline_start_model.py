"""Inline starts (fastcoll/shm/inline_start.py) as a model of one rank, in every schedule of small programs.

Callers, the progress thread, an extra thread, the thread that closes or aborts the group, and the peers take one atomic
step at a time, in any order. The package's own functions decide what happens to a call when its entry returns, when it
is queued and when it is taken over. A wait that only a timeout would end has no step, so a hang is found as a deadlock.

A thread's state is its position, its call, and the last result of its entry. A caller's program consists of
    "async k", "sync k"    call k begins
    "wait k"               for its Work
    "after k"              another caller's call k has returned
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from fastcoll.core.status import AGAIN, DONE, LATER, MISMATCH, WORKED
from fastcoll.shm import inline_start
from fastcoll.shm.inline_start import BROKEN, FINISHED, GO_ON, HAND_OVER

FIRST, SECOND, PROGRESS, ASIDE, CLOSER = THREADS = range(1, 6)
FREE, HANDED_OVER = 0, -1


class Thread(NamedTuple):
    at: str
    call: int = 0
    code: int = DONE
    begun: bool = False
    queued: bool = False  # a synchronous call, on the progress thread
    done: int = 0  # operations of a caller's program


class State(NamedTuple):
    threads: tuple[Thread, ...]
    busy: int = FREE
    lock: int = FREE
    turn: int = FREE
    pending: int = 0
    queue: tuple[Thread, ...] = ()
    failed: bool = False
    closed: bool = False
    shut: bool = False
    queue_closed: bool = False
    mapped: bool = True
    came: int = 0  # calls that the peers have begun
    dead: bool = False
    interrupted: bool = False
    order: tuple[int, ...] = ()  # calls in the order in which they took the context
    worked: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()  # calls whose slots were read
    raised: frozenset[int] = frozenset()  # to the caller, by the call itself
    returned: frozenset[int] = frozenset()
    outcome: frozenset[tuple[int, bool]] = frozenset()  # call and success, of Works that are complete

    def put(self, t: int, at: str, thread: dict[str, Any] | None = None, **changes: Any) -> State:
        """Return the state after thread t has moved to `at`."""
        if at in ("next", "end", "idle", "gone"):
            after = Thread(at, done=self.threads[t - 1].done)
        else:
            after = self.threads[t - 1]._replace(at=at, **(thread or {}))
        return self._replace(threads=(*self.threads[: t - 1], after, *self.threads[t:]), **changes)


class Model:
    """The transitions of all threads.

    Args:
        programs: of the callers.
        ends: "close" or "abort": another thread does that to the group at any time.
        dies: a peer may die, at any time.
        interrupts: the first caller may be interrupted by an exception, anywhere in an asynchronous call.
        long, mismatch, changed: a call whose entry returns once although the peers have arrived; one from which the
            peers' calls differ; one whose array is changed while it runs.
        fault: a step of a wrong protocol.
    """

    next_step = staticmethod(inline_start.next_step)
    goes_aside = staticmethod(inline_start.goes_aside)
    may_take_over = staticmethod(inline_start.may_take_over)

    def __init__(
        self,
        *programs: str,
        ends: str = "",
        dies: bool = False,
        interrupts: bool = False,
        long: int = 0,
        mismatch: int = 0,
        changed: int = 0,
        fault: str = "",
    ) -> None:
        lists = [program.split(", ") if program else [] for program in (*programs, "", "")[:2]]
        self.programs = [[(op.split()[0], int(op.split()[1])) for op in ops] for ops in lists]
        self.calls = [[k for op, k in ops if op in ("async", "sync")] for ops in self.programs]
        self.afters = [
            (k, later)
            for ops in self.programs
            for index, (op, k) in enumerate(ops)
            for after, later in ops[index:]
            if op == "after" and after in ("async", "sync")
        ]
        self.awaited = {k for ops in self.programs for op, k in ops if op == "after"}
        self.ends, self.dies, self.interrupts = ends, dies, interrupts
        self.long, self.mismatch, self.changed, self.fault = long, mismatch, changed, fault

    def explore(self) -> int:
        """Visit every reachable state; returns their number."""
        callers = (Thread("next"), Thread("next"))
        start = State((*callers, Thread("idle"), Thread("gone"), Thread(self.ends or "gone")))
        known, todo = {start}, [start]
        while todo:
            state = todo.pop()
            nexts = list(self.steps(state))
            if not nexts:
                self.check_end(state)
            for after in nexts:
                if after not in known:
                    known.add(after)
                    todo.append(after)
        return len(known)

    def check_end(self, s: State) -> None:
        left = [thread.at for thread in s.threads]
        assert left[:2] == ["end", "end"], f"deadlock: {s}"
        assert left[2:] in (["idle", "gone", "gone"], ["gone", "gone", "gone"]), f"deadlock: {s}"
        assert not s.queue, f"deadlock: {s}"
        assert (s.busy, s.lock, s.turn, s.pending) == (FREE if s.mapped else CLOSER, FREE, FREE, 0), (
            f"left behind: {s}"
        )
        never = self.calls[0] if s.interrupted else []  # the rest of an interrupted caller's program
        for k in {k for calls in self.calls for k in calls} - (set(never) - set(s.order)):
            assert k in dict(s.outcome) or k in s.raised, f"call {k} is lost: {s}"
        ends_well = not (self.ends or self.dies or self.interrupts or self.mismatch or self.changed)
        assert not ends_well or len(s.read) == sum(map(len, self.calls)), f"calls failed: {s}"

    def steps(self, s: State) -> Iterator[State]:
        if not s.dead and s.came < sum(map(len, self.calls)):
            yield s._replace(came=s.came + 1)
            if self.dies:
                yield s._replace(dead=True)
        for t in THREADS:
            thread = s.threads[t - 1]
            step: Callable[[State, int, Thread], Iterator[State]] | None
            step = getattr(self, "_" + thread.at, None)
            if step is not None:
                yield from step(s, t, thread)
        first = s.threads[0]
        if self.interrupts and not s.interrupted and first.at in IN_AN_INLINE_START:
            yield self.leave_lock(s, FIRST)._replace(interrupted=True).put(FIRST, "torn")

    def leave_lock(self, s: State, t: int) -> State:
        return s._replace(lock=FREE) if s.lock == t else s

    # ---- the kernel: what an entry does with a call that owns the context

    def take(self, s: State, t: int, k: int) -> State:
        mine = next((calls for calls in self.calls if k in calls), [])
        earlier = [*mine[: mine.index(k)], *(before for before, after in self.afters if after == k)]
        for before in earlier:
            gone = {*s.order, *s.raised, *dict(s.outcome)}
            assert before in gone, f"call {k} began before call {before}"
        assert not any(later in s.order for later in mine[mine.index(k) :]), (
            f"call {k} began after a later one"
        )
        return s._replace(busy=t, order=(*s.order, k))

    def run(self, s: State, t: int, k: int) -> Iterator[tuple[int, State]]:
        """Yield what an entry may return for call k, with the state after that."""
        assert s.busy == t, f"thread {t} goes on with call {k}, which thread {s.busy} has: {s}"
        assert s.mapped, f"call {k} goes on in memory that was unmapped"
        if k == self.changed and k in s.worked:
            yield LATER, s
            return
        if s.came <= s.order.index(k):
            yield AGAIN, s
            return
        if k == self.mismatch:
            yield MISMATCH, s
            return
        if k in (self.long, self.changed) and k not in s.worked:
            yield WORKED, s._replace(worked=s.worked | {k})
        if k != self.changed:
            assert k not in s.read, f"call {k} is run twice"
            yield DONE, s._replace(busy=FREE, read=s.read | {k})

    # ---- callers

    def _next(self, s: State, t: int, me: Thread) -> Iterator[State]:
        program = self.programs[t - 1]
        if me.done == len(program):
            yield s.put(t, "end")
            return
        op, k = program[me.done]
        thread = me._replace(call=k, done=me.done + 1)
        on = s._replace(threads=(*s.threads[: t - 1], thread, *s.threads[t:]))
        told = {"wait": dict(s.outcome), "after": s.returned}.get(op)
        if told is None:
            yield from (self._load if op == "async" else self._sync_load)(on, t, thread)
        elif k in told or k in s.raised:
            yield from self._next(on, t, thread)

    def returns(self, s: State, t: int, k: int, success: bool | None = None) -> State:
        """Call k returns to its caller; `success` unless it returns a Work."""
        outcome = s.outcome if success is None else s.outcome | {(k, success)}
        return s.put(t, "next", returned=s.returned | {k} & self.awaited, outcome=outcome)

    def raises(self, s: State, t: int, k: int) -> State:
        at = "end" if s.interrupted and t == FIRST else "next"
        return s.put(t, at, raised=s.raised | {k}, returned=s.returned | {k} & self.awaited)

    def _load(self, s: State, t: int, me: Thread) -> Iterator[State]:
        waits = s.pending > 0 and self.fault != "ignores the queue"
        yield s.put(t, "submit" if waits or s.shut or s.failed else "swap")

    def _swap(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield self.take(s, t, me.call).put(t, "run") if s.busy == FREE else s.put(t, "submit")

    def _run(self, s: State, t: int, me: Thread) -> Iterator[State]:
        for code, after in self.run(s, t, me.call):
            step = self.next_step(code, me.begun, s.failed)
            if step == FINISHED:
                yield self.returns(after, t, me.call, True)
            else:
                at = {GO_ON: "run", HAND_OVER: "lock", BROKEN: "torn"}.get(step, "submit")
                if at == "lock" and self.fault == "lets go before it queues":
                    at = "let_go"
                yield after.put(t, at, {"code": code, "begun": True})

    def _lock(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.lock != FREE:
            return
        s = s._replace(lock=t)
        if s.closed or s.queue_closed:
            yield self.leave_lock(s, t).put(t, "torn")
            return
        job = Thread("resume", me.call, me.code)
        late = self.fault == "lets go before it queues"
        at = "unlock" if late or self.fault == "never lets go" else "let_go"
        if self.goes_aside(s.pending):
            yield s._replace(threads=(*s.threads[:3], job, s.threads[4])).put(t, at)
        else:
            yield s.put(t, at, queue=(*s.queue, job), pending=s.pending + 1)

    def _let_go(self, s: State, t: int, me: Thread) -> Iterator[State]:
        late = self.fault == "lets go before it queues"
        yield s.put(t, "lock" if late else "unlock", busy=HANDED_OVER)

    def _unlock(self, s: State, t: int, me: Thread) -> Iterator[State]:
        on = self.fault == "goes on after handing over"
        after = self.leave_lock(s, t)
        yield after.put(t, "run") if on else self.returns(after, t, me.call)

    def _torn(self, s: State, t: int, me: Thread) -> Iterator[State]:
        """An exception ends the call; if the call owns the context, the group fails."""
        if s.busy == t and self.fault != "keeps a broken call":
            yield s.put(t, "torn_2", failed=True)
        elif t in (FIRST, SECOND):
            yield self.raises(s, t, me.call)
        else:
            yield s.put(t, "tell_error")

    def _torn_2(self, s: State, t: int, me: Thread) -> Iterator[State]:
        after = s._replace(busy=FREE)
        if s.turn == t:
            after = after._replace(turn=FREE)
        yield self.raises(after, t, me.call) if t in (FIRST, SECOND) else after.put(t, "tell_error")

    def _submit(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.failed or s.closed or s.queue_closed:
            yield self.raises(s, t, me.call)
        elif s.lock == FREE:
            job = Thread("plain", me.call)
            after = s._replace(queue=(*s.queue, job), pending=s.pending + 1)
            yield after.put(t, "sync_wait") if me.queued else self.returns(after, t, me.call)

    def _sync_load(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield s.put(t, "sync_general" if s.pending or s.shut or s.failed else "sync_swap")

    def _sync_swap(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield self.take(s, t, me.call).put(t, "go_on") if s.busy == FREE else s.put(t, "sync_general")

    def _sync_general(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield s.put(t, "submit" if s.pending else "plain", {"queued": s.pending > 0})

    def _sync_wait(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if me.call in dict(s.outcome):
            yield self.returns(s, t, me.call)

    # ---- threads that carry a call to its end

    def _idle(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.queue and s.lock == FREE:
            job = s.queue[0]
            yield s.put(t, job.at, {"call": job.call, "code": job.code}, queue=s.queue[1:])
        elif s.queue_closed:
            yield s.put(t, "gone")

    def _resume(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.lock != FREE:
            return
        if self.may_take_over(s.busy, s.closed):
            yield s.put(t, "go_on" if me.code in (AGAIN, WORKED) else "refuse", busy=t)
        else:
            both = self.fault == "two take it back" and s.busy == HANDED_OVER
            yield s.put(t, "tell_error", busy=FREE if both else s.busy)

    def _refuse(self, s: State, t: int, me: Thread) -> Iterator[State]:
        """The calls did not match."""
        yield s.put(t, "tell_error", busy=FREE)

    def _plain(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.turn == FREE:
            yield s.put(t, "poll", turn=t)

    def _poll(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.failed or s.closed:
            after = s._replace(turn=FREE)
            yield self.raises(after, t, me.call) if t in (FIRST, SECOND) else after.put(t, "tell_error")
        elif s.busy == FREE:
            yield self.take(s, t, me.call).put(t, "go_on")

    def _go_on(self, s: State, t: int, me: Thread) -> Iterator[State]:
        for code, after in self.run(s, t, me.call):
            free = after._replace(turn=FREE) if after.turn == t else after
            if code == DONE:
                yield self.returns(free, t, me.call, True) if t in (FIRST, SECOND) else free.put(t, "tell")
            elif code == MISMATCH:
                free = free._replace(busy=FREE)
                yield self.raises(free, t, me.call) if t in (FIRST, SECOND) else free.put(t, "tell_error")
            elif code == WORKED:
                yield after
            elif code == LATER or s.failed or s.dead:
                yield after.put(t, "torn")

    def _tell(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield from self.told(s, t, me, True)

    def _tell_error(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield from self.told(s, t, me, False)

    def told(self, s: State, t: int, me: Thread, success: bool) -> Iterator[State]:
        if t == PROGRESS and s.lock != FREE:
            return
        assert me.call not in dict(s.outcome), f"call {me.call} has two outcomes"
        assert success == (me.call in s.read), f"call {me.call} succeeds unread"
        after = s._replace(outcome=s.outcome | {(me.call, success)})
        yield after.put(t, "gone") if t == ASIDE else after.put(t, "idle", pending=s.pending - 1)

    # ---- the thread that ends the group

    def _abort(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield s.put(t, "gone", failed=True)

    def _close(self, s: State, t: int, me: Thread) -> Iterator[State]:
        under_way = s.pending > 0 or s.turn != FREE or s.busy != FREE
        yield s.put(t, "close_2", failed=s.failed or under_way)

    def _close_2(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield s.put(t, "drop", closed=True)

    def _drop(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.lock == FREE:
            outcome = s.outcome | {(job.call, False) for job in s.queue}
            left = s.pending - len(s.queue)
            at = "close_turn" if self.fault == "takes nothing back" else "look_back"
            yield s.put(t, at, queue_closed=True, queue=(), outcome=outcome, pending=left, shut=True)

    def _look_back(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield s.put(t, "take_back" if s.busy == HANDED_OVER else "close_turn")

    def _take_back(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield s.put(t, "close_turn", busy=FREE)

    def _close_turn(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.turn == FREE:
            yield s.put(t, "seize", turn=t)

    def _seize(self, s: State, t: int, me: Thread) -> Iterator[State]:
        if s.busy == FREE:
            yield s.put(t, "unmap", busy=t)

    def _unmap(self, s: State, t: int, me: Thread) -> Iterator[State]:
        yield s.put(t, "gone", mapped=False, turn=FREE)


IN_AN_INLINE_START = ("swap", "run", "lock", "let_go", "unlock")

PROGRAMS = {
    "one after the other": ["async 1, async 2, sync 3, async 4"],
    "waiting between": ["async 1, wait 1, async 2, sync 3, wait 2"],
    "two callers": ["async 1, async 2", "async 3"],
    "two callers, synchronous ones between": ["async 1, sync 2", "sync 3"],
    "after another caller's": ["async 1, async 2", "after 1, async 3, wait 3"],
    "after another caller's, synchronous": ["async 1, sync 2", "after 1, sync 3"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_carried_out_once_and_in_order(name: str) -> None:
    assert Model(*PROGRAMS[name], long=1).explore() > 100


@pytest.mark.parametrize("wrong", ["mismatch", "changed"])
@pytest.mark.parametrize("call", [1, 2])
def test_a_call_that_goes_wrong_leaves_nothing_behind(wrong: str, call: int) -> None:
    assert Model("async 1, async 2", "sync 3", **{wrong: call}).explore() > 100


@pytest.mark.parametrize("ends", ["", "abort", "close"])
@pytest.mark.parametrize("programs", [["async 1, async 2"], ["async 1, sync 2"], ["async 1", "async 2"]])
def test_whatever_ends_the_group_ends_every_call(programs: list[str], ends: str) -> None:
    """If no thread closes the group, peers may die as well."""
    assert Model(*programs, ends=ends, dies=ends != "close").explore() > 100


@pytest.mark.parametrize(("ends", "programs"), [("", ["async 1", "async 2"]), ("close", ["async 1"])])
def test_an_interrupted_caller_leaves_nothing_behind(ends: str, programs: list[str]) -> None:
    assert Model(*programs, ends=ends, interrupts=True).explore() > 100


class NeverAside(Model):
    def goes_aside(self, pending: int) -> bool:
        return False


class TakesOverAnyway(Model):
    def may_take_over(self, busy: int, closed: bool) -> bool:
        return True


class TakesOverWhenClosed(Model):
    def may_take_over(self, busy: int, closed: bool) -> bool:
        return inline_start.may_take_over(busy, False)


class TakesBrokenForNotBegun(Model):
    def next_step(self, code: int, begun: bool, failed: bool) -> int:
        return inline_start.next_step(code, False, failed)


TWO = ("async 1", "async 2")

FAULTS = {
    "queued behind what waits for it": (NeverAside(*TWO), "deadlock"),
    "let go before it is queued": (NeverAside(*TWO, fault="lets go before it queues"), "deadlock"),
    "taken over from its caller": (TakesOverAnyway(*TWO, interrupts=True), "which thread"),
    "taken over in a closed group": (TakesOverWhenClosed(*TWO, ends="close"), "which thread|unmapped"),
    "not begun after all": (TakesBrokenForNotBegun("async 1", changed=1), "deadlock"),
    "begun before what is queued": (
        Model("async 1, async 2, async 3", fault="ignores the queue"),
        "began before",
    ),
    "kept by its caller": (Model("async 1", fault="never lets go"), "left behind"),
    "gone on with by its caller": (Model("async 1", fault="goes on after handing over"), "which thread"),
    "kept when it is broken": (
        Model("async 1", "sync 2", interrupts=True, fault="keeps a broken call"),
        "left behind",
    ),
    "not taken back": (Model("async 1", ends="close", fault="takes nothing back"), "deadlock"),
    "taken back twice": (Model(*TWO, ends="close", fault="two take it back"), "which thread"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds_a_call(name: str) -> None:
    model, found = FAULTS[name]
    with pytest.raises(AssertionError, match=found):
        model.explore()
