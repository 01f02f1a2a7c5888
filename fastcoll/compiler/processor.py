"""What depends on the kind of processor: x86-64 or 64-bit Arm.

levels.py has the levels of x86-64, and machine_code.py the relocations of its object files. The size of a page is
`mmap.PAGESIZE`.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from typing import Any

from . import llvm
from .executable import fill, reserve
from .levels import OSXSAVE, Cpuid

MACHINE = os.uname().machine
IS_X86 = MACHINE == "x86_64"

FUTEX = 202 if IS_X86 else 98
"""The number of the system call futex(2), which libc has no function for."""

# ---- instructions ----------------------------------------------------------------------------------------


def emit_pause(builder: Any) -> None:
    """Emit a pause of some 10 ns: x86 `pause`, Arm `isb`, because most Arm cores do nothing for `yield`."""
    if IS_X86:
        builder.call(llvm.function(builder, "llvm.x86.sse2.pause", llvm.VOID), [])
    else:
        barrier = llvm.function(builder, "llvm.aarch64.isb", llvm.VOID, llvm.HALF_WORD)
        builder.call(barrier, [llvm.HALF_WORD(15)])


def emit_ticks(builder: Any) -> Any:
    """Emit a read of the clock; return its value.

    On Arm this is the virtual counter, converted to nanoseconds; it counts at 24 MHz to 1 GHz. Programs may not read
    Arm's cycle counter, which LLVM's `readcyclecounter` reads.
    """
    if IS_X86:
        return builder.call(llvm.function(builder, "llvm.readcyclecounter", llvm.WORD), [])
    name = "llvm.read_volatile_register.i64"  # no inline assembly, for which Numba sets up no parser
    read = llvm.function(builder, name, llvm.WORD, llvm.ir.MetaDataType())
    count, a_second = (
        builder.call(read, [builder.module.add_metadata([register])])
        for register in ("CNTVCT_EL0", "CNTFRQ_EL0")
    )
    return builder.mul(count, builder.udiv(llvm.WORD(1_000_000_000), a_second))


def emit_fence_of_streams(builder: Any) -> None:
    """Emit what orders non-temporal stores before later stores; on x86 a release store does not."""
    if IS_X86:
        builder.call(llvm.function(builder, "llvm.x86.sse.sfence", llvm.VOID), [])
    else:
        builder.fence("release")


def converts_float16() -> bool:
    """Return whether code for Numba's target processor may use float16 instructions."""
    import llvmlite.binding
    from numba.core import config

    if not IS_X86:
        return MACHINE == "aarch64"
    if config.CPU_FEATURES is not None:
        return "+f16c" in config.CPU_FEATURES.split(",")
    if config.CPU_NAME not in (None, "host"):
        return False
    return bool(llvmlite.binding.get_host_cpu_features().get("f16c", False))


# ---- which processor this is -----------------------------------------------------------------------------

# void cpuid(uint32 leaf, uint32 subleaf, uint32 *registers)
_CPUID = bytes.fromhex("53 4989d0 89f8 89f1 0fa2 418900 41895804 41894808 4189500c 5b c3")

# uint64 xgetbv(void): XCR0, the registers that the operating system saves
_XGETBV = bytes.fromhex("31c9 0f01d0 48c1e220 4809d0 c3")

# The leaves that LLVM reads for the processor's name and features. Register 1 of leaf 1 has the number of the core that
# executes cpuid, so `processor` clears it. Leaf 13 reports which registers the operating system saves.
_LEAVES = [(0, 0), (1, 0), (7, 0), (7, 1), (13, 0), (13, 1), (20, 0), (25, 0), (30, 1), (36, 0)]
_LEAVES += [(1 << 31, 0), ((1 << 31) + 1, 0), ((1 << 31) + 8, 0)]


@cache
def processor() -> bytes:
    """Return the data from which LLVM derives this processor's name and features.

    They are the results of cpuid or, on processors other than x86-64, lines of /proc/cpuinfo.
    """
    if not IS_X86:
        with open("/proc/cpuinfo", "rb") as file:
            lines = set(file.read().splitlines())
        return b"".join(sorted(line for line in lines if line.startswith((b"CPU ", b"Features"))))
    answers = []
    most = {0: 0, 1 << 31: 1 << 31}  # last leaf of each range; beyond it cpuid returns another leaf's values
    for leaf, sub in _LEAVES:
        first = leaf & 1 << 31
        if leaf <= most[first]:
            registers = _registers(leaf, sub)
            if leaf == first:
                most[first] = registers[0]
            if leaf == 1:
                registers[1] = 0
            answers.append(bytes(registers))
    return b"".join(answers)


def cpuid() -> Cpuid:
    """Return the registers that determine this processor's level; zeros on processors other than x86-64."""
    if not IS_X86:
        return Cpuid(0, 0, 0, 0)
    highest, leaf1 = _registers(0)[0], _registers(1)[2]
    leaf7 = _registers(7)[1] if highest >= 7 else 0
    saved = ctypes.CFUNCTYPE(ctypes.c_uint64)(_mapped(_XGETBV))() if leaf1 & OSXSAVE else 0
    return Cpuid(leaf1, leaf7, _registers((1 << 31) + 1)[2], saved)


def _registers(leaf: int, sub: int = 0) -> Any:
    """Return eax, ebx, ecx and edx after cpuid."""
    ask = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(_mapped(_CPUID))
    registers = (ctypes.c_uint32 * 4)()
    ask(leaf, sub, registers)
    return registers


@cache
def _mapped(code: bytes) -> int:
    """Return the address of code, which stays mapped."""
    address = reserve(len(code))
    fill(address, code)
    return address
