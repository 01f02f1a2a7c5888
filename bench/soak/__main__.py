"""`python -m soak NAME... [--long]` in the folder bench: run soaks, and print their results as rows of a table."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from dataclasses import dataclass

from . import phases, schedules
from .fleet import Fleet, load
from .report import Report

_MOST_SECONDS = 86_400.0


@dataclass(frozen=True)
class Soak:
    """The amounts of a short soak, which takes half a minute at most on two cores, and of a long one."""

    short: int
    long: int
    unit: str
    failpoint: str = ""  # the value of FASTCOLL_FAILPOINT with which kernels are loaded


SOAKS = {
    "kills": Soak(60, 2000, "worlds of which a rank is killed"),
    "phases": Soak(60, 2000, "worlds of which a rank is killed", phases.NOTHING),
    "survivors": Soak(10, 100, "worlds of 8 ranks that are killed until one is left"),
    "stops": Soak(12, 100, "stops for less than the timeout, and a tenth as many for good"),
    "starving": Soak(15, 600, "seconds"),
    "strangers": Soak(20_000, 1_000_000, "connections"),
    "frames": Soak(3000, 100_000, "broken frames of a member"),
    "middle": Soak(15, 500, "groups whose connections are harmed"),
    "signals": Soak(8, 300, "launchers"),
    "elastic": Soak(8, 300, "jobs of which processes are killed"),
    "rpc": Soak(10, 300, "worlds of which a worker is killed"),
    "churn": Soak(20, 1800, "seconds"),
    "history": Soak(5, 3000, "seconds"),
    "schedules": Soak(1000, 100_000, "calls", schedules.JITTER),
}


def main() -> int:
    """Run the soaks of the command line; return 1 if one found a fault."""
    parser = argparse.ArgumentParser(prog="python -m soak", description=__doc__)
    amounts = "; ".join(
        f"{name}: {soak.short:,} or {soak.long:,} {soak.unit}" for name, soak in SOAKS.items()
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", choices=[[], *SOAKS], help=f"all by default; {amounts}"
    )
    parser.add_argument(
        "--long", action="store_true", help="run the second amount of each soak, instead of the first"
    )
    parser.add_argument("--amount", type=int, help="run this amount of each soak, in its unit")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (default 1)")
    given = parser.parse_args()
    length = f" --amount {given.amount}" if given.amount else " --long" * given.long
    failed = 0
    for name in given.names or SOAKS:
        soak = SOAKS[name]
        amount = given.amount or (soak.long if given.long else soak.short)
        report = run_apart(name, amount, given.seed)
        failed += bool(report.faults)
        print(report.row(name, f"python -m soak {name}{length} --seed {given.seed}"), flush=True)
    return 1 if failed else 0


def run_apart(name: str, amount: int, seed: int) -> Report:
    """Run a soak in a new process, which loads the kernels that it needs and forks its ranks."""
    with Fleet() as fleet:
        child = fleet.start(_run, name, amount, seed)
        end = fleet.reap(child, time.monotonic() + _MOST_SECONDS)
        if end.result is not None:
            return end.result
        failed = Report("not completed")
        failed.fail(f"the soak itself failed: {end.error}")
        return failed


def _run(fleet: Fleet, name: str, amount: int, seed: int) -> Report:
    os.environ["FASTCOLL_FAILPOINT"] = SOAKS[name].failpoint
    os.environ.setdefault("FASTCOLL_TUNING", "none")
    load()
    report: Report = importlib.import_module(f".{name}", __package__).run(amount, seed)
    return report


if __name__ == "__main__":
    sys.exit(main())
