"""Compiled kernels on disk: found again, compiled by one process only, thrown away when a helper changes."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

from fastcoll.errors import ResourceError
from fastcoll.kernels import cache, jit
from fastcoll.kernels.pyobjects import Index, integer

PACKAGE = Path(jit.__file__).parent.parent
FIRST_USE = textwrap.dedent("""
    import sys
    import numpy as np
    from fastcoll.kernels import reduce
    for dtype in ("float32", "float64"):
        reduce.reducer(reduce.ReduceOp.SUM, np.dtype(dtype))
    hits = [compiled.cache_hits for compiled in reduce._compiled.values()]
    print(*hits, int("numba.np.arraymath" in sys.modules))
""")


class Use(NamedTuple):
    """A process that needs two reducers: which of them came from the cache, what it imported, what it said."""

    hits: tuple[int, int]
    imports_what_compiling_needs: bool
    says: int


def copy_of_the_kernels(folder: Path) -> Path:
    """Sources that a test may edit."""
    sources = folder / "sources"
    (sources / "fastcoll" / "kernels").mkdir(parents=True)
    (sources / "fastcoll" / "__init__.py").touch()
    for file in [PACKAGE / "errors.py", PACKAGE / "reduce_op.py", *(PACKAGE / "kernels").glob("*.py")]:
        (sources / file.relative_to(PACKAGE.parent)).write_bytes(file.read_bytes())
    return sources


def first_uses(sources: Path, processes: int) -> list[Use]:
    """By so many new processes at once."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FIRST_USE],
            cwd=sources,
            env={"NUMBA_CACHE_DIR": str(sources.parent / "cache")},
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
        one, two, imported = map(int, out.split())
        uses.append(Use((one, two), bool(imported), err.count("fastcoll compiles its kernels")))
    return uses


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Use]]:
    """Three processes at once, one more, and two in turn after a helper has changed."""
    sources = copy_of_the_kernels(tmp_path_factory.mktemp("cache"))
    found = {"first": first_uses(sources, 3), "later": first_uses(sources, 1)}
    helper = sources / "fastcoll" / "kernels" / "combine.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    return found | {"edited": first_uses(sources, 1), "edited, later": first_uses(sources, 1)}


def test_one_process_compiles_the_others_load_until_a_helper_changes(uses):
    for dtype in range(2):
        assert sorted(use.hits[dtype] for use in uses["first"]) == [0, 1, 1]
        assert uses["later"][0].hits[dtype] == 1
        assert uses["edited"][0].hits[dtype] == 0
        assert uses["edited, later"][0].hits[dtype] == 1


def test_the_first_compilation_of_a_state_of_the_sources_says_so_once(uses):
    said = {name: sum(use.says for use in found) for name, found in uses.items()}
    assert said == {"first": 1, "later": 0, "edited": 1, "edited, later": 0}


def test_loading_imports_nothing_that_only_compiling_needs(uses):
    assert not uses["later"][0].imports_what_compiling_needs
    assert uses["edited"][0].imports_what_compiling_needs  # else the line above proves nothing


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
