"""Messages between GPUs by NCCL: the code of fastcoll/gpu/nccl/ under every schedule of small programs.

NcclCarrier, NcclMessages, Direction, NcclMessage and their events are the real ones. Everything below them is replaced
by fakes whose steps the explorer orders: the CPU backend's messages, the thread of each direction, NCCL, and CUDA. It
takes one step at a time:

    receive   a rank's program posts its next receive
    header    the next header from one rank to another arrives, and is matched or stored
    taken     the sender learns that its oldest header to a peer was matched
    thread    a direction's thread continues until it blocks again, or its job ends
    fails     a rank sees that the group has failed, in the worlds where it may

All other actions happen as soon as they can, because their time makes no difference: sends and waits of the programs,
and answers, which only their direction's thread reads. GPUs run at the end: they execute the queued work, and no rank
queries them.

The explorer does not continue a schedule that leads to a state which another one has reached.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest

from fastcoll.core.work import Work, mark_progressing
from fastcoll.errors import AbortedError, GroupError, MismatchError
from fastcoll.gpu import runtime
from fastcoll.gpu.device_array import DeviceArray, OnDevice
from fastcoll.gpu.nccl import bindings, direction
from fastcoll.gpu.nccl.backend import NcclCarrier
from fastcoll.gpu.nccl.direction import Direction, NcclMessage
from fastcoll.gpu.nccl.messages import ANSWER, ControlMessage, NcclMessages
from fastcoll.gpu.stream_work import StreamWork

from .planting import plant

Name = tuple[int, int]
"""A message: its rank, and its number there."""
HERE = threading.local()
DEADLINE = 60.0


class Op(NamedTuple):
    """An operation of a rank: "send" to a peer, "recv" from one or any (None), "wait" for operation number `peer`."""

    action: str
    peer: int | None
    tag: int = 0
    nbytes: int = 4


class Blocked(BaseException):
    """A wait of a rank's program that cannot continue now; it is repeated later."""


class Abandoned(BaseException):
    """The schedule is not continued."""


class Event(threading.Event):
    """Replaces the `threading.Event` for which a rank's program waits."""

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            raise Blocked
        return True


class Thread:
    """A ProgressQueue whose jobs continue, when the explorer chooses so, until they block or end.

    A job that takes an answer begins when the answer has arrived, so it does not block. The creation of a communicator
    may block: it gets a thread of the operating system. All other jobs run on the explorer's thread, which takes a
    tenth of the time.
    """

    def __init__(self, name: str) -> None:
        self.run, self.name, self.at = Run.now, name, "idle"
        self.group = self.run.groups[int(name.split("-")[0])]
        self.jobs: deque[Any] = deque()
        self.ready: Callable[[], bool] = lambda: False
        self._wake: Any = None  # a lock for which the thread of the operating system waits
        self.run.threads[name] = self

    @classmethod
    def named(cls, name: str) -> Thread:
        return Run.now.threads.get(name) or cls(name)

    def submit(self, describe: str, job: Any) -> Work:
        self.jobs.append(job)
        return Work(describe)

    def can_go_on(self) -> bool:
        if self.at != "idle":
            return self.ready()
        if not self.jobs or _action(self.jobs[0]) != "_take_answer":
            return bool(self.jobs)
        (dst,) = self.jobs[0].args[2].args
        return self.group.failure is not None or any(
            source == dst and control.tag == ANSWER for source, control in self.group.stored
        )

    def go_on(self) -> None:
        if self.at == "idle":
            job = self.jobs.popleft()
            self.at, HERE.thread = "busy", self
            if _action(job) != "_answer" or job.args[0].is_connected:
                job()
                self.at, HERE.thread = "idle", None
                return
            HERE.thread, self._wake = None, threading.Lock()
            self._wake.acquire()
            threading.Thread(target=self._do, args=[job], daemon=True).start()
        else:
            self._wake.release()
        assert self.run.back.acquire(timeout=DEADLINE), f"{self.name} blocks where the explorer cannot see it"

    def _do(self, job: Callable[[], None]) -> None:
        mark_progressing()
        HERE.thread = self
        job()
        self.at, self._wake = "idle", None
        self.run.back.release()

    def block(self, at: str, ready: Callable[[], bool]) -> None:
        """Wait, on this thread, until the explorer continues it; it may do so once `ready`."""
        assert self._wake is not None, f"{self.name} blocks: {at}"
        self.at, self.ready = at, ready
        if not self.run.abandoned:
            self.run.back.release()
            self._wake.acquire()
        if self.run.abandoned:
            raise Abandoned
        self.at = "busy"


