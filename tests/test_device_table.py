"""README's table of what works where: made from what the backends have and the tests show, and compared.

    python tests/test_device_table.py    prints it

A tick says: what carries the operation out there has it, and a suite that runs it there calls it. README has the table
between two comments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from fastcoll.carrier import Carrier
from fastcoll.gpu.chosen import ChosenCarrier
from fastcoll.gpu.mpi_direct import MpiCarrier
from fastcoll.gpu.nccl import NcclCarrier
from fastcoll.gpu.staging import StagedCarrier
from fastcoll.hybrid import HybridGroup
from fastcoll.net.group import TcpGroup
from fastcoll.net.mpi import MpiGroup
from fastcoll.shm.group import ShmGroup

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- devices -->\n", "<!-- end of devices -->"

# What a row shows, and the hooks behind it.
OPERATIONS = {
    "all_reduce, all_reduce_coalesced": ["_plan_all_reduce", "_plan_all_reduce_coalesced"],
    "reduce, scan, exscan": ["_plan_reduce", "_plan_scan"],
    "reduce_scatter": ["_plan_reduce_scatter"],
    "broadcast": ["_plan_broadcast"],
    "all_gather, all_gather_coalesced": ["_plan_all_gather", "_plan_all_gather_coalesced"],
    "gather, scatter": ["_plan_gather", "_plan_scatter"],
    "all_to_all": ["_plan_all_to_all"],
    "send, recv, isend, irecv": ["_send", "_recv", "_isend", "_irecv"],
}
MESSAGES = {"send", "recv", "isend", "irecv"}
BACKENDS = {"shm": ShmGroup, "tcp": TcpGroup, "auto": HybridGroup, "mpi": MpiGroup}
IPC_CARRIER = "fastcoll/gpu/ipc.py"  # its source, as its kernels cannot be imported without numba-cuda
SUITE = ("conformance/*.py", "test_p2p.py")
STAGED = {StagedCarrier: SUITE}
QUEUED = {IPC_CARRIER: ("gpu/*ipc*.py",), NcclCarrier: ("gpu/*nccl*.py",)}

# backend, device -> how, and what carries operations out there with the tests that show it, from /tests.
COLUMNS = {
    **{(name, "CPU"): ("", {kind: SUITE}) for name, kind in BACKENDS.items()},
    ("shm", "GPU"): ("IPC, NCCL, host", {ChosenCarrier: SUITE, **STAGED, **QUEUED}),
    ("auto", "GPU"): ("IPC, NCCL, host", {ChosenCarrier: SUITE, **STAGED, **QUEUED}),
    ("tcp", "GPU"): ("host", STAGED),
    ("mpi", "GPU"): ("MPI, host", {MpiCarrier: ("mpi/cases*.py",), **STAGED}),
    ("nccl", "GPU"): ("NCCL", {NcclCarrier: QUEUED[NcclCarrier]}),
}
ORDER = [(name, device) for name in ("shm", "tcp", "auto", "mpi") for device in ("CPU", "GPU")] + [
    ("nccl", "GPU")
]

# What runs these suites there: a file, and what it says.
RUNS = {
    ("shm", "CPU"): (".ci/run", "\npytest "),
    ("tcp", "CPU"): (".ci/run", "pytest $conformance --ranks-backend tcp"),
    ("auto", "CPU"): (".ci/run", "pytest $conformance --ranks-hosts 4"),
    ("mpi", "CPU"): (".ci/run", "pytest tests/mpi -m mpi"),
    ("shm", "GPU"): ("tests/gpu/test_conformance.py", 'SUITE = ("conformance"'),
    ("mpi", "GPU"): ("tests/mpi/test_jobs.py", '"tests/mpi/cases_gpu.py"'),
}


def has(kind: type[Carrier] | str, hooks: Iterable[str]) -> bool:
    """Whether a carrier, a class or its source, has hooks of its own."""
    if isinstance(kind, str):
        tree = ast.parse((ROOT / kind).read_text())
        methods = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        return methods >= set(hooks)
    return all(not getattr(getattr(kind, hook), "__isabstractmethod__", False) for hook in hooks)


@cache
def called(patterns: tuple[str, ...]) -> set[str]:
    """The names of all functions and methods that test files call or name."""
    files = [file for pattern in patterns for file in (ROOT / "tests").glob(pattern)]
    trees = [ast.parse(file.read_text()) for file in files]
    assert trees, f"no tests like {patterns}"
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def works(backend: str, device: str, row: str) -> bool:
    """Whether a row has a tick."""
    _, carriers = COLUMNS[backend, device]
    names = set(row.split(", "))
    if ChosenCarrier in carriers and names & MESSAGES:
        carriers = {kind: carriers[kind] for kind in (ChosenCarrier, StagedCarrier)}  # whatever was chosen
    return all(has(kind, OPERATIONS[row]) and names <= called(tests) for kind, tests in carriers.items())


def table() -> str:
    """The table, as README has it."""
    head = "| operation | " + " | ".join(f"`{name}` {device}" for name, device in ORDER) + " |"
    lines = [head, "|---|" + ":-:|" * len(ORDER)]
    for row in OPERATIONS:
        names = ", ".join(f"`{name}`" for name in row.split(", "))
        ticks = ["✓" if works(*column, row) else " " for column in ORDER]
        lines.append(f"| {names} | " + " | ".join(ticks) + " |")
    ways = [COLUMNS[column][0] for column in ORDER]
    return "\n".join([*lines, "| through | " + " | ".join(ways) + " |"]) + "\n"


def test_readme_has_the_table() -> None:
    readme = (ROOT / "README.md").read_text()
    assert BEGIN in readme, (
        f"README has no {BEGIN.strip()}; print the table with: python {Path(__file__).name}"
    )
    assert readme.partition(BEGIN)[2].partition(END)[0].strip() == table().strip()


def test_what_the_ticks_rest_on_is_run() -> None:
    for file, text in RUNS.values():
        assert text in (ROOT / file).read_text(), f"{file} no longer runs a suite that README's ticks rest on"


def test_what_nobody_has_or_calls_gets_no_tick() -> None:
    class Half(StagedCarrier):
        _plan_scan = Carrier._plan_scan

    assert has(StagedCarrier, ["_plan_scan"])
    assert not has(Half, ["_plan_scan"])
    assert "all_reduce" in called(SUITE)
    assert "all_reduce_multigpu" not in called(SUITE)


if __name__ == "__main__":
    print(table())
