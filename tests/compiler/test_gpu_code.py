"""Code for GPUs on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from together import together

from fastcoll.compiler import gpu_code
from fastcoll.compiler.gpu_code import kept


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path


def refuse() -> bytes:
    raise AssertionError("it is compiled again")


def test_code_is_compiled_once() -> None:
    assert kept("reduce, (9, 0)", lambda: b"code") == b"code"
    assert kept("reduce, (9, 0)", refuse) == b"code"
    assert kept("reduce, (8, 6)", lambda: b"other") == b"other"


def test_others_wait_for_the_one_that_compiles() -> None:
    compiled: list[int] = []

    def compile() -> bytes:
        compiled.append(1)
        return os.urandom(8)

    codes = together(*[lambda: kept("many", compile)] * 4)
    assert len(set(codes)) == len(compiled) == 1


def test_other_sources_have_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    kept("one", lambda: b"old")
    monkeypatch.setattr(gpu_code, "SOURCES", "other")
    assert kept("one", lambda: b"new") == b"new"


def test_damaged_code_is_compiled_again(folder: Path) -> None:
    kept("one", lambda: b"code")
    (file,) = folder.rglob("*.gpu")
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert kept("one", lambda: b"again") == b"again"
    assert kept("one", refuse) == b"again"


def test_a_failed_compilation_leaves_nothing(folder: Path) -> None:
    with pytest.raises(AssertionError):
        kept("one", refuse)
    assert not list(folder.rglob("*.gpu"))
    assert kept("one", lambda: b"code") == b"code"