def _action(job: Any) -> str:
    """Return the method of NcclMessages that a job calls."""
    return str(job.args[2].func.__name__)


class Watcher:
    """Keeps Works until the group fails; on the GPU they end when everything else has."""

    def __init__(self, *_: Any) -> None:
        self.works: list[StreamWork] = []

    def add(self, work: StreamWork) -> None:
        self.works.append(work)

    def break_off(self, error: GroupError) -> None:
        for work in self.works:
            work.settle(error)


class Posted(Work):
    """A control message that is sent, or an array that waits for one."""

    def __init__(self, array: Any, peer: int | None, tag: int, message: Name | None) -> None:
        super().__init__()
        self.array, self.peer, self.tag, self.message = array, peer, tag, message
        control = ControlMessage.from_array(array)
        self.value = (peer, tag, control.number, control.decision, control.info.identity[:16])

    def await_end(self, limit: float) -> bool:
        HERE.thread.block("waiting for an answer", lambda: self.ended)
        return True


class Group:
    """The part of a ProcessGroup that messages need; its mailbox keeps the order between two ranks."""

    size = 0

    def __init__(self, run: Run, rank: int) -> None:
        self.run, self.rank, self.ranks, self.name = run, rank, range(len(run.programs)), f"{rank}"
        self.timeout = 60.0
        self.failure: GroupError | None = None
        self.p2p = self
        self.monitor = SimpleNamespace(name=lambda rank: f"rank {rank}", decide=lambda *_: None)
        self.wanted: list[Posted] = []
        self.stored: list[tuple[int, Posted]] = []

    def post_send(self, x: Any, dst: int, tag: int) -> Work:
        self._check()
        control = Posted(x.array.copy(), dst, tag, None)
        if tag == ANSWER:
            self.run.groups[dst].stored.append((self.rank, control))
        else:
            self.run.flying[self.rank, dst].append(control)
        return control

    def post_receive(self, x: Any, src: int | None, tag: int, status: Any = None) -> Work:
        self._check()
        receive = Posted(x.array, src, tag, None if tag == ANSWER else self.run.posting)
        for source, control in self.stored:
            if control.tag == tag and src in (None, source):
                self.stored.remove((source, control))
                self._match(control, source, receive)
                return receive
        self.wanted.append(receive)
        return receive

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def arrive(self, source: int, control: Posted) -> None:
        for receive in self.wanted:
            if control.tag == receive.tag and receive.peer in (None, source):
                self.wanted.remove(receive)
                self._match(control, source, receive)
                return
        self.stored.append((source, control))

    def _match(self, control: Posted, source: int, receive: Posted) -> None:
        receive.array[...] = control.array
        if control.tag == ANSWER:
            control.complete()
        else:
            assert receive.message is not None
            self.run.partners[receive.message] = (source, ControlMessage.from_array(control.array).number)
            self.run.taken[source, self.rank].append(control)
        receive.complete(source)

    def fail(self, error: GroupError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        run = self.run
        sent = [
            control
            for (source, _), controls in (*run.flying.items(), *run.taken.items())
            for control in controls
            if source == self.rank
        ]
        sent += [control for group in run.groups for source, control in group.stored if source == self.rank]
        for work in (*self.wanted, *sent):
            if not work.ended:
                work.complete(None, error)
        self.wanted.clear()


class Communicator:
    """One end of a communicator of two ranks, which pairs any operations in the order in which they are queued."""

    def __init__(self, run: Run, line: Any, side: int) -> None:
        self.run, self.line, self.side = run, line, side

    @classmethod
    def make(cls, library: Any, size: int, side: int, identity: bytes, look: Any) -> Communicator:
        thread: Thread = HERE.thread
        come, group = thread.run.come[identity], thread.group
        assert (size, side in come) == (2, False), "two ranks of one number"
        come.add(side)
        if len(come) < 2:
            thread.block("creating a communicator", lambda: len(come) == 2 or group.failure is not None)
        if group.failure is not None:
            raise group.failure
        return cls(thread.run, identity, side)

    @classmethod
    def shared(cls, rank: int, peer: int) -> Communicator:
        """For a planted change: the only communicator of two ranks, for both directions."""
        return cls(Run.now, tuple(sorted((rank, peer))), int(rank > peer))

    def group(self, doing: str) -> Any:
        return nullcontext()

    def queue(self, operation: str, stream: int, address: int, nbytes: int, dtype: int, peer: int) -> None:
        lines = self.run.lines[self.line]
        lines[self.side].append((operation, _name(address), nbytes))
        self.run.queue(stream, ("nccl", self.line, self.side, len(lines[self.side]) - 1))

    def abort(self) -> None: ...


class Run:
    """One schedule; also NCCL's library and CUDA's runtime.

    Attributes:
        flying, taken: for each pair of ranks, control messages in flight, and those that the sender will learn about.
        partners: the message that each receive was matched with.
        come, lines: for each communicator, the ranks that have joined, and the queue of each of the two.
        items: the contents of each stream; waiting for an event means waiting for the first items of a stream.
    """

    version = 22005
    now: ClassVar[Run]

    def __init__(self, programs: Sequence[Sequence[Op]], fails: bool) -> None:
        self.programs, self.may_fail = programs, fails
        self.back, self.abandoned = threading.Lock(), False
        self.back.acquire()
        self.threads: dict[str, Thread] = {}
        self.flying: dict[Any, deque[Posted]] = defaultdict(deque)
        self.taken: dict[Any, deque[Posted]] = defaultdict(deque)
        self.partners: dict[Name, Name] = {}
        self.come: dict[bytes, set[int]] = defaultdict(set)
        self.lines: dict[Any, Any] = defaultdict(lambda: ([], []))
        self.streams: list[Any] = []
        self.identities: list[bytes] = []
        self.items: dict[Any, list[Any]] = defaultdict(list)
        self.events: list[Any] = []
        self.posting: Name | None = None
        self.marks: dict[Name, int] = {}
        self.at = [0] * len(programs)
        self.works: list[dict[int, Any]] = [{} for _ in programs]
        self.groups = [Group(self, rank) for rank in range(len(programs))]
        Run.now = self
        runtime.runtime.cache_clear()
        self.carriers = [NcclCarrier(group) for group in self.groups]  # type: ignore[arg-type]
        self.go_on()

    # ---- CUDA and NCCL -------------------------------------------------------------------------------

    def on(self, device: int) -> Any:
        return nullcontext()

    def board(self, device: int) -> bytes:
        return bytes([device] * 16)

    def unique_id(self) -> bytes:
        name = str(HERE.thread.name).encode()
        self.identities.append(name)
        return (name + b"/%d" % self.identities.count(name)).ljust(128, b"\0")

    def new_stream(self, device: int) -> int:
        thread = getattr(HERE, "thread", None)
        name = f"{device}" if thread is None else thread.name
        self.streams.append((name, sum(other[0] == name for other in self.streams)))
        return len(self.streams) + 100

    def queue(self, stream: int, item: Any) -> None:
        self.items[self._stream(stream)].append(item)

    def _stream(self, stream: int) -> Any:
        return stream if stream < 100 else self.streams[stream - 101]

    def new_event(self, device: int) -> int:
        self.events.append(None)
        return len(self.events) - 1

    def record(self, event: int, stream: int) -> None:
        name = self._stream(stream)
        self.events[event] = (name, len(self.items[name]))

    def copy(self, dst: int, src: int, nbytes: int, stream: int) -> None:
        self.queue(stream, ("copy", _name(dst), _name(src)))

    def order(self, stream: int, event: int) -> None:
        self.queue(stream, ("behind", *self.events[event]))

    def run_gpus(self) -> None:
        """Execute queued work as far as possible, and check the results."""
        at: dict[Any, int] = dict.fromkeys([*range(len(self.programs)), *self.items], 0)
        done: set[Name] = set()
        goes_on = True
        while goes_on:
            goes_on = False
            for stream, items in self.items.items():
                while at[stream] < len(items) and self._can_run(items[at[stream]], at, done):
                    at[stream] += 1
                    goes_on = True
        left = {stream: items[at[stream] :] for stream, items in self.items.items() if items[at[stream] :]}
        assert not left, f"deadlock on the GPUs: {left}"

    def _can_run(self, item: Any, at: dict[Any, int], done: set[Name]) -> bool:
        action, *rest = item
        if action == "behind":
            stream, count = rest
            return at[stream] >= count if stream in at else count == 0
        if action == "read":
            assert rest[0] in done, f"{rest[0]} is used before it has come"
            return True
        if action == "copy":
            assert self.partners.get(rest[0]) == rest[1], f"{rest[0]} gets another message, {rest[1]}"
            done |= {*rest}
            return True
        line, side, number = rest
        rank, _ = name = self.lines[line][side][number][1]
        assert at[rank] >= self.marks[name], f"{name} does not wait for what its array's stream held"
        both = [queued[number : number + 1] for queued in self.lines[line]]
        if not all(both) or not self._is_next(line, 1 - side, number, at):
            return False
        (operation, name, nbytes), (other_operation, other, other_nbytes) = both[side][0], both[1 - side][0]
        if operation == other_operation:
            return False
        receive, send = (name, other) if operation == "recv" else (other, name)
        assert self.partners.get(receive) == send, f"{receive} gets another message, {send}"
        assert nbytes == other_nbytes, "the two sides differ in size"
        done |= {name}
        return True

    def _is_next(self, line: Any, side: int, number: int, at: dict[Any, int]) -> bool:
        """Return whether a rank's stream has reached or passed its operation on a communicator."""
        item = ("nccl", line, side, number)
        return any(item in items[: at[stream] + 1] for stream, items in self.items.items())

    # ---- steps ---------------------------------------------------------------------------------------

    def steps(self) -> list[tuple[str, Any]]:
        """Return the possible next steps."""
        found: list[tuple[str, Any]] = [
            ("receive", rank)
            for rank, program in enumerate(self.programs)
            if self.at[rank] < len(program) and program[self.at[rank]].action == "recv"
        ]
        found += [("header", pair) for pair, controls in self.flying.items() if controls]
        found += [("taken", pair) for pair, controls in self.taken.items() if controls]
        found += [("thread", name) for name, thread in self.threads.items() if thread.can_go_on()]
        if self.may_fail:
            found += [("fails", group.rank) for group in self.groups if group.failure is None]
        return found

    def take(self, step: tuple[str, Any]) -> None:
        action, which = step
        if action == "receive":
            self._post(which, self.programs[which][self.at[which]])
        elif action == "header":
            control = self.flying[which].popleft()
            if not control.ended:
                self.groups[which[1]].arrive(which[0], control)
        elif action == "taken":
            control = self.taken[which].popleft()
            if not control.ended:
                control.complete()
        elif action == "thread":
            self.threads[which].go_on()
        else:
            self.carriers[which].fail(AbortedError("enough"))
        if not self.may_fail:
            for group in self.groups:
                assert group.failure is None, f"the group fails: {group.failure}"
        self.go_on()

    def go_on(self) -> None:
        """Continue each rank's program while its sends and waits do not block."""
        for rank, program in enumerate(self.programs):
            while self.at[rank] < len(program):
                op, before = program[self.at[rank]], self.at[rank]
                if op.action == "send":
                    self._post(rank, op)
                elif op.action == "wait":
                    self._wait(rank, self.works[rank][op.peer or 0])
                if self.at[rank] == before:
                    break

    def _post(self, rank: int, op: Op) -> None:
        mail, number = self.carriers[rank].messages, len(self.works[rank])
        self.posting = (rank, number)
        x = OnDevice(DeviceArray(_address((rank, number)), np.dtype("u1"), (op.nbytes,), rank, rank, None))
        post: Any = mail.isend if op.action == "send" else mail.irecv
        self.marks[rank, number] = len(self.items[rank])
        with self._ending(rank):
            self.works[rank][self.at[rank]] = post(x, op.peer, op.tag)
            self.at[rank] += 1

    def _wait(self, rank: int, work: Any) -> None:
        """Wait for a message, if that does not block; later work on the stream then uses the array."""
        with self._ending(rank):
            try:
                work.wait()
                if work.nbytes:
                    self.queue(rank, ("read", (rank, work.number)))
            except MismatchError:
                pass
            except Blocked:
                return
            self.at[rank] += 1

    @contextmanager
    def _ending(self, rank: int) -> Iterator[None]:
        """A program ends when the group has failed."""
        try:
            yield
        except GroupError:
            assert self.groups[rank].failure is not None
            self.at[rank] = len(self.programs[rank])

    def state(self) -> Any:
        """Return the state that schedules may have in common; it excludes the numbers of events."""
        return (
            tuple(self.at),
            _of_pairs(self.flying),
            _of_pairs(self.taken),
            tuple(self._of_rank(rank) for rank in range(len(self.groups))),
            frozenset((name, thread.at, _numbers(thread.jobs)) for name, thread in self.threads.items()),
            frozenset((line, *map(tuple, queued)) for line, queued in self.lines.items()),
            frozenset((stream, tuple(items)) for stream, items in self.items.items()),
        )

    def _of_rank(self, rank: int) -> Any:
        group, mail = self.groups[rank], self.carriers[rank].messages
        return (
            tuple((receive.peer, receive.tag, receive.message) for receive in group.wanted),
            tuple((source, control.value) for source, control in group.stored),
            tuple(sorted(mail._posted)),
            frozenset((end, one.is_connected) for end, one in mail._directions.items()),
            tuple(work.ended for work in self.works[rank].values()),
            group.failure is None,
        )

    def check_the_end(self) -> None:
        """Check that nothing can happen any longer."""
        assert all(thread.at == "idle" for thread in self.threads.values()), "deadlock: a thread waits"
        for rank, program in enumerate(self.programs):
            assert self.at[rank] == len(program), f"deadlock: rank {rank} waits in {program[self.at[rank]]}"
            carrier = self.carriers[rank]
            assert not carrier.messages._posted, f"rank {rank}: a message was neither queued nor ended"
            if self.may_fail:
                assert all(work.ended for work in self.works[rank].values()), "a message does not end"
            events = carrier.messages._staging.events
            free = sorted(event for events in events._free.values() for event in events)
            made = sorted(event for _, event in events._all)
            assert self.may_fail or free == made, "an event is lost, or twice free"
        if not self.may_fail:
            self.run_gpus()

    def abandon(self) -> None:
        self.abandoned = True
        for thread in self.threads.values():
            if thread.at != "idle":
                thread.go_on()


def _address(name: Name) -> int:
    """Return the address of a message's array."""
    return 1_000_000 * name[0] + 1000 * name[1]


def _name(address: int) -> Name:
    return address // 1_000_000, address % 1_000_000 // 1000


def _of_pairs(controls: dict[Any, deque[Posted]]) -> Any:
    return frozenset((pair, tuple(one.value for one in some)) for pair, some in controls.items() if some)


def _numbers(jobs: Any) -> Any:
    """Return the numbers of the messages that jobs handle, if they know them: a receiver's."""
    return tuple(job.args[2].args[0] for job in jobs)


@contextmanager
def installed() -> Iterator[None]:
    """Replace NCCL, CUDA and threads in the code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "Runtime", lambda: Run.now)
        patch.setattr(bindings, "library", lambda: Run.now)
        patch.setattr(direction, "ProgressQueue", Thread.named)
        patch.setattr(direction, "Watcher", Watcher)
        patch.setattr(direction, "Communicator", Communicator)
        patch.setattr(direction, "threading", SimpleNamespace(Event=Event))
        yield
    runtime.runtime.cache_clear()


def explore(programs: Sequence[Sequence[Op]], fails: bool = False) -> int:
    """Follow all schedules; return the number of states."""
    seen: set[Any] = set()
    left: list[tuple[Any, ...]] = [()]
    with installed():
        while left:
            schedule = left.pop()
            run = Run(programs, fails)
            try:
                for step in schedule:
                    run.take(step)
                while (state := run.state()) not in seen:
                    seen.add(state)
                    steps = run.steps()
                    if not steps:
                        run.check_the_end()
                        break
                    left += [(*schedule, step) for step in steps[1:]]
                    schedule = (*schedule, steps[0])
                    run.take(steps[0])
            finally:
                run.abandon()
    return len(seen)


def send(peer: int, tag: int = 0, nbytes: int = 4) -> Op:
    return Op("send", peer, tag, nbytes)


def recv(peer: int | None, tag: int = 0, nbytes: int = 4) -> Op:
    return Op("recv", peer, tag, nbytes)


def wait(index: int) -> Op:
    return Op("wait", index)


WORLDS = {
    "crossing": [[send(1), recv(1), wait(0), wait(1), send(1)], [send(0), recv(0), wait(1), wait(0), recv(0)]],
    "twice": [[send(peer), recv(peer), wait(1), send(peer), recv(peer), wait(4)] for peer in (1, 0)],
    "tags": [[send(1, 1), send(1, 2), send(1, 1)], [recv(0, 2), recv(0, 1), wait(0), recv(0, 1), wait(1)]],
    "late": [[send(1, 1), send(1, 2)], [recv(0, 2), wait(0), recv(0, 1)]],
    "ping": [[send(1), recv(1), wait(1), send(1)], [recv(0), wait(0), send(0), recv(None)]],
    "any source": [[recv(None), recv(None), wait(0)], [send(0)], [send(0)]],
    "ring": [[send(1), recv(2), wait(1)], [send(2), recv(0), wait(1)], [send(0), recv(1), wait(1)]],
    "fan": [[send(1), send(2)], [recv(0)], [recv(0)]],
    "after": [[recv(1), wait(0), send(1)], [send(0), recv(0)]],
    "empty": [[send(1, 1, 0), send(1, 2), send(1, 3, 0)], [recv(0, 2), recv(0, 1, 0), wait(1), recv(0, 3, 0)]],
    "misfit": [[send(1, 1), send(1, 2), wait(0), wait(1)], [recv(0, 2), recv(0, 1, 8), wait(1), wait(0)]],
    "to itself": [[recv(0), send(1), send(0), wait(0), recv(1)], [recv(None), send(0)]],
}  # fmt: skip
"""Programs of the ranks. In "twice" the second pass already has communicators."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name == "ring")) for name in WORLDS]
)
def test_every_schedule_ends_well(name: str) -> None:
    assert explore(WORLDS[name]) > 10


