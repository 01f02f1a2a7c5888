"""Ranks join and are killed at random; survivors make new groups and continue.

There are at most ten ranks. In each epoch the processes agree through a store on the members (`agree`), make a group
under the epoch's name, and reduce until a rank dies, or until joiners wait in the store for the next epoch. The first
process is never killed: its memory, descriptors and threads are measured before each epoch, when it is in no group.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import signal
import threading
import time
from typing import Any

import numpy as np

import fastcoll as dist
from fastcoll import FastcollError, GroupError, PrefixStore, Store, TCPStore
from fastcoll.system.processes import has_ended, status_of
from fastcoll.testing.worker import shm_names

from .fleet import Fleet, left_in_shm, resident_bytes
from .report import Report

MOST, LEAST = 10, 2
GAP = 10.0  # seconds without a completed reduction that count as a fault
TIMEOUT = 5.0  # the others wait this long for a process that is killed before it has joined
_ELDER = 1  # slot on the board of the first process that takes part; the process of slot 0 serves the store
_EARLY_EPOCHS = 10  # epochs until memory is stable
_GROWTH = 0.01  # share by which memory may grow in ten minutes
_SLACK_BYTES = 2 << 20  # smaller growth is noise


def run(amount: int, seed: int) -> Report:
    """Spawn and kill for `amount` seconds."""
    report, dice, names = Report(), random.Random(seed), shm_names()
    spawned = kills = 0
    with Fleet() as fleet:
        fleet.start(serve)
        fleet.await_turns([0], 1, 30.0)
        port = int(fleet.marks[0])
        alive: dict[int, Any] = {}
        free = list(range(1, 60))  # slots of the board; a slot is reused after its process has been reaped

        def spawn() -> None:
            nonlocal spawned
            place = free.pop(0)
            alive[place] = fleet.start(work, place, port)
            spawned += 1

        for _ in range(3):
            spawn()
        end, next_event, gaps = time.monotonic() + amount, time.monotonic() + 1.0, [0.0]
        completed, last = 0.0, time.monotonic()
        while (now := time.monotonic()) < end:
            time.sleep(0.01)
            if (done := float(fleet.turns[1:].sum())) != completed:
                gaps.append(now - last)
                completed, last = done, now
            elif now - last > GAP:
                report.fail(f"no reduction completed for {now - last:.1f} s, {len(alive)} ranks")
                break
            for place, child in list(alive.items()):
                if child.pipe.poll():
                    report.fail(f"process {place} ended: {fleet.reap(child, now + 5.0)}")
                    del alive[place]
            if now < next_event:
                continue
            next_event = now + dice.uniform(0.2, 1.5)
            others = [place for place in alive if place != _ELDER]
            if len(alive) <= LEAST or (len(alive) < MOST and dice.random() < 0.55):
                spawn()
                continue
            for place in dice.sample(others, min(len(others), dice.choice((1, 1, 1, 2, 3)))):
                child = alive.pop(place)
                child.signal(signal.SIGKILL)
                fleet.reap(child, now + 5.0)
                fleet.children.remove(child)
                free.append(place)
                kills += 1
        fleet.marks[1] = 1.0  # all processes leave
        for place, child in alive.items():
            ended = fleet.reap(child, time.monotonic() + 4 * TIMEOUT)
            if ended.result is None:
                report.fail(f"process {place}: {'hung' if ended.hung else 'failed'}: {ended.error}")
            elif place == _ELDER:
                _judge_growth(ended.result, report)
        fleet.marks[0] = -1.0
        serving = fleet.reap(fleet.children[0], time.monotonic() + 5.0).result or {}
    if left := left_in_shm(names):
        report.fail(f"left in /dev/shm: {left}")
    report.done = f"{amount} s, {spawned} processes, {kills} killed"
    report.figures["reductions"] = f"{completed:,.0f}"
    report.figures |= {"longest without a reduction": f"{max(gaps):.1f} s", "store's server": f"{serving}"}
    return report


def _judge_growth(seen: list[tuple[float, int, int, int]], report: Report) -> None:
    """Report growth of the first process's memory, descriptors or threads.

    Args:
        seen: for each epoch the time, the bytes of memory, and the numbers of descriptors and threads.
    """
    settled = seen[_EARLY_EPOCHS:]
    report.figures["epochs"] = str(len(seen))
    if len(settled) < 4:
        return
    times, sizes, files, threads = (np.array(column, "f8") for column in zip(*settled, strict=True))
    half = len(settled) // 2
    growth = float(np.median(sizes[half:]) - np.median(sizes[:half]))
    span = float(np.median(times[half:]) - np.median(times[:half]))
    report.figures |= {
        "memory": f"{sizes[0] / 2**20:.1f} to {sizes[-1] / 2**20:.1f} MiB",
        "its growth in 10 min": f"{growth / sizes[0] / span * 600:+.2%}",
        "descriptors": f"{files.min():.0f} to {files.max():.0f}",
        "threads": f"{threads.min():.0f} to {threads.max():.0f}",
    }
    if growth > max(_SLACK_BYTES, _GROWTH * sizes[0] * span / 600):
        report.fail(f"the memory of a process that lives on grows: {report.figures['memory']}")
    if np.median(files[half:]) > np.median(files[:half]) or np.median(threads[half:]) > np.median(
        threads[:half]
    ):
        report.fail(f"descriptors or threads grow: {files.tolist()}, {threads.tolist()}")


def serve(fleet: Fleet) -> dict[str, str]:
    """Serve the store until the parent sets the end on the board."""
    with TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) as store:
        before = resident_bytes(os.getpid())
        fleet.marks[0] = store.port
        fleet.turns[0] = 1
        while fleet.marks[0] > 0:
            time.sleep(0.05)
        grown = resident_bytes(os.getpid()) - before
        return {"keys": f"{store.num_keys():,}", "memory": f"{grown / 2**20:+.1f} MiB"}


def work(fleet: Fleet, place: int, port: int) -> list[tuple[float, int, int, int]]:
    """Take part until the parent sets the end; return this process's resources.

    They are measured before each epoch, when the process is in no group.
    """
    seen, epoch = [], 0
    with TCPStore("127.0.0.1", port, timeout=60) as store:
        while not fleet.marks[1]:
            gc.collect()
            pid = os.getpid()
            files = len(os.listdir("/proc/self/fd"))
            seen.append((time.monotonic(), resident_bytes(pid), files, threading.active_count()))
            epoch, members = agree(store, epoch)
            if len(members) < LEAST:
                continue
            with contextlib.suppress(FastcollError):
                backend = ("shm", "tcp", "auto")[epoch % 3]
                inner = PrefixStore(f"epoch {epoch}", store)
                dist.init_process_group(backend, None, TIMEOUT, len(members), members.index(pid), inner)
                _reduce(fleet, place, store, epoch, members)
            if dist.is_initialized():
                with contextlib.suppress(GroupError):
                    dist.destroy_process_group()
    return seen


def _reduce(fleet: Fleet, place: int, store: Store, epoch: int, members: list[int]) -> None:
    """Reduce until joiners wait or the soak ends.

    The first member checks that, and tells the others through the last element of the array.
    """
    total, first = sum(members), members[0] == os.getpid()
    for turn in range(1 << 30):
        ends = first and turn % 20 == 0 and (fleet.marks[1] or store.check([f"{epoch + 1}/here"]))
        x = np.full(1000, os.getpid(), "f8")
        x[-1] = 1.0 if ends else 0.0
        dist.all_reduce(x)
        if not (x[:-1] == total).all():
            raise AssertionError(f"a wrong sum, {x[0]} instead of {total}, in epoch {epoch} of {members}")
        fleet.turns[place] += 1
        if x[-1]:
            return
        time.sleep(0.001)


def agree(store: Store, epoch: int) -> tuple[int, list[int]]:
    """Return the next epoch and the pids of its members; blocks.

    The first process to arrive decides on the members, when all living members of the previous epoch have arrived. A
    process that dies after its arrival may still become a member; then the start of the group detects its death. If the
    first process dies before it decides, the epoch has no members, and the next epoch begins.
    """
    me = os.getpid()
    while True:
        known = int(store.add("epochs", 0))
        epoch = max(epoch, known) + 1
        before = json.loads(store.get(f"{known}/members")) if known else []
        store.append(f"{epoch}/here", f"{me} ")
        first = int(store.compare_set(f"{epoch}/first", "", str(me)))
        if first == me:
            _await_members(store, epoch, before)
            here = sorted(set(map(int, store.get(f"{epoch}/here").split())))
            store.compare_set(f"{epoch}/members", "", json.dumps([pid for pid in here if _lives(pid)]))
        while not store.check([f"{epoch}/members"]):
            time.sleep(0.005)
            if not _lives(first):
                store.compare_set(f"{epoch}/members", "", "[]")
        members = json.loads(store.get(f"{epoch}/members"))
        if int(store.add("epochs", 0)) < epoch and store.add(f"{epoch}/counted", 1) == 1:
            store.set("epochs", str(epoch))
        if me in members:
            return epoch, members


def _await_members(store: Store, epoch: int, before: list[int]) -> None:
    """Wait until the living members of the previous epoch have arrived, and a moment longer for joiners."""
    end = time.monotonic() + 2 * TIMEOUT
    while time.monotonic() < end:
        here = set(map(int, store.get(f"{epoch}/here").split()))
        if all(pid in here or not _lives(pid) for pid in before):
            break
        time.sleep(0.005)
    time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return not has_ended(status_of(pid))
    except OSError:
        return False
