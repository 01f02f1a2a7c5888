"""Compiled kernels on disk: found again, compiled by one process only, thrown away when a helper changes."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from fastcoll.errors import ResourceError
from fastcoll.kernels import cache, jit
from fastcoll.kernels.pyobjects import Index, integer

PACKAGE = Path(jit.__file__).parent.parent
FIRST_USE = textwrap.dedent("""
    import numpy as np
    from fastcoll.kernels import reduce
    reduce.reducer(reduce.ReduceOp.SUM, np.dtype("float32"))
    (compiled,) = reduce._compiled.values()
    print(compiled.cache_hits)
""")


@pytest.fixture
def sources(tmp_path):
    """A copy of the kernels that a test may edit."""
    folder = tmp_path / "sources"
    (folder / "fastcoll" / "kernels").mkdir(parents=True)
    (folder / "fastcoll" / "__init__.py").touch()
    for file in [PACKAGE / "errors.py", PACKAGE / "reduce_op.py", *(PACKAGE / "kernels").glob("*.py")]:
        (folder / file.relative_to(PACKAGE.parent)).write_bytes(file.read_bytes())
    return folder


def loads_at_first_use(sources: Path, processes: int) -> list[int]:
    """How many of the reducers that so many new processes need at once came from the cache, sorted."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_USE],
            cwd=sources,
            env={"NUMBA_CACHE_DIR": str(sources.parent / "cache")},
            stdout=subprocess.PIPE,
        )
        for _ in range(processes)
    ]
    return sorted(int(process.communicate(timeout=60)[0]) for process in running)


def test_one_process_compiles_the_others_load_until_a_helper_changes(sources):
    assert loads_at_first_use(sources, 3) == [0, 1, 1]
    helper = sources / "fastcoll" / "kernels" / "combine.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    assert loads_at_first_use(sources, 1) == [0]


def test_without_a_place_for_the_cache_the_error_says_so(monkeypatch):
    monkeypatch.setattr(cache.KernelCache._impl_class, "_locator_classes", [])
    with pytest.raises(ResourceError, match="set NUMBA_CACHE_DIR to a writable directory"):
        jit.entry(identity).compile()


def identity(x: Index) -> int:
    return integer(x)


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


def test_the_first_compilation_of_a_state_of_the_sources_says_so_once(sources):
    def lines() -> int:
        program = FIRST_USE + "\nreduce.reducer(reduce.ReduceOp.SUM, np.dtype('float64'))"
        env = {"NUMBA_CACHE_DIR": str(sources.parent / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=sources, env=env, capture_output=True, text=True
        )
        return done.stderr.count("fastcoll compiles its kernels")

    assert lines() == 1
    assert lines() == 0
    helper = sources / "fastcoll" / "kernels" / "combine.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    assert lines() == 1
    assert lines() == 0


def test_loading_imports_nothing_that_only_compiling_needs(sources):
    assert loads_at_first_use(sources, 1) == [0]
    program = FIRST_USE + "\nimport sys\nassert 'numba.np.arraymath' not in sys.modules"
    env = {"NUMBA_CACHE_DIR": str(sources.parent / "cache")}
    subprocess.run([sys.executable, "-c", program], cwd=sources, env=env, check=True)