@pytest.mark.parametrize("name", ["late", "ping"])
def test_a_failure_at_any_moment_ends_every_message(name: str) -> None:
    assert explore(WORLDS[name], fails=True) > 100


ANSWERS = "self._group.p2p.post_send(ImportedArray(answer.to_array()), source, ANSWER)"
FOLLOWS = (
    "self._events.give(0, [event for _, event in message.marks]); "
    "own.follow([message.array.stream]); marks = message.marks = []"
)
PLANTS: dict[str, tuple[Any, ...]] = {
    "one thread for all directions": (
        (Direction, "__init__", "ProgressQueue(name)", 'ProgressQueue(f"{group.name}-all")'), "ring", "deadlock"
    ),
    "one communicator for both directions": (
        (Direction, "move", "Communicator.make(", "Communicator.shared(self._group.rank, self._peer) or ("), "twice",
        "deadlock on the GPUs",
    ),
    "the oldest message is sent, not the one that the answer names": (
        (NcclMessages, "_take_answer", "_claimed(answer.number)", "_claimed(min(self._posted))"), "tags",
        "gets another message",
    ),
    "any rank's answer is taken": ((NcclMessages, "_take_answer", "dst, ANSWER", "None, ANSWER"), "fan", "deadlock"),
    "the receiver answers once its side is queued": (
        (NcclMessages, "_answer", ANSWERS, f"direction.move(message, identity); {ANSWERS}; return"), "ping", "deadlock"
    ),
    "wait() does not block until the message is queued": (
        (NcclMessage, "order_streams", "self._begun.wait(ENDLESS)", "pass"), "late", "used before it has come"
    ),
    "streams are followed when a message is queued": (
        (Direction, "_queue", "marks, message.marks = message.marks, []", FOLLOWS), "twice", "deadlock on the GPUs"
    ),
    "nothing of the arrays' streams is waited for": (
        (Direction, "_queue", "own.runtime.order(own.stream, event)", "pass"), "after", "does not wait for"
    ),
    "a message that ends without a move keeps its event": (
        (NcclMessages, "_over", "self._settle(message, error)", "message.settle(error)"), "misfit", "an event is lost"
    ),
    "a failure leaves what is queued": (
        (Direction, "break_off", "self._watcher.break_off(error)", "pass"), "late", "a message does not end", True
    ),
}  # fmt: skip
"""Changes of methods: what is changed, a program, what the explorer says, and whether the group may fail."""


@pytest.mark.parametrize("name", PLANTS)
def test_the_explorer_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, program, found, *fails = PLANTS[name]
    plant(monkeypatch, *change)
    with pytest.raises(AssertionError, match=found):
        explore(WORLDS[program], *fails)
