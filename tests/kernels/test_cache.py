"""Compiled kernels on disk: found again, compiled by one process only, thrown away when any source changes."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import textwrap
import threading
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
    cache._SILENT, cache._AGAIN = 0.01, 1000.0  # one word for each kernel, whatever the machine
    hits = []
    for dtype in "float32", "float64":
        before = cache.KernelCache.compiled
        greatest = reduce.reducer(reduce.ReduceOp.MAX, np.dtype(dtype))
        hits.append(int(cache.KernelCache.compiled == before))
    x = np.array([3.0, 7.0])
    table = np.array([x.ctypes.data, x.ctypes.data + 8])
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(greatest.address)
    call(greatest.code, x.ctypes.data, table.ctypes.data, 2, 1)
    print(*hits, int(x[0]), int("numba" in sys.modules or "llvmlite" in sys.modules))
""")


class Use(NamedTuple):
    """A process that needs two reducers: which came from the cache, max(3, 7), what it imported and said."""

    hits: tuple[int, int]
    greater: int
    imports_numba: bool
    says: list[str]


def copy_of_the_kernels(folder: Path) -> Path:
    """Sources that a test may edit."""
    sources = folder / "sources"
    (sources / "fastcoll" / "kernels").mkdir(parents=True)
    (sources / "fastcoll" / "core").mkdir()
    (sources / "fastcoll" / "__init__.py").touch()
    others = (
        "config.py",
        "errors.py",
        "failpoints.py",
        "core/__init__.py",
        "core/reduce_op.py",
        "supported.py",
    )
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
        out, err = process.communicate(timeout=300)
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


@pytest.mark.long
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


def test_loading_imports_neither_numba_nor_llvmlite(uses):
    assert not uses["touched"][0].imports_numba
    assert uses["edited"][0].imports_numba  # else the line above proves nothing


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
    for message in caplog.messages[:2]:
        assert re.fullmatch(r"fastcoll compiles x: \d+ s so far \(y\)", message)


def test_short_compilations_add_up_to_a_word(monkeypatch, caplog, lock_tries):
    monkeypatch.setattr(cache, "_SILENT", 1000)
    with cache.Telling("a"):
        pass
    assert not caplog.messages
    monkeypatch.setattr(cache, "_SILENT", cache.Telling._unsaid)
    monkeypatch.setattr(cache, "_AGAIN", 1000)
    with cache.Telling("b"):
        wait_for(1, lambda: caplog.messages)
    (said,) = caplog.messages
    assert re.fullmatch(r"fastcoll compiles b: \d+ s so far, \d+ s for 1 before it", said)


def test_of_two_that_compile_one_speaks(monkeypatch, caplog, lock_tries):
    monkeypatch.setattr(cache, "_AGAIN", 1000)
    with cache.Telling("a"):
        wait_for(1, lambda: caplog.messages)
        with cache.Telling("b"):
            wait_for(2, lambda: lock_tries)
    assert lock_tries[:2] == [True, False]
    (said,) = caplog.messages
    assert re.fullmatch(r"fastcoll compiles a: \d+ s so far", said)


def test_without_a_place_for_the_cache_the_error_says_so(monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none")  # where not even root can write
    with pytest.raises(ResourceError, match="set NUMBA_CACHE_DIR to a writable directory"):
        jit.entry(identity).compile()


def identity(x: Index) -> int:
    return integer(x)


@pytest.fixture
def compiles(monkeypatch, tmp_path):
    """Whether a new entry had to be compiled, where one has been already, into an empty folder."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    cache._platform.cache_clear()

    def compiles() -> bool:
        before = cache.KernelCache.compiled
        new = jit.entry(identity)
        assert new.call(7) == 7
        return cache.KernelCache.compiled > before

    assert compiles()
    assert not compiles()
    yield compiles
    cache._platform.cache_clear()


STATES = {"the package": ("_SOURCES", "new"), "its own file": ("_content", lambda path: b"new")}


@pytest.mark.parametrize("changed", STATES)
def test_old_code_is_not_taken(monkeypatch, tmp_path, compiles, changed):
    (code,) = tmp_path.rglob("*.code")
    old = code.read_bytes()
    monkeypatch.setattr(cache, *STATES[changed])
    assert compiles()
    assert code.read_bytes() != old
    code.write_bytes(old)
    assert compiles()


def another_version_of(package: str):
    content = cache._content
    return "_content", lambda path: b"new" if path.endswith(f"{package}/_version.py") else content(path)


OTHERS = {
    "processor": ("processor", lambda: b"another"),
    "Numba": another_version_of("numba"),
    "llvmlite": another_version_of("llvmlite"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_code_for_another_is_left_where_it_is_and_not_taken(monkeypatch, tmp_path, compiles, other):
    cache._platform.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(cache, *OTHERS[other])
        assert compiles()
        assert not compiles()
    cache._platform.cache_clear()
    assert not compiles()
    assert len([*tmp_path.rglob("*.code")]) == 2


@pytest.mark.parametrize(
    ("variable", "value"), [("NUMBA_CPU_NAME", "generic"), ("NUMBA_CPU_FEATURES", "+sse2")]
)
def test_code_for_a_processor_that_was_asked_for_is_apart(monkeypatch, compiles, variable, value):
    cache._platform.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv(variable, value)
        assert compiles()
    cache._platform.cache_clear()
    assert not compiles()


@pytest.mark.parametrize("damaged", ["empty", "short", "one bit", "another's"])
def test_damaged_files_are_replaced(tmp_path, compiles, damaged):
    (code,) = tmp_path.rglob("*.code")
    content = code.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    broken = {"empty": b"", "short": content[:-1], "one bit": flipped, "another's": b"\0" * 16 + content[16:]}
    code.write_bytes(broken[damaged])
    assert compiles()
    assert not compiles()


def test_code_beside_sources_that_this_user_cannot_write_to_is_taken(monkeypatch, tmp_path, compiles):
    folders = cache.folders(__file__)
    monkeypatch.setattr(cache, "folders", lambda source: ["/proc/none", *folders])
    assert not compiles()
    monkeypatch.setattr(cache, "folders", lambda source: ["/proc/none", str(tmp_path / "users")])
    assert compiles()
    assert not compiles()


def test_threads_that_need_the_same_code_compile_it_once(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    before, new, found = cache.KernelCache.compiled, jit.entry(identity), []
    threads = [threading.Thread(target=lambda n=n: found.append(new.call(n))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [*range(8)]
    assert cache.KernelCache.compiled == before + 1


def test_a_process_that_is_forked_while_a_thread_compiles_can_compile(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    jit.entry(identity).compile()
    with jit._compiling:
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=lambda: os._exit(jit.entry(identity).call(5)))
            thread.start()
            thread.join(20)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_a_function_with_a_closure_is_not_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for number in (3, 4):

        def adds(x: Index) -> int:
            return integer(x) + number  # noqa: B023

        assert jit.entry(adds).call(1) == 1 + number
    assert not [*tmp_path.rglob("*.code")]


def test_another_process_that_compiles_for_ever_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(cache, "_LONGEST_COMPILATION", 0.05)
    path = tmp_path / "lock"
    with path.open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert cache._acquire(str(path)) is None


def test_a_compilation_that_fails_can_be_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))

    @jit.entry
    def undefined(x: Index) -> int:
        return integer(x).nothing

    for _ in range(2):
        with pytest.raises(Exception, match="nothing"):
            undefined.call(1)
