"""The levels of x86-64 for which wheels have machine code, and which of them this processor has.

A level is a set of instructions that the x86-64 psABI names (https://gitlab.com/x86-psABIs/x86-64-ABI). Code for a
level runs on every processor that has the level. A level's registers are usable only if the operating system saves
them.
"""

from __future__ import annotations

from typing import NamedTuple


class InstructionLevel(NamedTuple):
    """What a level adds to the one before it.

    Attributes:
        name: the psABI's name, which is also LLVM's name of a processor.
        features: LLVM's names of the instruction sets.
        bits: the bits that cpuid must report: `Cpuid`'s field, and the mask of its bits.
        saved: the bits of XCR0, the registers that the operating system saves.
    """

    name: str
    features: str
    bits: dict[str, int]
    saved: int = 0


class Cpuid(NamedTuple):
    """Registers after cpuid, and XCR0: ecx of leaf 1, ebx of leaf 7, ecx of leaf 0x80000001."""

    leaf1: int
    leaf7: int
    extended: int
    saved: int


def _mask(*bits: int) -> int:
    return sum(1 << bit for bit in bits)


OSXSAVE = _mask(27)
"""The bit of `Cpuid.leaf1` that says that XCR0 can be read."""

LEVELS = (
    InstructionLevel(
        "x86-64-v2",
        "cx16 sahf popcnt sse3 ssse3 sse4.1 sse4.2",
        {"leaf1": _mask(0, 9, 13, 19, 20, 23), "extended": _mask(0)},
    ),
    InstructionLevel(
        "x86-64-v3",
        "avx avx2 bmi bmi2 f16c fma lzcnt movbe xsave",
        {"leaf1": _mask(12, 22, 27, 28, 29), "leaf7": _mask(3, 5, 8), "extended": _mask(5)},
        saved=_mask(1, 2),
    ),
    InstructionLevel(
        "x86-64-v4",
        "avx512f avx512bw avx512cd avx512dq avx512vl",
        {"leaf7": _mask(16, 17, 28, 30, 31)},
        saved=_mask(1, 2, 5, 6, 7),
    ),
)


def levels_of(found: Cpuid) -> list[str]:
    """Return the names of a processor's levels, the lowest first."""
    names = []
    for level in LEVELS:
        has = all(getattr(found, field) & mask == mask for field, mask in level.bits.items())
        if not has or found.saved & level.saved != level.saved:
            break
        names.append(level.name)
    return names


def target(name: str) -> dict[str, str]:
    """Return the environment in which Numba compiles for a level.

    Without a list of features Numba adds those of the processor that compiles.
    """
    names = [level.name for level in LEVELS]
    features = " ".join(level.features for level in LEVELS[: names.index(name) + 1])
    return {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": ",".join(f"+{each}" for each in features.split())}
