"""A comparison as tables: aligned text for a terminal, Markdown for a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastcoll.bench.cases import format_size
from fastcoll.bench.results import digits

from . import single_copy
from .outcome import GLOO, MPIS, OURS, Comparison, Key, SideTimes, document, lost
from .plan import UPDATES
from .targets import Missed, missed, sign

_NOTHING = "–"
_AGAINST = (("best MPI", MPIS), ("Gloo", GLOO))
_COUNTED = "Single copies (process_vm_readv and process_vm_writev, counted in a run of their own; "
_MOSTLY = 0.5  # single copies per call, not 1, because fastcoll may try another algorithm in some calls


def headings(comparison: Comparison) -> list[str]:
    """Return the headings of a table's columns."""
    names = [side.name for side in comparison.peers]
    brackets = "(p99; processor)" if comparison.crowded else "(p99)"
    sent = ", KiB sent" if comparison.hosts > 1 else ""
    titles = ["size", *(f"{side.label}, µs {brackets}{sent}" for side in comparison.sides)]
    titles += [f"{title} / fastcoll {brackets}" for title, of in _AGAINST if set(of) & set(names)]
    return [*titles, "limit, µs", "fastcoll / limit", "missed"]


def rows(comparison: Comparison, operation: str) -> list[list[str]]:
    """Return an operation's rows, with the columns of `headings`.

    Several rows are followed by one with the geometric means of the ratios.
    """
    keys = [(operation, size) for size in comparison.sizes(operation)]
    aims = misses(comparison)
    found = [_row(comparison, key, [one for one in aims if one[:2] == key]) for key in keys]
    return [*found, _means(comparison, operation)] if len(keys) > 1 else found


