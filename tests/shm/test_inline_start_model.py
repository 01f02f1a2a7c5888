"""Inline starts (fastcoll/shm/inline_start.py) under schedules of its threads, with the package's own code.

Threads take turns: a thread runs until a point at which CPython may switch threads or run a signal handler, and the
schedule says which thread goes on. One short program runs under every schedule with at most one switch away from a
thread that could go on, and all programs run under random schedules, the same in each run of the test. Entries are
scripts: a call is complete as soon as the peers have begun it. A wait ends only by what it waits for, so a hang is a
deadlock.

A caller's program consists of
    "async k", "sync k"    call k begins
    "wait k", "poll k"     for its Work
"""

from __future__ import annotations

import inspect
import random
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count, product
from types import FrameType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shm.stepping import is_step

from fastcoll.core import work as core_work
from fastcoll.core.gate import Gate
from fastcoll.core.status import AGAIN, DONE, LATER, MISMATCH, WORKED
from fastcoll.errors import AbortedError, MismatchError, PeerDiedError, UsageError
from fastcoll.kernels.primitives import address_of
from fastcoll.shm import context_layout as words
from fastcoll.shm import inline_start
from fastcoll.shm.context import ShmContext, words_for
from fastcoll.shm.inline_start import OPEN
from fastcoll.shm.rounds import PREPARED, RESUMED

LIMIT = 60


class Deadlock(AssertionError):
    pass


class Over(BaseException):
    """Ends the threads that are left when a run is over."""


class Task:
    """One thread; `until`: the condition for which the thread waits, None if it can run."""

    def __init__(self, name: str, run: Callable[[], None], daemon: bool) -> None:
        self.name, self.run, self.daemon = name, run, daemon
        self.turn, self.until, self.ended = (
            threading.Lock(),
            None,
            False,
        )  # the turn is free only for a moment
        self.turn.acquire()
        self.last: dict[FrameType, int] = {}
        self.thread = threading.current_thread()


