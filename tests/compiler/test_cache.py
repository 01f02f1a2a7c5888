"""Compiled kernels on disk: reused, compiled by only one process, replaced when any source changes."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import re
import shutil
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import numba
import pytest
from programs import at_once, until
from together import together

from fastcoll.compiler import cache, cache_files, jit, machine_code
from fastcoll.errors import UnavailableError
from fastcoll.kernels.pyobjects import Index, integer

PACKAGE = Path(jit.__file__).parent.parent
FIRST_USE = textwrap.dedent("""
    import ctypes
    import sys
    import numpy as np
    from fastcoll.compiler import cache; from fastcoll.kernels import reduce
    cache._FIRST_LOG, cache._NEXT_LOG = 0.01, 1000.0  # one line per kernel, on any machine
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
    """A process that needs two reducers: the number loaded from the cache, max(3, 7), its imports and its log."""

    hits: tuple[int, int]
    greater: int
    imports_numba: bool
    says: list[str]


def copy_of_the_kernels(folder: Path) -> Path:
    """Copy the sources, so that a test may edit them."""
    sources = folder / "sources"
    shutil.copytree(PACKAGE, sources / "fastcoll", ignore=shutil.ignore_patterns("__pycache__"))
    return sources


def first_uses(sources: Path, processes: int) -> list[Use]:
    """Run some new processes at once."""
    # Python's own cache uses modification times, too.
    environ = {"NUMBA_CACHE_DIR": str(sources.parents[1] / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    uses = []
    for done in at_once([[sys.executable, "-c", FIRST_USE]] * processes, cwd=sources, env=environ):
        assert done.returncode == 0, done.stderr
        one, two, greater, imported = map(int, done.stdout.split())
        uses.append(Use((one, two), greater, bool(imported), done.stderr.splitlines()))
    return uses


@pytest.fixture(scope="module")
def uses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Use]]:
    """Start two processes at once, and later more, one after the other.

    They start with the same sources elsewhere, after all files were touched, after a file was edited with its time
    unchanged, and after the edit was undone.
    """
    folder = tmp_path_factory.mktemp("cache")
    sources = copy_of_the_kernels(folder / "one")
    found = {"first": first_uses(sources, 2)}
    found["elsewhere"] = first_uses(copy_of_the_kernels(folder / "two"), 1)
    compiled = b"".join(path.read_bytes() for path in folder.rglob("*.code"))
    assert compiled
    assert not [word for word in (bytes(folder), b".py\0", b"site-packages") if word in compiled]
    for file in sources.rglob("*.py"):
        os.utime(file, (1, 1))
    found["touched"] = first_uses(sources, 1)
    # The kernels contain the values, but the file defines no kernel.
    constants = sources / "fastcoll" / "core" / "reduce_op.py"
    text = constants.read_text()
    constants.write_text(text.replace("PRODUCT, MIN, MAX, BAND", "PRODUCT, MAX, MIN, BAND"))
    assert constants.read_text() != text
    os.utime(constants, (1, 1))
    found["edited"] = first_uses(sources, 1)
    constants.write_text(text)
    return found | {"undone": first_uses(sources, 1)}


@pytest.mark.long
def test_one_process_compiles_and_the_others_load(uses):
    for dtype in range(2):
        assert sorted(use.hits[dtype] for use in uses["first"]) == [0, 1]


@pytest.mark.long
def test_the_content_of_the_sources_counts(uses):
    assert uses["touched"][0].hits == (1, 1)
    assert uses["edited"][0].hits == (0, 0)
    assert uses["undone"][0].hits == (1, 1)  # code of earlier sources is still there
    assert [use.greater for found in uses.values() for use in found] == [7] * 6


@pytest.mark.long
def test_the_same_sources_in_another_place_compile_nothing(uses):
    (use,) = uses["elsewhere"]
    assert (use.hits, use.imports_numba, use.says) == ((1, 1), False, [])


