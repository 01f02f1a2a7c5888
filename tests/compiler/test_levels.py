"""Which level of x86-64 a processor has: the instructions count, and the registers that the system saves."""

from __future__ import annotations

import platform

import pytest

from fastcoll.compiler.levels import LEVELS, Cpuid, levels_of, target
from fastcoll.compiler.processor import cpuid

EVERYTHING = Cpuid(*[(1 << 32) - 1] * 4)
NAMES = [level.name for level in LEVELS]


@pytest.mark.parametrize("number", range(len(LEVELS)))
def test_a_level_needs_each_of_its_bits(number):
    assert levels_of(EVERYTHING) == NAMES
    for field, mask in {**LEVELS[number].bits, "saved": LEVELS[number].saved}.items():
        for bit in (1 << k for k in range(32) if mask >> k & 1):
            without = EVERYTHING._replace(**{field: getattr(EVERYTHING, field) & ~bit})
            expected = NAMES[:number]
            if field == "saved":  # also needed by the lower level
                expected = levels_of(without)
                assert NAMES[number] not in expected
            assert levels_of(without) == expected, (field, bit)


def test_no_processor_but_x86_has_a_level():
    assert levels_of(Cpuid(0, 0, 0, 0)) == []


FLAGS = {
    "x86-64-v2": "pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm",
    "x86-64-v3": "fma movbe xsave avx f16c bmi1 avx2 bmi2 abm",
    "x86-64-v4": "avx512f avx512dq avx512cd avx512bw avx512vl",
}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86-64")
def test_this_processors_levels_are_those_of_the_kernel():
    with open("/proc/cpuinfo") as file:
        (flags, *_) = (set(line.split()) for line in file if line.startswith("flags"))
    expected: list[str] = []
    for level, needed in FLAGS.items():
        if not set(needed.split()) <= flags:
            break
        expected.append(level)
    assert levels_of(cpuid()) == expected


def test_a_target_has_the_features_of_lower_levels():
    features = target("x86-64-v3")["NUMBA_CPU_FEATURES"].split(",")
    assert {"+sse4.2", "+avx2", "+f16c"} <= set(features)
    assert not [each for each in features if "avx512" in each]