def text(comparison: Comparison, operation: str) -> list[str]:
    """Return an operation's table for a terminal."""
    table = [headings(comparison), *rows(comparison, operation)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
    return ["#", f"# {title(comparison, operation)}", f"# {lines[0]}", *(f"  {line}" for line in lines[1:])]


def markdown(comparison: Comparison, operation: str) -> list[str]:
    """Return an operation's table for a page."""
    table = [headings(comparison), *rows(comparison, operation)]
    lines = [f"| {' | '.join(row)} |" for row in table]
    return [lines[0], "|--:" * len(table[0]) + "|", *lines[1:]]


def title(comparison: Comparison, operation: str) -> str:
    """Return an operation's title, with its special options."""
    if operation == "barrier":
        return operation
    if operation == "custom":
        return f"all_reduce with a user-defined reduction, {comparison.dtype}"
    if operation in UPDATES:
        shared = "; fastcoll's x in shared pages" if operation == UPDATES[1] else ""
        return f"x *= 1, then all_reduce, {comparison.dtype}{shared}"
    return f"{operation}, {comparison.dtype}"


def faster_peers(comparison: Comparison) -> list[str]:
    """Return a sentence for each peer: the sizes at which it is faster than fastcoll."""
    lines = []
    for side in comparison.peers:
        where = [
            operation if operation == "barrier" else f"{operation} of {', '.join(map(format_size, sizes))}"
            for operation, sizes in lost(comparison, side).items()
        ]
        lines.append(f"{side.label} is faster at: {'; '.join(where) or 'nothing'}.")
    gains = [(key[1], gain) for key in comparison.planned if (gain := comparison.ordinary_over_shared(key))]
    if gains:
        parts = ", ".join(f"{_times(gain)} at {format_size(size)}" for size, gain in gains)
        lines.append(f"fastcoll on ordinary arrays over arrays in shared pages: {parts}.")
    return [*lines, *_overall(comparison)]


def misses(comparison: Comparison) -> list[Missed]:
    """Return the missed aims."""
    return missed(document(comparison))


def single_copies(comparison: Comparison) -> list[str]:
    """Return a line that says where fastcoll and each MPI make single copies, with operations and sizes.

    There is none for several hosts, where they are not counted.
    """
    if comparison.hosts > 1:
        return []
    others = single_copy.devices()
    parts = [f"{side.label}: {_copying(side)}" for side in comparison.sides if side.name in (OURS, *MPIS)]
    return [f"{_COUNTED}{' and '.join(others) or 'no XPMEM, no KNEM'} here). {'. '.join(parts)}."]


def notes(comparison: Comparison) -> list[str]:
    """Return notes on sides that failed, and on cells with fewer calls than planned."""
    fewer: dict[str, list[str]] = {}
    for label, (operation, size) in comparison.shortened():
        fewer.setdefault(label, []).append(f"{operation} {format_size(size) if size else ''}".strip())
    return [
        *(f"Left out: {text.splitlines()[0]}." for text in comparison.failed),
        *(f"{label} made fewer calls, to save time, at: {', '.join(keys)}." for label, keys in fewer.items()),
    ]


def _row(comparison: Comparison, key: Key, missing: Sequence[Missed]) -> list[str]:
    cells = [format_size(key[1]) if key[1] else _NOTHING]
    crowded = comparison.crowded
    cells += [
        _with(_micros, side.typical(key), [side.p99(key), *[side.processor_time(key)] * crowded])
        + (f", {_kibibytes(side.sent.get(key))}" if comparison.hosts > 1 else "")
        for side in comparison.sides
    ]
    cells += [
        _with(
            _times,
            comparison.ratio(names, key),
            [comparison.p99_ratio(names, key), *[comparison.processor_ratio(names, key)] * crowded],
        )
        for names in _present(comparison)
    ]
    aims = [f"{one.value} {sign(one.value)} {one.aim:g}" for one in missing]
    cells += [_micros(comparison.limit_seconds(key)), _times(comparison.over_limit(key))]
    return [*cells, ", ".join(aims) or _NOTHING]


def _means(comparison: Comparison, operation: str) -> list[str]:
    means = [_times(comparison.mean_ratio(names, [operation])) for names in _present(comparison)]
    return ["mean", *[_NOTHING] * len(comparison.sides), *means, *[_NOTHING] * 3]


def _overall(comparison: Comparison) -> list[str]:
    """Return the geometric means over all cells, and how many cells are at least as good as the peers' best."""
    parts, counts = [], []
    for title, names in _AGAINST:
        mean = comparison.mean_ratio(names, comparison.operations())
        if mean is not None:
            parts.append(f"{_times(mean)} against {title}")
            counts.append(f"{title}: {_share(comparison, names)}")
    if not parts:
        return []
    return [
        f"Geometric means over all cells: {', '.join(parts)}.",
        f"Cells in which fastcoll is at least as good: {'; '.join(counts)}.",
    ]


def _share(comparison: Comparison, names: Sequence[str]) -> str:
    """Return in how many of the cells fastcoll takes at most the time of the best of these peers."""
    kinds = {"time": comparison.ratio}
    if comparison.crowded:
        kinds["processor time"] = comparison.processor_ratio
    found = {kind: [ratio(names, key) for key in comparison.planned] for kind, ratio in kinds.items()}
    return ", ".join(
        f"{kind} {sum(ratio >= 1 for ratio in ratios if ratio)} of {sum(map(bool, ratios))}"
        for kind, ratios in found.items()
    )


def _present(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the groups of peers in _AGAINST of which at least one ran."""
    return [names for _, names in _AGAINST if set(names) & {side.name for side in comparison.peers}]


def _copying(side: SideTimes) -> str:
    """Return, as text, the cells of a side in which most calls make a single copy."""
    if side.copies is None:
        return "not to be seen here"
    by_sizes: dict[str, list[str]] = {}
    for operation in dict.fromkeys(operation for operation, _ in side.copies):
        every = [size for name, size in side.copies if name == operation]
        sizes = [size for size in every if side.copies[operation, size] >= _MOSTLY]
        if sizes:
            from_one = len(sizes) > 1 and every[-len(sizes) :] == sizes
            text = (
                f"from {format_size(sizes[0])} on" if from_one else f"of {', '.join(map(format_size, sizes))}"
            )
            by_sizes.setdefault(text, []).append(operation)
    return "; ".join(f"{', '.join(names)} {text}" for text, names in by_sizes.items()) or "none"


def _with(show: Callable[[float | None], str], typical: float | None, more: Sequence[float | None]) -> str:
    return show(typical) if more[0] is None else f"{show(typical)} ({'; '.join(map(show, more))})"


def _micros(seconds: float | None) -> str:
    return _NOTHING if seconds is None else digits(seconds * 1e6)


def _kibibytes(sent: float | None) -> str:
    return _NOTHING if sent is None else digits(sent / 1024)


def _times(ratio: float | None) -> str:
    if ratio is None:
        return _NOTHING
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


def join(blocks: Sequence[Sequence[str]]) -> list[str]:
    """Join blocks of lines with empty lines."""
    return [line for number, block in enumerate(blocks) for line in (["", *block] if number else block)]
