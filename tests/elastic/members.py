"""The program of ranks and joiners in the tests of elastic jobs; its result is known.

Each step takes a batch of a permutation: w = 3 w + sum of x, modulo P. So the result depends on every step and on the
order of the steps.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import config, elastic
from fastcoll.elastic import growth, training
from fastcoll.job import joining
from fastcoll.system import processes
from fastcoll.testing.worker import Footprint, lasting

N, BATCH, P = 97, 10, 1_000_003
X = np.arange(N) ** 2
SHORT, LONG = 3.0, 120.0  # s, for a world to form: with a stopped member, and otherwise


@dataclass(frozen=True)
class Course:
    """The course of a process.

    Attributes:
        options: the options of `run`.
        backend: the backend of the job.
        epochs: how many epochs to train; fewer if the store has the key "enough" at the end of an epoch.
        seconds: the least duration of a step.
        forming: seconds for a world with joiners to form.
        die: by step and world size, the rank that ends there, and how: "kill", "raise", "interrupt", or "outlive",
            which means that it kills itself once the store is lost. Step -1 is in `on_change`, after a commit.
        at: a function of the package, as module:name, an action when this process calls it, "kill" or "stop", and at
            which call.
        node: the node that this process pretends to be on.
        apart: whether other processes cannot see whether this one lives, as if it were on another machine.
        early: whether a collective is called before `run`.
        runs: how many calls of `run` precede this one.
        later: how many calls of `run` follow.
    """

    options: dict[str, Any] = field(default_factory=dict)
    backend: str = "shm"
    epochs: int = 3
    seconds: float = 0.0
    forming: float = LONG
    die: dict[tuple[int, int], tuple[int, str]] = field(default_factory=dict)
    at: tuple[str, str, int] | None = None
    node: int | None = None
    apart: bool = False
    early: bool = False
    runs: int = 0
    later: int = 0


def expected(steps: int) -> int:
    """Return w after a number of undisturbed steps."""
    sampler, w, done = elastic.Sampler(N, BATCH, seed=5), 0, 0
    while True:
        for step in sampler:
            if done == steps:
                return w
            w, done = (3 * w + int(X[step].sum())) % P, done + 1


def take_part(rank: int, n: int, url: str, address: str, course: Course) -> dict[str, Any]:
    """Run a rank, or with -1 a joiner; return the final state and the observed changes."""
    training._LOOK_SECONDS = 0.02
    training._STORE_SECONDS = LONG  # a thread serves the store, and this machine may be loaded
    growth.FORMING_SECONDS = joining.FORMING_SECONDS = course.forming
    if course.forming == SHORT:
        joining._TRIES = 1000  # a loaded machine may take longer
    by_run = "store" in course.options  # joiners use this timeout too
    os.environ["FASTCOLL_ELASTIC"] = "" if by_run else address
    if rank < 0:
        os.environ["FASTCOLL_JOINER"] = "1"
    config.forget()
    if course.node is not None:
        processes._shm_device = lambda: 1_000_000 + course.node  # type: ignore[assignment, operator]
    if course.apart:
        processes._pid_namespace = lambda: f"pid:[{os.getpid()}]"  # type: ignore[assignment]
    if course.at is not None:
        _arm(*course.at)
    before = Footprint.now()
    seen: dict[str, Any] = {"changes": [], "turns": [], "pid": os.getpid()}
    place = {} if rank < 0 else {"init_method": url, "rank": rank, "world_size": n}
    if place or not by_run:
        dist.init_process_group(course.backend, timeout=LONG, **place)
    if course.early:
        dist.barrier()
    for _ in range(course.runs):
        elastic.run(lambda state: None)(elastic.State(step=0))
    with dist.TCPStore("127.0.0.1", int(address.rpartition(":")[2]), timeout=LONG) as board:
        state: Any = elastic.State(
            w=np.zeros(1, np.int64), step=0, enough=False, rate=n, sampler=elastic.Sampler(N, BATCH, seed=5)
        )

        def change(old: int, new: int) -> None:
            seen["changes"].append((old, new))
            state.rate *= new / old
            victim, how = course.die.get((-1, new), (-1, ""))
            if how:
                state.commit()
                _end(how if victim == dist.get_rank() else "")
                dist.barrier()

        options = {"on_change": change, **course.options}
        try:
            elastic.run(_train, **options)(state, course, board, seen)
            for _ in range(course.later):
                elastic.run(lambda state: None)(elastic.State(step=0))
        except KeyboardInterrupt as error:
            seen["error"] = repr(error)
    seen |= {"w": int(state.w[0]), "step": state.step, "rate": round(state.rate), "size": None}
    if dist.is_initialized():
        seen["size"] = dist.get_world_size()
        dist.destroy_process_group()
    state = None
    return seen | {"left": lasting(before.growth)}


def _train(state: Any, course: Course, board: Any, seen: dict[str, Any]) -> None:
    seen["turns"].append((state.step, dist.get_rank(), dist.get_world_size()))
    with suppress(dist.StoreError):
        board.set(f"in/{os.getpid()}", str(dist.get_world_size()))
        board.set("size", str(dist.get_world_size()))
    while state.sampler.epoch < course.epochs and not state.enough:
        for mine in state.sampler:
            total = X[mine].sum(keepdims=True)
            victim, how = course.die.get((state.step, dist.get_world_size()), (-1, ""))
            _end(how if victim == dist.get_rank() else "", board)
            dist.all_reduce(total)
            assert state.sampler.count <= BATCH
            state.w[:] = (3 * state.w + total) % P
            state.step += 1
            if course.seconds:
                time.sleep(course.seconds)
            state.commit()
        ends = np.zeros(1, np.bool_)
        with suppress(dist.StoreError):
            ends[0] = dist.get_rank() == 0 and board.check(["enough"])
        dist.broadcast(ends, 0)
        state.enough = bool(ends[0])


def _end(how: str, board: Any = None) -> None:
    match how:
        case "outlive":
            with suppress(dist.StoreError):
                while True:
                    board.check(["size"])
                    time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise ValueError("the data has a hole")
        case "interrupt":
            signal.raise_signal(signal.SIGINT)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)


def _arm(place: str, how: str, turn: int) -> None:
    """Have this process end at a call of a function, which other modules may have imported by name."""
    module, _, name = place.partition(":")
    owner: Any = import_module(module)
    *outer, name = name.split(".")
    for each in outer:
        owner = getattr(owner, each)
    function: Callable[..., Any] = getattr(owner, name)

    turns = itertools.count(1)

    def end(*args: Any, **kwargs: Any) -> Any:
        if next(turns) == turn:
            _end(how)
        return function(*args, **kwargs)

    setattr(owner, name, end)
