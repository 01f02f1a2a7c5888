"""Processes of elastic jobs are killed at random; the result of the training must not depend on it.

Most jobs lose one or two of four ranks, or of the joiners that replace them: at a random time, or when the victim calls
a function of a start, a commit, an admission or a recovery. The job must end with exit code 0, and with the result of
an undisturbed training on all ranks. In other jobs a launcher is killed: then its ranks must be killed, and the
launcher and the ranks of another node, with or without the store, must end with an error. Nothing may be left.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from fastcoll.elastic import Sampler
from fastcoll.launch.nodes import free_port
from fastcoll.shm.segment import sweep
from fastcoll.testing.worker import shm_names

from .fleet import left_in_shm, marked
from .report import Report, percentile

_RANKS, _STEPS = 4, 200
_N, _BATCH, _P = (
    97,
    10,
    1_000_003,
)  # of the training: samples, samples of a step, and the modulus of its result
_PROGRAM = """
import importlib, os, sys, time
import numpy as np
import fastcoll as dist
from fastcoll import elastic

steps, n, batch, p = map(int, sys.argv[1:])
x = np.arange(n) ** 2

def arm(who, module, name, count):
    if who != os.environ.get("RANK", "joiner"):
        return
    owner = importlib.import_module(module)
    *classes, name = name.split(".")
    for each in classes:
        owner = getattr(owner, each)
    plain, calls = getattr(owner, name), [0]
    def dying(*args, **kwargs):
        calls[0] += 1
        if calls[0] == int(count):
            os.write(2, b"DIES in it\\n")
            os.kill(os.getpid(), 9)
        return plain(*args, **kwargs)
    setattr(owner, name, dying)

if "SOAK_DIE" in os.environ:
    arm(*os.environ["SOAK_DIE"].split())

@elastic.run
def train(state):
    # If ranks are lost, until joiners have replaced them.
    while state.step < steps or dist.get_world_size() < 4 and state.step < 2000:
        for mine in state.sampler:
            total = x[mine].sum(keepdims=True)
            dist.all_reduce(total)
            state.w[:] = (3 * state.w + total) % p
            state.step += 1
            time.sleep(0.002)
            state.commit()