@pytest.mark.long
def test_one_process_logs_the_compilations_and_loading_imports_no_numba(uses):
    said = [line for use in uses["first"] for line in use.says]
    assert 1 <= len(said) <= 2, said  # two may compile one each at the same time, and only one of them logs
    edited, touched = uses["edited"][0], uses["touched"][0]
    compiled = [f"fastcoll compiles reductions of {dtype}" for dtype in ("float32", "float64")]
    assert [line.partition(":")[0] for line in edited.says] == compiled
    assert (touched.says, touched.imports_numba) == ([], False)
    assert edited.imports_numba  # otherwise the line above proves nothing


@pytest.fixture
def lock_tries(monkeypatch, tmp_path):
    """Prepare a process that has compiled nothing and logs at once; return the results of its lock attempts."""
    monkeypatch.setattr(cache, "_FIRST_LOG", 0.0)
    monkeypatch.setattr(cache, "_PACKAGE", str(tmp_path))  # other processes compile in the real folder
    for name in ("_unlogged", "_finished", "_finished_seconds"):
        monkeypatch.setattr(cache.ProgressLog, name, 0)
    tries = []
    try_lock = cache._try_lock
    monkeypatch.setattr(cache, "_try_lock", lambda lock: tries.append(try_lock(lock)) or tries[-1])
    return tries


def test_a_long_compilation_is_logged_repeatedly(monkeypatch, caplog, lock_tries):
    monkeypatch.setattr(cache, "_NEXT_LOG", 0.01)
    with cache.ProgressLog("x", " (y)"):
        until(lambda: len(caplog.messages) >= 2)
    for message in caplog.messages[:2]:
        assert re.fullmatch(r"fastcoll compiles x: \d+ s so far \(y\)", message)


def test_short_compilations_add_up_to_a_log_line(monkeypatch, caplog, lock_tries):
    monkeypatch.setattr(cache, "_FIRST_LOG", 1000)
    with cache.ProgressLog("a"):
        pass
    assert not caplog.messages
    monkeypatch.setattr(cache, "_FIRST_LOG", cache.ProgressLog._unlogged)
    monkeypatch.setattr(cache, "_NEXT_LOG", 1000)
    with cache.ProgressLog("b"):
        until(lambda: caplog.messages)
    (said,) = caplog.messages
    assert re.fullmatch(r"fastcoll compiles b: \d+ s so far, \d+ s for 1 before it", said)


def test_of_two_compiling_processes_one_logs(monkeypatch, caplog, lock_tries):
    monkeypatch.setattr(cache, "_NEXT_LOG", 1000)
    with cache.ProgressLog("a"):
        until(lambda: caplog.messages)
        with cache.ProgressLog("b"):
            until(lambda: len(lock_tries) >= 2)
    assert lock_tries[:2] == [True, False]
    (said,) = caplog.messages
    assert re.fullmatch(r"fastcoll compiles a: \d+ s so far", said)


