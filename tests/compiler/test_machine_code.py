"""Loading object files: LLVM's code is linked correctly, anything else is rejected; and the processor's identity."""

from __future__ import annotations

import ctypes
import os

import pytest
from programs import python

from fastcoll.compiler import compiling, machine_code
from fastcoll.compiler.jit import external, kernel
from fastcoll.compiler.processor import processor
from fastcoll.errors import UnavailableError

_labs = external("labs", "int64(int64)")
_missing = external("fastcoll_has_no_such_function", "int64(int64)")
TABLE = (2, 3, 5, 7, 11, 13, 17)


@kernel
def prime(k):
    return TABLE[k % 7]


def distance(a, b):
    return _labs(a - b) + prime(a) * prime(b)


def missing(a):
    return _missing(a)


@pytest.mark.parametrize("load", [machine_code.load, machine_code.load_by_llvm])
def test_calls_and_constants_are_found(load):
    code = compiling.c_function(distance, "int64(int64, int64)")
    function = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 2)(*load(code))
    for a in range(10):
        for b in range(10):
            assert function(a, b) == abs(a - b) + TABLE[a % 7] * TABLE[b % 7]


def test_an_unknown_function_is_named():
    code = compiling.c_function(missing, "int64(int64)")
    with pytest.raises(UnavailableError, match="'fastcoll_has_no_such_function'"):
        machine_code.load(code)


def test_relocations_of_another_kind_are_refused(monkeypatch):
    monkeypatch.setattr(machine_code, "_RELOCATIONS", {})
    with pytest.raises(UnavailableError, match=r"relocation \d+"):
        machine_code.load(compiling.c_function(distance, "int64(int64, int64)"))


def test_code_is_not_writable():
    (address,) = machine_code.load(compiling.c_function(distance, "int64(int64, int64)"))
    with open("/proc/self/maps") as maps:
        for line in maps:
            start, end = (int(word, 16) for word in line.split()[0].split("-"))
            if start <= address < end:
                assert line.split()[1] == "r-xp"
                return
    raise AssertionError("the code is nowhere")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="this processor has no cpuid")
def test_a_processor_is_the_same_on_each_core_and_in_each_process():
    code = "from fastcoll.compiler.processor import processor; print(processor().hex())"
    cores = sorted(os.sched_getaffinity(0))
    answers = set()
    for core in (cores[0], cores[-1]):
        done = python("-c", f"import os; os.sched_setaffinity(0, [{core}]); {code}", check=True)
        answers.add(done.stdout.strip())
    assert answers == {processor().hex()}
    words = processor()
    name = words[4:8] + words[12:16] + words[8:12]  # ebx, edx, ecx of leaf 0
    with open("/proc/cpuinfo") as file:
        assert f"vendor_id\t: {name.decode()}\n" in file


def test_variables_are_refused():
    found = machine_code._Object(compiling.c_function(distance, "int64(int64, int64)"))
    found.offsets.clear()  # as if there were neither functions nor constants
    with pytest.raises(UnavailableError, match="is a variable"):
        machine_code._link(found)
