"""A rank kills itself at a named failpoint of a call, as FASTCOLL_FAILPOINT says: all phases, operations and worlds.

The same as kills, whose promises hold here too, but hit for certain what a clock hits rarely. Kernels with failpoints
are other ones, so this is a soak of its own.
"""

from __future__ import annotations

import os
import random

from fastcoll.failpoints import COLLECTIVES, NAMES

from .calls import CALLS
from .kills import COUNTS, WORLDS, Case, carry_out
from .report import Report

NOTHING = "shm.none.enter:delay=0"
"""Makes the kernels those with failpoints; no rank comes by there."""


def draw(seed: int, number: int) -> Case:
    """The case of this number: its failpoints take turns, the rest is by chance."""
    dice = random.Random(f"{seed}/{number}")
    ours = set(COLLECTIVES) & set(CALLS)
    names = [name for name in NAMES if name.split(".")[1] in ours and name != "shm.barrier.mid_chunk"]
    name, n = names[number % len(names)], WORLDS[number // len(names) % len(WORLDS)]
    backend, op, phase = name.split(".")
    # A later chunk is in arrays of more than a slot alone.
    count = COUNTS[-1] if phase == "mid_chunk" else dice.choice(COUNTS)
    return Case(
        number, backend, n, op, count, dice.randrange(n), "phase", 0.0, f"{name}:kill@{dice.randrange(4, 9)}"
    )


def run(amount: int, seed: int) -> Report:
    """Kill one rank of `amount` worlds."""
    if os.environ.get("FASTCOLL_FAILPOINT") != NOTHING:
        raise RuntimeError(f"needs FASTCOLL_FAILPOINT={NOTHING} before kernels are loaded")
    return carry_out(amount, lambda number: draw(seed, number))
