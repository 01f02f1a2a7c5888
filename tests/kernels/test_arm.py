"""The instructions of kernels/primitives.py and copy.py on 64-bit Arm, for which LLVM generates code on any machine."""

from __future__ import annotations

import re
from typing import Any

import llvmlite.binding as binding
import pytest
from llvmlite import ir

from fastcoll.compiler import processor
from fastcoll.kernels import copy, primitives

WORD = ir.IntType(64)


def compiled(part: Any, count: int, features: str = "+lse") -> list[str]:
    """Return the instructions of a function made of one primitive with `count` arguments; each register is `r`."""
    module = ir.Module()
    module.triple = "aarch64-unknown-linux-gnu"
    function = ir.Function(module, ir.FunctionType(WORD, [WORD] * count), "function")
    builder = ir.IRBuilder(function.append_basic_block())
    found = part.py_func(builder, *function.args)
    kind = getattr(found, "type", None)
    if not isinstance(kind, ir.IntType):
        found = WORD(0)
    elif kind.width < 64:
        found = builder.zext(found, WORD)
    builder.ret(found)
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    machine = binding.Target.from_triple(module.triple).create_target_machine(features=features, opt=2)
    lines = machine.emit_assembly(binding.parse_assembly(str(module))).splitlines()
    words = [line.split() for line in lines if line.startswith("\t") and not line.startswith("\t.")]
    return [re.sub(r"\b[wxq]\d+", "r", " ".join(line)) for line in words]


@pytest.fixture(autouse=True)
def on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "IS_X86", False)


@pytest.mark.parametrize(
    ("part", "count", "expected"),
    [
        (primitives.load_acquire, 1, ["ldar r, [r]"]),
        (primitives.store_release, 2, ["stlr r, [r]"]),
        (primitives.swap_if_equal, 3, ["casal r, r, [r]"]),
        (primitives.order_loads, 0, ["dmb ishld"]),
        (primitives.full_fence, 0, ["dmb ish"]),
        (primitives.pause, 0, ["isb"]),
        (primitives.ticks, 0, ["mrs r, CNTVCT_EL0", "mrs r, CNTFRQ_EL0"]),
        (copy._order_streamed, 0, ["dmb ish"]),
        (copy._stream_line, 2, ["stnp r, r, [r, #32]", "stnp r, r, [r]"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_instructions(part: Any, count: int, expected: list[str]) -> None:
    found = compiled(part, count)
    assert [line for line in found if line in expected] == expected, found


def test_a_load_after_a_swap_waits_for_its_store() -> None:
    """A processor with RCpc has a weaker acquire load, ldapr, which may run before the store of an earlier swap."""
    assert "ldapr r, [r]" in compiled(primitives.load_acquire, 1, "+lse,+rcpc")
    assert "ldar r, [r]" in compiled(primitives.load_after_swap, 1, "+lse,+rcpc")
