"""Machine code in the installed package: used if it fits the sources, Python and the processor, and else compiled."""

from __future__ import annotations

import os
import re
import shutil
import struct
import sys
from pathlib import Path

import pytest
from programs import at_once, python

from fastcoll.compiler import cache, cache_files, jit, shipped
from fastcoll.compiler.levels import LEVELS, levels_of
from fastcoll.compiler.processor import cpuid
from fastcoll.kernels.pyobjects import Index, integer

PACKAGE = Path(jit.__file__).parent.parent
pytestmark = pytest.mark.skipif(not levels_of(cpuid()), reason="needs x86-64")


def double(x: Index) -> int:
    return 2 * integer(x)


@pytest.fixture
def pack(monkeypatch, tmp_path):
    """Ship the code of `double`, which is taken for this package's; return the pack."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("NAME", "FEATURES"):
        monkeypatch.delenv(f"NUMBA_CPU_{name}", raising=False)
    monkeypatch.setattr(double, "__module__", "fastcoll.doubling")
    monkeypatch.setattr(shipped, "FOLDER", str(tmp_path / "packs"))
    shipped._fitting_pack.cache_clear()
    made = jit.entry(double)
    assert made.call(21) == 42
    (kept,) = tmp_path.rglob("*.code")
    names = {kept.name.rsplit(".", 2)[0]: kept.read_bytes()[32:], "shm/other": b"another"}
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "packs").mkdir()
    path = tmp_path / "packs" / f"{levels_of(cpuid())[-1]}.pack"
    shipped.write(str(path), path.stem, cache.SOURCES, names)
    shipped._fitting_pack.cache_clear()
    yield path
    shipped._fitting_pack.cache_clear()


def compiles() -> bool:
    """Return whether a new process would compile `double`."""
    shipped._fitting_pack.cache_clear()
    before, made = cache.KernelCache.compiled, jit.entry(double)
    assert made.call(21) == 42
    return cache.KernelCache.compiled > before


def test_shipped_code_is_run_and_nothing_is_written(pack, tmp_path):
    assert not compiles()
    assert jit.entry(double).cache().is_cached()
    assert not (tmp_path / "cache").exists()


def test_a_function_of_the_user_is_not_looked_for(pack, monkeypatch):
    monkeypatch.setattr(double, "__module__", "program")
    assert compiles()


@pytest.mark.parametrize("changed", ["sources", "Python", "objects"])
def test_a_pack_for_other_sources_or_another_python_is_not_used_and_logged_once(
    pack, monkeypatch, caplog, changed
):
    if changed == "sources":
        monkeypatch.setattr(cache, "SOURCES", "others")
    elif changed == "Python":
        monkeypatch.setattr(sys.implementation, "cache_tag", "cpython-399")
    else:
        monkeypatch.setattr(
            shipped, "object", type("Larger", (), {"__basicsize__": 32}), raising=False
        )  # as in a Python without the GIL
    assert compiles()
    jit.entry(double).cache().is_cached()
    (said,) = [each for each in caplog.messages if "pack" in each]
    assert re.fullmatch(rf"{pack} is not used, since it was made for other .*; install the wheel again", said)


def test_the_best_level_of_this_processor_is_taken(pack, monkeypatch):
    monkeypatch.setattr(shipped, "levels_of", lambda found: [level.name for level in LEVELS])
    best = pack.with_name("x86-64-v4.pack")
    if pack != best:
        shipped.write(str(best), "x86-64-v4", cache.SOURCES, {})
    shipped.write(str(pack.with_name("none.pack")), "none", cache.SOURCES, {})
    shipped._fitting_pack.cache_clear()
    found = shipped._fitting_pack(cache.SOURCES)
    assert found is not None
    assert found.content[:] == best.read_bytes()
    monkeypatch.setattr(shipped, "levels_of", lambda found: [])
    assert compiles()


def test_a_target_that_the_user_asks_for_is_compiled(pack, monkeypatch):
    assert not compiles()
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+sse2")
    cache._platform.cache_clear()
    assert not jit.entry(double).cache().is_cached()
    monkeypatch.delenv("NUMBA_CPU_FEATURES")
    cache._platform.cache_clear()


def test_damaged_code_is_compiled(pack):
    content = bytearray(pack.read_bytes())
    content[-20] ^= 1  # the last record is b"another"
    pack.write_bytes(content)
    (size,) = struct.unpack_from("<I", content, 16)
    assert not compiles()
    content[20 + size + 40] ^= 1
    pack.write_bytes(content)
    assert compiles()


def test_a_pack_that_others_may_write_to_is_not_used(pack, caplog):
    cache_files._warn_of.cache_clear()
    pack.chmod(0o666)
    assert compiles()
    assert [each for each in caplog.messages if "others may write to it" in each]


JOB = """
import sys
import numpy as np
import fastcoll as dist
from fastcoll.compiler.cache import KernelCache

dist.init_process_group(sys.argv[1], f"file://{sys.argv[2]}", world_size=2, rank=int(sys.argv[3]))
for dtype in np.float32, np.float64, np.int64, np.float16:
    x = np.full(1000, dist.get_rank() + 1, dtype)
    dist.all_reduce(x)
    assert (x == 3).all()
dist.all_gather_object([None] * 2, "x")
print(KernelCache.compiled, *sorted({"numba", "llvmlite"} & sys.modules.keys()))
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.limit(1200)
def test_ranks_with_shipped_code_compile_nothing(tmp_path):
    """The whole way of a wheel: compile into a copy of the package, then start ranks with an empty cache."""
    packs = []
    for build in ("one", "two"):
        copy = tmp_path / build
        shutil.copytree(PACKAGE, copy / "fastcoll", ignore=shutil.ignore_patterns("__pycache__", "_compiled"))
        command = ("-m", "fastcoll.shipping", "native")
        made = python(*command, environ={"PYTHONPATH": str(copy)}, check=True, cwd=tmp_path)
        assert f"{levels_of(cpuid())[-1]}.pack" in made.stdout
        packs += [path.read_bytes() for path in copy.rglob("*.pack")]
        assert not [*copy.rglob("*.code")]  # it would be in the wheel
    assert re.search(r"all \d+ kernels are there", made.stdout)  # the second build compiles nothing
    assert packs[0] == packs[1]
    environ = {"PYTHONPATH": str(copy), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    for backend in ("shm", "tcp"):
        meeting = tmp_path / backend
        commands = [[sys.executable, "-c", JOB, backend, meeting, rank] for rank in range(2)]
        ends = at_once(commands, cwd=tmp_path, env={**os.environ, **environ})
        assert [(end.returncode, end.stdout, end.stderr) for end in ends] == [(0, "0\n", "")] * 2, ends
    assert not (tmp_path / "cache").exists()