state = elastic.State(w=np.zeros(1, np.int64), step=0, sampler=elastic.Sampler(n, batch, seed=5))
train(state)
print("learnt", state.step, state.w[0], flush=True)
"""
_PLACES = [
    "fastcoll.job.world _start", "fastcoll.job.joining JoinQueue.wait", "fastcoll.job.joining passes_barrier",
    "fastcoll.elastic.state State.commit", "fastcoll.elastic.state State._keep", "fastcoll.elastic.state State.sync",
    "fastcoll.elastic.state State.restore", "fastcoll.elastic.training _Run._join", "fastcoll.elastic.growth grow",
    "fastcoll.elastic.training _Run._agree", "fastcoll.elastic.training _Run._shrink", "fastcoll.elastic.growth _join",
    "fastcoll.elastic.training _Run._next_attempt", "fastcoll.elastic.training _Run._grow",
    "fastcoll.elastic.growth _is_admitted", "fastcoll.job.joining JoinQueue.invite",
]  # fmt: skip
_END_SECONDS = 20.0  # until all processes of a job have ended after its launcher was killed
_MOST_SECONDS = 120.0


class Case(NamedTuple):
    """The victims of one job.

    Attributes:
        kills: seconds from the start of the job, or from the previous kill, to each kill of a random rank or joiner.
        place: a rank or "joiner", and the function in which it kills itself; "": no process does that.
        launcher: the node whose launcher is killed after the seconds of `kills`; -1: none. There are two nodes then.
    """

    kills: tuple[float, ...]
    place: str
    launcher: int


def draw(dice: random.Random) -> Case:
    """Return a random case."""
    what = dice.choice(("ranks", "ranks", "place", "place", "launcher"))
    if what == "launcher":
        return Case((dice.uniform(0, 3),), "", dice.randrange(2))
    if what == "ranks":
        return Case(tuple(dice.uniform(0, 3) for _ in range(dice.choice((1, 2)))), "", -1)
    who = dice.choice((*map(str, range(_RANKS)), "joiner"))
    # A joiner acts only if there is one, so a rank is killed.
    return Case((dice.uniform(0, 2),), f"{who} {dice.choice(_PLACES)} {dice.choice((1, 1, 2, 3, 50))}", -1)


def _expected(steps: int) -> int:
    """Return the result of a number of undisturbed steps of the training."""
    sampler, w, done = Sampler(_N, _BATCH, seed=5), 0, 0
    while done < steps:
        for step in itertools.islice(sampler, steps - done):
            w, done = (3 * w + int((step**2).sum())) % _P, done + 1
    return w


def run(amount: int, seed: int) -> Report:
    """Kill processes of `amount` jobs."""
    report, dice, kinds, took = Report(), random.Random(seed), Counter[str](), list[float]()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program.py")
        program.write_text(_PROGRAM)
        for number in range(amount):
            case, names, began = draw(dice), shm_names(), time.monotonic()
            job = _Job(case, f"SOAK-{os.getpid()}-{number}-", program)
            faults = job.run(dice)
            if left := marked(job.mark):
                faults.append(f"{list(left.values())} are left")
            if case.launcher >= 0:
                sweep()  # all ranks of a node were killed at once, so the next job removes their names
            if names := left_in_shm(names):
                faults.append(f"{names} in shared memory are left")
            for fault in faults:
                report.fail(f"job {number}, {case}: {fault}; {job.output()}")
            kinds[job.end] += 1
            kinds["ranks and joiners killed"] += job.output().count("failed: signal SIGKILL")
            if "DIES in it" in job.output():
                kinds["in " + case.place.split()[2]] += 1
            took.append(time.monotonic() - began)
            job.kill()
    report.done = f"{amount:,} jobs"
    report.figures = {kind: str(count) for kind, count in sorted(kinds.items())}
    report.figures["a job took (p50, longest)"] = f"{percentile(took, 0.5):.1f}, {max(took):.1f} s"
    return report


class _Job:
    """A job, whose processes have a mark in their environment.

    Attributes:
        end: what happened, for the report.
    """

    def __init__(self, case: Case, mark: str, program: Path) -> None:
        self.case, self.mark, self.end = case, mark, "killed"
        nodes = 1 + (case.launcher >= 0)
        self._outputs = [tempfile.TemporaryFile() for _ in range(nodes)]  # noqa: SIM115
        common, port = ["--min_ranks=1", "--max_restarts=2"], free_port()
        env = os.environ | ({"SOAK_DIE": case.place} if case.place else {})
        self._launchers = []
        for node, output in enumerate(self._outputs):
            where = ["--nnodes=2", f"--node_rank={node}", "--master_addr=127.0.0.1", f"--master_port={port}"]
            options = [f"-n{_RANKS // nodes}", *common, *(where if nodes > 1 else [])]
            words = [str(program), *map(str, (_STEPS, _N, _BATCH, _P))]
            command = [sys.executable, "-m", "fastcoll.launch", *options, *words]
            marks = {"SOAK": f"{mark}{node}"}
            self._launchers.append(subprocess.Popen(command, env=env | marks, stdout=output, stderr=output))

    def run(self, dice: random.Random) -> list[str]:
        """Carry out the case; return its faults."""
        for seconds in self.case.kills:
            self._await_ranks()
            time.sleep(seconds)
            self._kill_one(dice)
        limit = time.monotonic() + (_MOST_SECONDS if self.case.launcher < 0 else _END_SECONDS)
        for node, launcher in enumerate(self._launchers):
            try:
                launcher.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                return [f"the launcher of node {node} has not ended"]
        codes = [launcher.returncode for launcher in self._launchers]
        if self.case.launcher >= 0 and codes[self.case.launcher] == -signal.SIGKILL:
            while marked(self.mark) and time.monotonic() < limit:
                time.sleep(0.01)
            self.end = f"launcher {self.case.launcher} killed"
            if codes[1 - self.case.launcher] != 0:
                return []
            self.end = "completed before a launcher was killed"
        else:
            self.end = "completed"
            # A rank that is killed after its result has failed, though nothing is lost.
            if any(codes) and not (codes == [128 + signal.SIGKILL] and "learnt" in self.output()):
                return [f"exit codes {codes}"]
        return self._judge_results()

    def _judge_results(self) -> list[str]:
        ends = [(int(step), int(w)) for step, w in re.findall(r"learnt (\d+) (\d+)", self.output())]
        if not ends:
            return ["no rank has a result"]
        right = ends[0][0], _expected(ends[0][0])
        return [] if set(ends) == {right} else [f"results {ends}, expected {right}"]

    def _await_ranks(self) -> None:
        """Wait until each launcher has started a rank, or the job has ended."""
        end = time.monotonic() + _MOST_SECONDS
        while not all(map(self._ranks, range(len(self._launchers)))) and time.monotonic() < end:
            if any(launcher.poll() is not None for launcher in self._launchers):
                return
            time.sleep(0.01)

    def _ranks(self, node: int) -> list[int]:
        """Return the pids of the ranks and joiners of a node that live."""
        alive = marked(f"{self.mark}{node}")
        return [pid for pid, command in alive.items() if "fastcoll.launch" not in command]

    def _kill_one(self, dice: random.Random) -> None:
        if self.case.launcher >= 0:
            self._launchers[self.case.launcher].kill()
        elif ranks := self._ranks(0):
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(dice.choice(sorted(ranks)), signal.SIGKILL)

    def output(self) -> str:
        """Return what the job has written so far."""
        return "\n".join(
            os.pread(output.fileno(), 1 << 16, 0).decode(errors="replace") for output in self._outputs
        )

    def kill(self) -> None:
        """End what may be left."""
        for launcher in self._launchers:
            launcher.kill()
            launcher.wait()
        for output in self._outputs:
            output.close()