class Scheduler:
    """Runs tasks one at a time.

    Args:
        choose: `choose(enabled, current)` returns the task that goes on at each point.
        file: of the code whose steps are points.
        at_step: called in a task before each of its steps.
    """

    def __init__(
        self, choose: Callable[[list[int], int], int], file: str, at_step: Callable[[Task], None]
    ) -> None:
        self.choose, self.file, self.at_step = choose, file, at_step
        self.tasks: list[Task] = []
        self.current, self.over, self.choosing = -1, False, False
        self.done = threading.Semaphore(0)
        self.found: BaseException | None = None

    def start(self, name: str, run: Callable[[], None], daemon: bool = False) -> None:
        task = Task(name, run, daemon)
        self.tasks.append(task)
        task.thread = threading.Thread(target=self._main, args=(task,), daemon=True)
        task.thread.start()

    def run(self, check: Callable[[], None]) -> None:
        """Run all tasks, and `check` while those that are left wait."""
        self._go(-1)
        assert self.done.acquire(timeout=LIMIT), "a thread waits for something real"
        try:
            if self.found is None:
                check()
        except AssertionError as error:
            self.found = error
        self.over = True
        for task in self.tasks:
            with suppress(RuntimeError):  # it has its turn
                task.turn.release()
        for task in self.tasks:
            task.thread.join(LIMIT)
        if self.found is not None:
            raise self.found

    def _main(self, task: Task) -> None:
        task.turn.acquire()
        if not self.over:
            sys.settrace(partial(self._trace, task))
            try:
                task.run()
            except Over:
                pass
            except BaseException as error:
                self.found = self.found or error
            sys.settrace(None)
        task.ended = True
        if not self.over:
            self._go(self.tasks.index(task))

    def _trace(self, task: Task, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != self.file or self.choosing:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode" and is_step(frame, task.last):
            self.point()
            self.at_step(task)
        return sys.gettrace()

    def point(self, until: Callable[[], bool] | None = None) -> None:
        """Let the schedule choose which task goes on; this one not before `until`."""
        if self.over:
            raise Over
        me = self.tasks[self.current]
        me.until = until
        self._go(self.current)
        me.turn.acquire()
        if self.over:
            raise Over

    def _go(self, before: int) -> None:
        self.choosing = True  # the conditions are code of the file as well
        waiting = [task.ended or (task.until is not None and not task.until()) for task in self.tasks]
        enabled = [number for number, waits in enumerate(waiting) if not waits]
        self.choosing = False
        left = [task.name for task in self.tasks if not task.ended and not task.daemon]
        if self.found is not None or not left or not enabled:
            if left and not enabled and self.found is None:
                self.found = Deadlock(f"deadlock: {left} wait")
            # Daemons that can go on do so before the end.
            if self.found is not None or not enabled:
                self.done.release()
                return
        try:
            self.current = self.choose(enabled, before)
        except AssertionError as error:  # not raised here, in code that may suppress it
            self.found = error
            self.done.release()
            return
        self.tasks[self.current].until = None
        self.tasks[self.current].turn.release()


class Schedule:
    """The choices of one run: first those given, then the current task, or the first that can go on."""

    def __init__(self, given: tuple[int, ...] = (), seed: int | None = None) -> None:
        self.given, self.random = given, None if seed is None else random.Random(seed)
        self.made: list[tuple[list[int], int, int]] = []

    def __call__(self, enabled: list[int], current: int) -> int:
        at = len(self.made)
        if at < len(self.given):
            chosen = self.given[at]
        elif self.random is not None and self.random.random() < 0.2:
            chosen = self.random.choice(enabled)
        else:
            chosen = current if current in enabled else enabled[0]
        self.made.append((enabled, current, chosen))
        assert chosen in enabled, (at, enabled, current, chosen)
        assert at < 2000, "a run does not end"
        return chosen


def explore(run: Callable[[Schedule], None], switches: int) -> int:
    """Run every schedule with at most this many switches away from a task that could go on; return their number."""
    todo: list[tuple[tuple[int, ...], int]] = [((), switches)]
    count = 0
    while todo:
        given, left = todo.pop()
        schedule = Schedule(given)
        run(schedule)
        count += 1
        chosen = tuple(choice for _, _, choice in schedule.made)
        for at in range(len(given), len(chosen)):
            enabled, current, _ = schedule.made[at]
            costs = current in enabled
            if left or not costs:
                others = [other for other in enabled if other != chosen[at]]
                todo.extend(((*chosen[:at], other), left - costs) for other in others)
    return count


class Context(ShmContext):
    """The words of a context, without a segment."""

    def __init__(self) -> None:
        self.words = np.zeros(words_for(1), np.int64)
        self.address = address_of(self.words)


class Condition:
    """A Condition of cooperative threads; entering it is one step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.is_held = scheduler, False

    def __enter__(self) -> None:
        if self.is_held:
            self.scheduler.point(lambda: not self.is_held)
        self.is_held = True

    def __exit__(self, *_: Any) -> None:
        self.is_held = False

    def wait_for(self, condition: Callable[[], bool], _: float) -> None:
        self.is_held = False
        self.scheduler.point(lambda: condition() and not self.is_held)
        self.is_held = True

    def notify_all(self) -> None:
        pass


class Event:
    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler, self.is_set = scheduler, False

    def set(self) -> None:
        self.is_set = True

    def wait(self, _: float) -> bool:
        if not self.is_set:
            self.scheduler.point(lambda: self.is_set)
        return True


class Model:
    """One run of a program under one schedule.

    Args:
        programs: of the callers.
        ends: "close" or "abort": another thread does that to the group.
        dies: the peer dies before it begins its last call.
        interrupt: an exception at this step of the first caller.
        long, mismatch, changed: a call whose entry returns once although the peers have arrived; one from which the
            peers' calls differ; one whose array is changed while it runs.
    """

    def __init__(
        self,
        schedule: Schedule,
        *programs: str,
        ends: str = "",
        dies: bool = False,
        interrupt: int = 0,
        long: int = 0,
        mismatch: int = 0,
        changed: int = 0,
        module: ModuleType = inline_start,
    ) -> None:
        self.programs = [[(op.split()[0], int(op.split()[1])) for op in p.split(", ")] for p in programs]
        self.ends, self.dies, self.left = ends, dies, interrupt
        self.long, self.mismatch, self.changed = long, mismatch, changed
        self.context, self.gate = Context(), Gate("model", [0], 0, LIMIT)
        self.words = self.context.words
        self.came, self.mapped, self.interrupted = 0, True, False
        self.order: list[int] = []
        self.numbers: dict[int, int] = {}
        self.worked: set[int] = set()
        self.read: list[int] = []
        self.works: dict[int, Any] = {}
        self.ended: dict[int, BaseException | None] = {}
        self.jobs: list[tuple[int, Any]] = []
        self.scheduler = Scheduler(schedule, str(module.__file__), self._interrupt)
        made, mine = self.scheduler.start, self
        coop = SimpleNamespace(
            Condition=lambda: Condition(mine.scheduler),
            Thread=lambda target, name, daemon: SimpleNamespace(start=lambda: made(name, target, daemon)),
            Event=lambda: Event(mine.scheduler),
            TIMEOUT_MAX=threading.TIMEOUT_MAX,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "threading", coop)
            patch.setattr(core_work, "threading", coop)
            patch.setattr(module, "watch", SimpleNamespace(call=self._watched))
            self.inline = module.InlineStart(
                self.gate, self.context, self._resume, self._torn, lambda: None, 1, lambda number: None
            )
            for number, program in enumerate(self.programs):
                made(f"caller {number}", lambda p=program: self._caller(p))
            made("progress", self._progress, True)
            made("peer", self._peer, True)
            if ends:
                made("closer", self._close if ends == "close" else self._abort)
            self.scheduler.run(self._check)

    def _check(self) -> None:
        calls = [[k for op, k in program if op in ("async", "sync")] for program in self.programs]
        for program in calls:
            begun = [k for k in self.order if k in program]
            assert begun == sorted(begun), f"calls began in the order {begun}"
        assert len(self.order) == len(set(self.order)), f"a call began twice: {self.order}"
        assert len(self.read) == len(set(self.read)), f"a call was run twice: {self.read}"
        assert self.words[words.BUSY] == (0 if self.mapped else -2), "the context is left behind"
        assert self.inline._open is None, "an open call is left behind"
        for k in (k for program in calls for k in program):
            if k in self.works:
                assert self.works[k].ended, f"call {k} is lost"
                assert k not in self.read or self.works[k].error is None, (
                    f"call {k} is complete, and its Work failed"
                )
                self.ended[k] = self.works[k].error
            if self.interrupted and isinstance(self.ended.get(k, KeyboardInterrupt()), KeyboardInterrupt):
                continue  # not begun, or complete, or its group has failed
            assert (self.ended[k] is None) == (k in self.read), f"call {k} has the wrong outcome"
        if not (self.ends or self.dies or self.interrupted or self.mismatch or self.changed):
            assert sorted(self.read) == sorted(k for program in calls for k in program), "calls failed"

    # ---- the package's other code, reduced to what matters here

    class Entry:
        name = "all_reduce"

        def __init__(self, model: Model, k: int) -> None:
            self.model, self.k = model, k

        def call(self, handle: int, *_: Any) -> int:
            return self.model._run(handle - self.model.context.address, self.k)

    def _run(self, tags: int, k: int) -> int:
        w, me = self.words, threading.get_ident()
        if tags & RESUMED == 0:
            if (tags & PREPARED == 0 and w[words.SHUT] | w[words.PENDING]) or w[words.BUSY] != 0:
                return LATER
            w[words.BUSY] = me
            w[words.CALLS] += 1
            self.order.append(k)
            self.numbers[k] = int(w[words.CALLS])
        assert w[words.BUSY] == me, f"call {k} is carried on by a thread that does not own it"
        assert self.mapped, f"call {k} goes on in memory that was unmapped"
        w[words.LATE] = 0
        if k == self.changed and k in self.worked:
            return LATER
        if self.came < self.numbers[k]:
            return AGAIN
        if k == self.mismatch:
            w[words.LATE] = -1
            return MISMATCH
        if k in (self.long, self.changed) and k not in self.worked:
            self.worked.add(k)
            return WORKED
        w[words.LATE], w[words.FINISHED], w[words.BUSY] = -1, self.numbers[k], 0
        self.read.append(k)
        return DONE

    def _resume(self, code: int, entry: Any, *_: Any) -> bool:
        while code in (AGAIN, WORKED):
            if self.gate.failure is not None:
                raise self.gate.failure
            if code == AGAIN:
                needs = self.numbers[entry.k]
                self.scheduler.point(lambda n=needs: self.came >= n or self.gate.failure is not None)
            code = entry.call(self.context.address | RESUMED)
        if code == MISMATCH:
            self.context.let_go()
            raise MismatchError("the calls differ")
        return code == DONE

    def _torn(self, entry: Any, error: BaseException, *_: Any) -> None:
        if self.words[words.BUSY] == threading.get_ident():
            self._fail(AbortedError("interrupted"))
            self.words[words.BUSY] = 0
        raise error

    def _fail(self, error: Any) -> None:
        self.gate.failure = self.gate.failure or error
        self.words[words.SHUT] = 1

    def _watched(self, *_: Any) -> int:
        self.scheduler.point()
        return DONE if self.words[words.BUSY] == OPEN else WORKED

    # ---- threads

    def _caller(self, program: list[tuple[str, int]]) -> None:
        with suppress(KeyboardInterrupt):
            for op, k in program:
                self.scheduler.point()
                with suppress(AbortedError, MismatchError, PeerDiedError):
                    getattr(self, "_" + op)(self.Entry(self, k), k)

    def _async(self, entry: Any, k: int) -> None:
        try:
            work = self.inline.begin(entry, None)
        except BaseException as error:
            self.ended[k] = error
            raise
        self.works[k] = work if work is not None else self._submit(entry, k)

    def _submit(self, entry: Any, k: int) -> Any:
        work = core_work.Work("queued")
        if self.gate.closed or self.gate.failure is not None:
            work.complete(error=AbortedError("ended"))
        else:
            self.words[words.PENDING] += 1
            self.jobs.append((k, work))
        return work

    def _sync(self, entry: Any, k: int) -> None:
        try:
            code = entry.call(self.context.address)
            if code == LATER and self.inline.carry_on():
                code = entry.call(self.context.address)
            if code == LATER and self.words[words.PENDING]:
                self.works[k] = self._submit(entry, k)
                self.works[k].wait()
                return
            if code == LATER:
                self._prepared(entry)
            elif not self._resume(code, entry):
                raise AbortedError("changed")
        except BaseException as error:
            self.ended[k] = error
            if self.words[words.BUSY] == threading.get_ident():
                with suppress(BaseException):
                    self._torn(entry, error)
            raise
        self.ended[k] = None

    def _prepared(self, entry: Any) -> None:
        """See `Calls.prepared`."""
        while True:
            if self.gate.closed or self.gate.failure is not None:
                raise AbortedError("ended")
            code = entry.call(self.context.address | PREPARED)
            if code != LATER:
                if not self._resume(code, entry):
                    raise AbortedError("changed")
                return
            if not self.inline.carry_on():
                self.scheduler.point(lambda: self.words[words.BUSY] <= 0 or self.gate.closed)

    def _wait(self, entry: Any, k: int) -> None:
        if k in self.works:
            self.works[k].wait()
            assert self.works[k].ended

    def _poll(self, entry: Any, k: int) -> None:
        if k in self.works:
            self.works[k].is_completed()

    def _progress(self) -> None:
        while True:
            self.scheduler.point(lambda: bool(self.jobs))
            k, work = self.jobs.pop(0)
            entry = self.Entry(self, k)
            try:
                self._prepared(entry)
            except (AbortedError, MismatchError, PeerDiedError) as error:
                if self.words[words.BUSY] == threading.get_ident():
                    self._fail(AbortedError("interrupted"))
                    self.words[words.BUSY] = 0
                self.words[words.PENDING] -= 1
                work.complete(error=error)
            else:
                self.words[words.PENDING] -= 1
                work.complete()

    def _peer(self) -> None:
        calls = sum(op in ("async", "sync") for program in self.programs for op, _ in program)
        for _ in range(calls - self.dies):
            self.scheduler.point()
            self.came += 1
        if self.dies:
            self.scheduler.point()
            self._fail(PeerDiedError("the peer died"))

    def _abort(self) -> None:
        self.scheduler.point()
        self._fail(AbortedError("aborted"))

    def _close(self) -> None:
        """See `ProcessGroup.close` and `ShmBackend.close`."""
        self.scheduler.point()
        if self.words[words.BUSY] or self.words[words.PENDING]:
            self._fail(AbortedError("closed while operations were under way"))
        self.gate.closed = True
        self.scheduler.point()
        jobs, self.jobs = self.jobs, []
        self.words[words.PENDING] -= len(jobs)
        for _, work in jobs:
            work.complete(error=AbortedError("destroyed"))
        self.words[words.SHUT] = 1
        self.inline.close()
        self.scheduler.point(lambda: self.words[words.BUSY] == 0)
        self.words[words.BUSY], self.mapped = -2, False

    def _interrupt(self, task: Task) -> None:
        """Act as a signal handler that raises an exception, at one step of the first caller."""
        if self.left and task is self.scheduler.tasks[0]:
            self.left -= 1
            if not self.left:
                self.interrupted = True
                raise KeyboardInterrupt


def explored(*programs: str, seeds: int = 150, **options: Any) -> None:
    """Run the model under random schedules."""
    for seed in range(seeds):
        Model(Schedule(seed=seed), *programs, **options)


PROGRAMS = {
    "one after the other": ["async 1, async 2, wait 2, wait 1"],
    "waiting between": ["async 1, wait 1, sync 2"],
    "polling": ["async 1, poll 1, sync 2, poll 1"],
    "nobody waits": ["async 1"],
    "two callers": ["async 1, wait 1", "async 2, sync 3"],
    "one waits for the other's": ["async 1, async 2", "wait 1, sync 3, wait 2"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_call_is_carried_out_once_and_in_order(name: str) -> None:
    explored(*PROGRAMS[name], long=1)


def test_a_call_and_its_wait_under_every_schedule_with_one_switch() -> None:
    assert explore(lambda schedule: Model(schedule, "async 1, wait 1") and None, 1) > 500


@pytest.mark.parametrize("wrong", ["mismatch", "changed"])
def test_a_call_that_goes_wrong_leaves_nothing_behind(wrong: str) -> None:
    explored("async 1, wait 1, async 2", **{wrong: 1})


@pytest.mark.parametrize("ends", ["abort", "close"])
@pytest.mark.parametrize("program", ["async 1, wait 1", "async 1, async 2"])
def test_whatever_ends_the_group_ends_every_call(program: str, ends: str) -> None:
    explored(program, ends=ends)


def test_a_dead_peer_ends_every_call() -> None:
    explored("async 1, async 2, wait 2", dies=True)


@pytest.mark.parametrize("program", ["async 1, wait 1", "async 1, async 2, wait 1"])
def test_an_exception_at_any_step_of_the_caller_leaves_nothing_behind(program: str) -> None:
    steps = []
    for seed in (None, 0, 1, 2):
        for step in count(1):
            if not Model(Schedule(seed=seed), program, interrupt=step).interrupted:
                break
        steps.append(step)
    assert max(steps) > 20


def planted(change: str) -> ModuleType:
    """Return inline_start.py with one change: "this => that"."""
    source, (old, new) = inspect.getsource(inline_start), change.split(" => ")
    assert source.count(old) == 1, old
    made = ModuleType(inline_start.__name__)
    made.__file__ = f"inline_start with {new}"
    made.__package__ = inline_start.__package__
    exec(compile(source.replace(old, new), made.__file__, "exec"), made.__dict__)
    return made


FAULTS = {
    "the watcher is not woken": "elif not self._awake: => elif False:",
    "the watcher sleeps without a second look": "if self._busy[0] != OPEN and not self._gate.closed: => if True:",
    "a closed group is not noticed": "if self._gate.closed:\n            self.close() => if False:\n            pass",
    "an open call is not failed": "        if take_over.call(self._c) == DONE: =>         if False:",
    "an open call is taken by two": "if take_over.call(self._c) != DONE: => if self._busy[0] != OPEN:",
    "an open call is kept": "self._open, work = work, None\n                    self._busy[0] = OPEN => pass",
    "the Work is set late":
        "self._open = work\n        self._busy[0] = OPEN\n        self._look_after_open_call()\n        return => "
        "self._busy[0] = OPEN\n        self._look_after_open_call()\n        self._open = work\n        return",
    "the Work stays": "self._open = self._open, None\n            assert => _ = self._open, None\n            assert",
    "the Work is not completed": "            return True\n        work.complete() =>             return True",
    "the error is lost": "work.complete(error=reason) => work.complete()",
    "a broken call counts as not begun": "return BROKEN if begun => return NOT_BEGUN if begun",
    "a call is begun anew": "self._c | (RESUMED | BRIEF if briefly else RESUMED) => self._c | BRIEF",
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_model_finds(name: str) -> None:
    module = planted(FAULTS[name])
    options: list[dict[str, Any]] = [
        {},
        {"ends": "close"},
        {"ends": "abort"},
        {"changed": 1},
        {"mismatch": 1},
    ]

    def run_programs() -> None:
        for seed, option in product(range(2000), options):
            for program in ("async 1, async 2, wait 1", "async 1"):
                Model(Schedule(seed=seed), program, module=module, **option)

    with pytest.raises((AssertionError, AttributeError, TypeError, UsageError)):
        run_programs()
