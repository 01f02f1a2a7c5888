"""A comparison as a page: machine, versions, cores, method, command, tables."""

from __future__ import annotations

from pathlib import Path

from fastcoll.bench.cases import format_size

from . import targets
from .outcome import Comparison
from .tables import faster_peers, join, markdown, misses, notes, single_copies, title

_LIMIT = (
    "- Limit: what NumPy alone reaches, for copies the faster of memcpy and non-temporal stores, all ranks at once on "
    "the same cores, in the same rounds"
)


def page_name(comparison: Comparison, name: str | None) -> str:
    """Return `DATE-NAME.md`; the default name has the operation, or `comparison`, and the number of ranks."""
    operations = comparison.operations()
    if name is None:
        what = operations[0].replace("_", "-") if len(operations) == 1 else "comparison"
        name = f"{what}-{comparison.ranks}-ranks"
    return f"{comparison.start_time[:10]}-{name}.md"


def write_page(folder: Path, comparison: Comparison, name: str | None) -> Path:
    """Write the page and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / page_name(comparison, name)
    path.write_text("\n".join(page(comparison)) + "\n")
    return path


def page(comparison: Comparison) -> list[str]:
    """Return the page's lines."""
    operations = comparison.operations()
    several = len(operations) > 1
    what = f"{len(operations)} operations" if several else title(comparison, operations[0])
    blocks = [[f"# {what}, {comparison.ranks} ranks"], facts(comparison)]
    for operation in operations:
        if several:
            blocks.append([f"## {title(comparison, operation)}"])
        blocks.append(markdown(comparison, operation))
    blocks += [
        [f"- {line}" for line in [*faster_peers(comparison), *single_copies(comparison), *notes(comparison)]]
    ]
    if found := misses(comparison):
        blocks += [["## Missed aims"], targets.markdown(found)]
    return join(blocks)


def facts(comparison: Comparison) -> list[str]:
    """Return the facts of the measurement: machine, versions, command and method."""
    machine = comparison.machine
    libraries = "; ".join(side.library for side in comparison.sides)
    return [
        f"- Machine: {machine['cpu']}, {machine['caches']}, {machine['cores']} cores "
        f"({machine['usable_cores']} usable), {machine['kernel']}",
        f"- Ranks: {comparison.ranks}{hosts(comparison)}, {placement(comparison)}",
        f"- Software: {libraries}; Python {machine['python']}, NumPy {machine['numpy']}, Numba {machine['numba']}",
        f"- Method: median of {comparison.rounds} rounds, the sides in turn, in every second round in reverse order; "
        "in a round the slowest rank's median over batches of calls, one call verified first; in brackets the slowest "
        "rank's 99th percentile of single calls of all rounds"
        + (
            "; and the processor time of a call, of all ranks and their threads" if comparison.crowded else ""
        ),
        f"- Calls: {calls(comparison)}",
        *([] if comparison.hosts > 1 else [_LIMIT]),
        "- Missed: the aims in `bench/versus/targets.py` that a cell does not reach",
        f"- Command: `{comparison.command}`",
        *(f"- {side.label}: `{side.command}`" for side in comparison.sides),
    ]


def placement(comparison: Comparison) -> str:
    """Return the cores of each rank."""
    if not comparison.cores:
        return "not pinned"
    return f"pinned to cores {', '.join(map(str, comparison.cores))} in turn"


def hosts(comparison: Comparison) -> str:
    """Return how many hosts the ranks are on, if it is more than one."""
    if comparison.hosts == 1:
        return ""
    return f" on {comparison.hosts} hosts, which are namespaces of one machine, joined by veth pairs and a bridge"


def calls(comparison: Comparison) -> str:
    """Return how many batches of how many calls a round times, by size."""
    schedules = {size: plan for (_, size), plan in comparison.planned.items()}
    return ", ".join(
        f"{batches} × {calls} {f'of {format_size(size)}' if size else 'without data'}"
        for size, (batches, calls) in sorted(schedules.items())
    )
