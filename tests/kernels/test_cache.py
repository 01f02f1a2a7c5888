"""Compiled kernels on disk: found again, compiled by one process only, thrown away when any source changes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from fastcoll.errors import ResourceError
from fastcoll.kernels import cache, jit
from fastcoll.kernels.pyobjects import Index, integer

PACKAGE = Path(jit.__file__).parent.parent
FIRST_USE = textwrap.dedent("""
    import ctypes
    import sys
    import numpy as np
    from fastcoll.kernels import cache, reduce
    cache._SILENT = 0.01  # a word for each kernel, whatever the machine
    maximum, dtypes = reduce.ReduceOp.MAX, [np.dtype("float32"), np.dtype("float64")]
    for dtype in dtypes:
        greatest = reduce.reducer(maximum, dtype)
    x = np.array([3.0, 7.0])
    table = np.array([x.ctypes.data, x.ctypes.data + 8])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(greatest.address)
    call(greatest.code, x.ctypes.data, table.ctypes.data, 2, 1)
    made = [reduce._compile(None, reduce.memory_type(maximum, dtype), dtype) for dtype in dtypes]
    hits = [compiled.cache_hits for compiled in made]
    print(*hits, int(x[0]), int("numba.np.arraymath" in sys.modules))
""")


class Use(NamedTuple):
    """A process that needs two reducers: which came from the cache, max(3, 7), what it imported and said."""

    hits: tuple[int, int]
    greater: int
    imports_what_compiling_needs: bool
    says: list[str]


def copy_of_the_kernels(folder: Path) -> Path:
    """Sources that a test may edit."""
    sources = folder / "sources"
    (sources / "fastcoll" / "kernels").mkdir(parents=True)
    (sources / "fastcoll" / "core").mkdir()
    (sources / "fastcoll" / "__init__.py").touch()
    others = ("config.py", "errors.py", "core/__init__.py", "core/reduce_op.py", "supported.py")
    for file in [*map(PACKAGE.joinpath, others), *(PACKAGE / "kernels").glob("*.py")]:
        (sources / file.relative_to(PACKAGE.parent)).write_bytes(file.read_bytes())
    return sources


def first_uses(sources: Path, processes: int) -> list[Use]:
    """By so many new processes at once."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_USE],
            cwd=sources,
            # Python's own cache goes by modification times, too.
            env={"NUMBA_CACHE_DIR": str(sources.parent / "cache"), "PYTHONDONTWRITEBYTECODE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(processes)
    ]
    uses = []
    for process in running:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        one, two, greater, imported = map(int, out.split())
        uses.append(Use((one, two), greater, bool(imported), err.splitlines()))
    return uses


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Use]]:
    """Three processes at once, and one each after all files were touched, and after one was edited unseen."""
    sources = copy_of_the_kernels(tmp_path_factory.mktemp("cache"))
    found = {"first": first_uses(sources, 3)}
    for file in sources.rglob("*.py"):
        os.utime(file, (1, 1))
    found["touched"] = first_uses(sources, 1)
    # The kernels have the values, the file is none of theirs.
    constants = sources / "fastcoll" / "core" / "reduce_op.py"
    text = constants.read_text()
    constants.write_text(text.replace("PRODUCT, MIN, MAX, BAND", "PRODUCT, MAX, MIN, BAND"))
    assert constants.read_text() != text
    os.utime(constants, (1, 1))
    return found | {"edited": first_uses(sources, 1)}


def test_one_process_compiles_and_the_others_load(uses):
    for dtype in range(2):
        assert sorted(use.hits[dtype] for use in uses["first"]) == [0, 1, 1]


def test_what_counts_is_the_content_of_the_sources(uses):
    assert uses["touched"][0].hits == (1, 1)
    assert uses["edited"][0].hits == (0, 0)
    assert [use.greater for found in uses.values() for use in found] == [7] * 5