def full_disk(*names: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("trouble", ["no folder", "a full disk"])
def test_code_that_cannot_be_kept_is_used_with_one_warning(monkeypatch, tmp_path, caplog, trouble):
    monkeypatch.setattr(cache.KernelCache, "unkept", "")
    # a folder where not even root can write
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/proc/none" if trouble == "no folder" else str(tmp_path))
    if trouble == "a full disk":
        monkeypatch.setattr(os, "replace", full_disk)
    for number in range(2):
        assert jit.entry(identity).call(number) == number
    (said,) = [each for each in caplog.messages if "cannot be kept" in each]
    assert re.search(
        r"cannot be kept in .* \(No .*\); set NUMBA_CACHE_DIR to .*; until then each process", said
    )
    assert not [*tmp_path.rglob("*.code")]


def by_path() -> list[str]:
    return cache_files.places_by_path("/work/x.py").read


def by_content() -> cache_files.Places:
    return cache_files.places_by_content("set", "/work/x.py", "/work")


def test_where_code_is_looked_for(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    beside, users = by_path()
    assert beside == "/work/__pycache__"
    assert users.startswith(f"{tmp_path}/fastcoll/work_")
    shared, packages = by_content().write
    assert shared == f"{tmp_path}/fastcoll/fastcoll-{os.geteuid()}/set"
    assert packages == "/work/__pycache__/kernels/set"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert by_path()[1].startswith(f"{tmp_path}/.cache/fastcoll/work_")
    assert by_content().read[0].startswith(f"{tmp_path}/.cache/fastcoll/fastcoll-")
    monkeypatch.setenv("HOME", "relative")
    assert (by_path(), by_content().write) == ([beside], [packages])
    monkeypatch.delenv("HOME")
    # As in a container for a user without an entry in its database.
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert (by_path(), by_content().write) == ([beside], [packages])


def test_users_of_one_directory_write_to_folders_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/common")
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    monkeypatch.setattr(cache_files, "_state", lambda source: os.stat_result((0o644, 1, 1, 1, 7, *[0] * 5)))
    places = by_content()
    assert places.write == ["/common/fastcoll-4242/set"]
    # Those of the sources' owner and of root are trusted.
    assert places.read == [*places.write, "/common/fastcoll-7/set", "/common/fastcoll-0/set"]


def test_the_sets_that_were_unused_for_longest_are_removed(own_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "__module__", "fastcoll.identity")
    sets = tmp_path / f"fastcoll-{os.geteuid()}"
    for number in range(40):
        (sets / str(number)).mkdir(parents=True)
        (sets / str(number) / "x.code").touch()
        os.utime(sets / str(number), (number, number))
    cache_files.mark_used(str(sets / "3"))
    for _ in range(2):  # the second time the set is there already
        assert jit.entry(identity).call(7) == 7
    left = {path.name for path in sets.iterdir()}
    assert left - {jit.entry(identity).cache().places.read[0].rpartition("/")[2]} == {
        "3",
        *map(str, range(10, 40)),
    }


def test_use_of_a_set_is_recorded_once_a_day(own_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(identity, "__module__", "fastcoll.identity")
    jit.entry(identity).compile()
    (folder,) = {path.parent for path in tmp_path.rglob("*.code")}
    hour, day = 3600, 24 * 3600
    for age, after in ((2 * hour, 2 * hour), (2 * day, 0)):
        old = time.time() - age
        os.utime(folder, (old, old))
        jit.entry(identity).compile()
        assert time.time() - folder.stat().st_mtime == pytest.approx(after, abs=hour)


def test_code_is_copied_for_other_users_of_the_installation(monkeypatch, tmp_path):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setattr(identity, "__module__", "fastcoll.identity")
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(cache, "_PACKAGE", str(tmp_path / "package"))
    monkeypatch.setattr(cache, "_hash_sources", lambda: cache.SOURCES)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    before = cache.KernelCache.compiled
    jit.entry(identity).compile()
    assert not [*(tmp_path / "package").iterdir()]
    for _ in range(2):
        cache.copy_for_others()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    jit.entry(identity).compile()
    assert cache.KernelCache.compiled == before + 1
    assert [path.suffix for path in (tmp_path / "package").rglob("*") if path.is_file()] == [".code"]


def test_code_of_sources_that_changed_after_the_start_is_not_kept(monkeypatch, own_folder, tmp_path, caplog):
    monkeypatch.setattr(cache.KernelCache, "unkept", "")
    monkeypatch.setattr(identity, "__module__", "fastcoll.identity")
    monkeypatch.setattr(cache, "_hash_sources", lambda: "new")
    assert jit.entry(identity).call(7) == 7
    assert not [*tmp_path.rglob("*.code")]
    assert [each for each in caplog.messages if "fastcoll's files have changed; start again" in each]


def test_code_for_another_processor_that_a_program_chooses_is_not_kept(
    monkeypatch, own_folder, tmp_path, caplog
):
    monkeypatch.setattr(cache.KernelCache, "unkept", "")
    numba.config.reload_config()  # Numba does that itself when the environment has changed
    monkeypatch.setattr(numba.config, "CPU_NAME", "generic")
    assert jit.entry(identity).call(7) == 7
    assert not [*tmp_path.rglob("*.code")]
    assert [each for each in caplog.messages if "another processor than the environment" in each]


def test_the_switch_that_keeps_users_functions_in_python_does_not_reach_kernels(monkeypatch, own_folder):
    numba.config.reload_config()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert jit.entry(identity).call(7) == 7
    assert numba.config.DISABLE_JIT == 1


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make another user the owner of a file or folder."""
    if os.geteuid() == 0:
        os.chown(path, 4242, 4242)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
        monkeypatch.setattr(cache_files, "_state", lambda source: None)


@pytest.mark.parametrize("what", ["file", "folder"])
def test_code_that_belongs_to_another_user_is_not_run(monkeypatch, tmp_path, compiles, caplog, what):
    (code,) = tmp_path.rglob("*.code")
    cache_files._warn_of.cache_clear()
    foreign = code if what == "file" else code.parent
    give_away(foreign, monkeypatch)
    assert compiles()
    assert [each for each in caplog.messages if f"{foreign} is not used, since it belongs to user" in each]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_code_that_others_may_have_written_is_not_run(monkeypatch, tmp_path, compiles, caplog, what):
    (code,) = tmp_path.rglob("*.code")
    cache_files._warn_of.cache_clear()
    opened = code if what == "file" else code.parent
    opened.chmod(opened.stat().st_mode | 0o002)
    assert compiles()
    (said,) = [each for each in caplog.messages if "not used" in each]
    assert re.match(
        rf"compiled code in {opened} is not used, since others may write to it \(mode 0.*go-w", said
    )
    assert compiles() is (what == "folder")  # the file is replaced, the folder is not changed


def test_links_and_pipes_instead_of_code_are_not_read(tmp_path, compiles):
    (code,) = tmp_path.rglob("*.code")
    code.rename(tmp_path / "elsewhere")
    code.symlink_to(tmp_path / "elsewhere")
    assert compiles()
    code.unlink()
    os.mkfifo(code)
    assert compiles()


ME, OTHER, MY_GROUP, GROUP = 1000, 1001, 100, 101


@pytest.mark.parametrize(
    ("uid", "gid", "mode", "source", "trusted"),
    [
        (ME, MY_GROUP, 0o755, (OTHER, GROUP, 0o644), True),
        (0, 0, 0o644, (OTHER, GROUP, 0o644), True),
        (OTHER, GROUP, 0o644, (OTHER, GROUP, 0o644), True),  # a user whose sources are run anyway
        (OTHER, GROUP, 0o644, (0, 0, 0o644), False),
        (OTHER, GROUP, 0o600, None, False),
        (ME, MY_GROUP, 0o775, (ME, MY_GROUP, 0o664), True),  # a umask of 002
        (ME, MY_GROUP, 0o775, (ME, MY_GROUP, 0o644), False),
        (ME, GROUP, 0o775, (ME, MY_GROUP, 0o664), False),
        (ME, MY_GROUP, 0o757, (ME, MY_GROUP, 0o664), False),
        (ME, MY_GROUP, 0o1777, (0, 0, 0o644), False),
        (ME, MY_GROUP, 0o775, None, False),
        (ME, MY_GROUP, 0o755, None, True),
    ],
)
def test_whose_code_is_run(monkeypatch, uid, gid, mode, source, trusted):
    def state(uid: int, gid: int, mode: int) -> os.stat_result:
        return os.stat_result((mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))

    found = {"side_effect": FileNotFoundError} if source is None else {"return_value": state(*source)}
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: ME)
        patch.setattr(os, "stat", Mock(**found))
        why = cache_files.openness(state(uid, gid, mode), "x.py")
    assert (why == "") is trusted


def identity(x: Index) -> int:
    return integer(x)


@pytest.fixture
def own_folder(monkeypatch, tmp_path):
    """Keep compiled code in this test's folder."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))


@pytest.fixture
def compiles(own_folder):
    """Return whether a new entry had to be compiled into a folder that has the code of an earlier one."""
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


STATES = {"the package": ("SOURCES", "new"), "its own file": ("_content", lambda path: b"new")}


@pytest.mark.parametrize("changed", STATES)
def test_old_code_is_not_taken(monkeypatch, tmp_path, compiles, changed):
    (code,) = tmp_path.rglob("*.code")
    old = code.read_bytes()
    monkeypatch.setattr(cache, *STATES[changed])
    assert compiles()
    assert code.read_bytes() != old
    code.write_bytes(old)
    assert compiles()


def content_but_of(package: str):
    content = cache._content
    return lambda path: b"new" if path.endswith(f"{package}/_version.py") else content(path)


OTHERS = {
    "processor": lambda patch: patch.setattr(cache, "processor", lambda: b"another"),
    "Numba": lambda patch: patch.setattr(cache, "_content", content_but_of("numba")),
    "llvmlite": lambda patch: patch.setattr(cache, "_content", content_but_of("llvmlite")),
    "Python without the GIL": lambda patch: patch.setattr(sys, "abiflags", "t"),
    "optimisation asked for": lambda patch: patch.setenv("NUMBA_OPT", "1"),
    "name asked for": lambda patch: patch.setenv("NUMBA_CPU_NAME", "generic"),
    "features asked for": lambda patch: patch.setenv("NUMBA_CPU_FEATURES", "+sse2"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_code_for_another_is_left_where_it_is_and_not_taken(monkeypatch, tmp_path, compiles, other):
    cache._platform.cache_clear()
    with monkeypatch.context() as patch:
        OTHERS[other](patch)
        assert compiles()
        assert not compiles()
    cache._platform.cache_clear()
    assert not compiles()
    assert len([*tmp_path.rglob("*.code")]) == 2


def test_a_source_tree_of_numba_stands_for_its_version(monkeypatch, tmp_path):
    """Its file asks git for the version, so it is the same in all states of the tree."""
    found = {}
    for name in ("one", "two"):
        package = tmp_path / name / "numba"
        package.mkdir(parents=True)
        (package / "_version.py").write_text("def get_versions(): ...")
        monkeypatch.setattr(cache, "find_spec", lambda _, at=package: Mock(origin=f"{at}/__init__.py"))
        installed = cache._version("numba")
        (tmp_path / name / "setup.py").touch()
        found[name] = installed, cache._version("numba")
    assert found["one"][0] == found["two"][0]
    assert len({*found["one"], *found["two"]}) == 3


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
    def look_in(*folders: str) -> None:
        places = cache_files.Places([*folders], [*folders], are_sets=False)
        monkeypatch.setattr(cache_files, "places_by_path", lambda source: places)

    look_in("/proc/none", *cache_files.places_by_path(__file__).read)
    assert not compiles()
    look_in("/proc/none", str(tmp_path / "users"))
    assert compiles()
    assert not compiles()


def test_threads_that_need_the_same_code_compile_it_once(own_folder):
    before, new = cache.KernelCache.compiled, jit.entry(identity)
    assert together(*[lambda n=n: new.call(n) for n in range(8)]) == [*range(8)]
    assert cache.KernelCache.compiled == before + 1


def test_a_process_that_is_forked_while_a_thread_compiles_can_compile(own_folder):
    jit.entry(identity).compile()
    with jit._compiling:
        child = os.fork()
        if child == 0:
            thread = threading.Thread(target=lambda: os._exit(jit.entry(identity).call(5)))
            thread.start()
            thread.join(120)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5


def test_a_function_with_a_closure_is_not_kept(own_folder, tmp_path):
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
        assert cache.acquire(str(path)) is None


def test_a_compilation_that_fails_can_be_tried_again(own_folder):
    @jit.entry
    def undefined(x: Index) -> int:
        return integer(x).nothing

    for _ in range(2):
        with pytest.raises(Exception, match="nothing"):
            undefined.call(1)


def test_code_that_cannot_be_loaded_is_not_kept(monkeypatch, own_folder, tmp_path):
    def refuse(*_: object) -> int:
        raise UnavailableError("unsupported machine code")

    with monkeypatch.context() as patch:
        for linker in ("_link", "load_by_llvm"):
            patch.setattr(machine_code, linker, refuse)
        with pytest.raises(UnavailableError, match="unsupported machine code"):
            jit.entry(identity).call(7)
    assert not list(tmp_path.glob("**/*.code"))
    assert jit.entry(identity).call(7) == 7
    assert len(list(tmp_path.glob("**/*.code"))) == 1
