"""A rank kills itself at a named failpoint of a call, on every backend.

The cases cover all phases, operations and sizes of worlds, in shared memory, over TCP and on nodes. The promises are
those of kills.py, but a failpoint is in a phase that a kill at a random time seldom hits. Kernels with failpoints are
compiled separately, so this is a separate soak.
"""

from __future__ import annotations

import os
import random

from fastcoll.failpoints import COLLECTIVES, NAMES

from .calls import CALLS
from .kills import COUNTS, WORLDS, Case, carry_out
from .report import Report

NOTHING = "shm.none.enter:delay=0"
"""A setting with which kernels are compiled with failpoints, although no rank hits this failpoint."""


BY_NODES = ("all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather")
"""The operations that hit the failpoints of nodes, if their arrays are large."""


def places(seed: int) -> list[str]:
    """Return all failpoints of calls in a random order, so that a few cases cover all backends."""
    found = []
    for name in NAMES:
        backend, op, phase = name.split(".") if name.count(".") == 2 else ("", "", "")
        ours = op in CALLS and op in (BY_NODES if backend == "hybrid" else COLLECTIVES)
        if ours and backend in ("shm", "tcp", "hybrid") and (op, phase) != ("barrier", "mid_chunk"):
            found.append(name)
    random.Random(seed).shuffle(found)
    return found


def draw(seed: int, number: int) -> Case:
    """Return the case with a number: failpoints in turn, everything else at random."""
    dice, names = random.Random(f"{seed}/{number}"), places(seed)
    name = names[number % len(names)]
    backend, op, phase = name.split(".")
    on_nodes = backend == "hybrid"
    # A world on two nodes, of which at least one has two ranks, needs more than two ranks.
    n = (WORLDS[1:] if on_nodes else WORLDS)[number // len(names) % (len(WORLDS) - on_nodes)]
    # Only arrays of more than a slot have later chunks, and only large ones are moved between nodes.
    count = COUNTS[-1] if phase == "mid_chunk" or on_nodes else dice.choice(COUNTS)
    return Case(
        number,
        "auto" if on_nodes else backend,
        n,
        op,
        count,
        dice.randrange(n),
        "phase",
        0.0,
        f"{name}:kill@{dice.randrange(4, 9)}",
    )


def run(amount: int, seed: int) -> Report:
    """Kill one rank of `amount` worlds."""
    if os.environ.get("FASTCOLL_FAILPOINT") != NOTHING:
        raise RuntimeError(f"needs FASTCOLL_FAILPOINT={NOTHING} before kernels are loaded")
    return carry_out(amount, lambda number: draw(seed, number))