def test_one_process_says_what_is_compiled(uses):
    said = [line for use in uses["first"] for line in use.says]
    assert 1 <= len(said) <= 2, (
        said
    )  # two of the three may compile one each at the same time, and one of them speaks
    assert [line.partition(":")[0] for line in uses["edited"][0].says] == [
        "fastcoll compiles reductions of float32",
        "fastcoll compiles reductions of float64",
    ]
    assert uses["touched"][0].says == []


def test_loading_imports_nothing_that_only_compiling_needs(uses):
    assert not uses["touched"][0].imports_what_compiling_needs
    assert uses["edited"][0].imports_what_compiling_needs  # else the line above proves nothing


@pytest.fixture
def lock_tries(monkeypatch):
    """A process that has compiled nothing and speaks at once; the results of its attempts to be the one that speaks."""
    monkeypatch.setattr(cache, "_SILENT", 0.0)
    for name in ("_unsaid", "_others", "_their_seconds"):
        monkeypatch.setattr(cache.Telling, name, 0)
    tries = []
    try_lock = cache._try_lock
    monkeypatch.setattr(cache, "_try_lock", lambda lock: tries.append(try_lock(lock)) or tries[-1])
    return tries


def wait_for(number, things):
    """Until there are so many."""
    deadline = time.monotonic() + 20
    while len(things()) < number:
        assert time.monotonic() < deadline, things()
        time.sleep(0.001)


def test_a_long_compilation_says_so_again_and_again(monkeypatch, caplog, lock_tries):
    monkeypatch.setattr(cache, "_AGAIN", 0.01)
    with cache.Telling("x", " (y)"):
        wait_for(2, lambda: caplog.messages)
    assert caplog.messages[:2] == ["fastcoll compiles x: 0 s so far (y)"] * 2


def test_short_compilations_add_up_to_a_word(monkeypatch, caplog, lock_tries):
    monkeypatch.setattr(cache, "_SILENT", 1000)
    with cache.Telling("a"):
        pass
    assert not caplog.messages
    monkeypatch.setattr(cache, "_SILENT", cache.Telling._unsaid)
    with cache.Telling("b"):
        wait_for(1, lambda: caplog.messages)
    assert caplog.messages == ["fastcoll compiles b: 0 s so far, 0 s for 1 before it"]


def test_of_two_that_compile_one_speaks(caplog, lock_tries):
    with cache.Telling("a"):
        wait_for(1, lambda: caplog.messages)
        with cache.Telling("b"):
            wait_for(2, lambda: lock_tries)
    assert lock_tries[:2] == [True, False]
    assert caplog.messages == ["fastcoll compiles a: 0 s so far"]


def test_without_a_place_for_the_cache_the_error_says_so(monkeypatch):
    monkeypatch.setattr(cache.KernelCache._impl_class, "_locator_classes", [])
    with pytest.raises(ResourceError, match="set NUMBA_CACHE_DIR to a writable directory"):
        jit.entry(identity).compile()


def identity(x: Index) -> int:
    return integer(x)


def test_old_code_is_not_taken_while_another_process_replaces_it(monkeypatch, tmp_path):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_SOURCES", "old")
    jit.entry(identity).compile()
    monkeypatch.setattr(cache, "_SOURCES", "new")
    (code,) = tmp_path.rglob("*.nbc")
    old = code.read_bytes()
    jit.entry(identity).compile()
    code.write_bytes(old)  # as it is for a moment: the index is new already
    before = cache.KernelCache.compiled
    jit.entry(identity).compile()
    assert cache.KernelCache.compiled == before + 1


def test_another_process_that_compiles_for_ever_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_LONGEST_COMPILATION", 0.05)
    path = tmp_path / "lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert cache._acquire(str(path)) is None


def test_a_compilation_that_fails_can_be_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr("numba.core.config.CACHE_DIR", str(tmp_path))

    @jit.entry
    def undefined(x: Index) -> int:
        return integer(x).nothing

    for _ in range(2):
        with pytest.raises(Exception, match="nothing"):
            undefined.call(1)
