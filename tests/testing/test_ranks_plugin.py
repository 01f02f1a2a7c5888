"""The mark `ranks` as users see it: test files on which pytest runs in a separate process, mostly one for all."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from inner_pytest import InnerRun
from programs import LIMIT, until

from fastcoll.system.processes import session
from fastcoll.testing.worker import Footprint

SEGMENT = f"fastcoll-test-{os.getpid()}-{session()}"
FILES: dict[str, str] = {}
OPTIONS = (
    *("-W", "ignore::pytest.PytestUnraisableExceptionWarning"),
    *("-W", "error:an error here", "--showlocals", "--flavour=sour", "--shape=round"),
)


def file(name: str, text: str) -> str:
    """Add a file to the run; names of tests must be unique. OPTIONS are its arguments."""
    FILES[name] = f"import os, time, pytest\n{text}"
    return name


@pytest.fixture(scope="module")
def inner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InnerRun]:
    """Run pytest on all files."""
    yield InnerRun(tmp_path_factory.mktemp("inner"), FILES, *OPTIONS)
    for name in (SEGMENT, f"{SEGMENT}-of-another", f"other-{SEGMENT}"):
        Path("/dev/shm", name).unlink(missing_ok=True)


ENVIRONMENT = file(
    "test_environment.py",
    """
@pytest.mark.ranks(1, 2, init=False)
def test_environment(rank, world_size, tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
    found = [os.environ[name] for name in names]
    assert found == [str(rank), str(rank), str(world_size), str(world_size), "127.0.0.1"]
    assert int(os.environ["MASTER_PORT"]) > 0
    (tmp_path / f"{rank}.part").write_text(os.environ["MASTER_PORT"] + os.environ["FASTCOLL_SECRET"])
    (tmp_path / f"{rank}.part").rename(tmp_path / str(rank))
    while not {str(r) for r in range(world_size)} <= set(os.listdir(tmp_path)):
        time.sleep(0.001)
    met = {(tmp_path / str(r)).read_text() for r in range(world_size)}
    assert len(met) == 1
    assert len(os.environ["FASTCOLL_SECRET"]) >= 64

def test_environment_is_restored():
    assert "RANK" not in os.environ
""",
)


def test_ranks_get_their_rank_world_environment_and_a_common_directory(inner: InnerRun) -> None:
    assert inner.outcomes(ENVIRONMENT) == {"passed": 3}
    for n in (1, 2):
        assert f"{ENVIRONMENT}::test_environment[n{n}] PASSED" in inner.text


file("folder/conftest.py", "import pytest\n@pytest.fixture\ndef of_the_folder():\n    return 5")
IN_A_FOLDER = [
    file(
        f"folder/test_{name}.py",
        f"@pytest.mark.ranks(1, init=False)\ndef test_{name}(of_the_folder):\n    assert of_the_folder == 5\n",
    )
    for name in ("first", "second")
]


def test_all_files_of_a_folder_have_the_fixtures_of_its_conftest(inner: InnerRun) -> None:
    """Ranks collect a file when the first of its tests runs."""
    assert [inner.outcomes(each) for each in IN_A_FOLDER] == [{"passed": 1}] * 2


WORLDS = file(
    "test_worlds.py",
    """
import fastcoll

@pytest.fixture
def members():
    yield fastcoll.get_world_size()
    assert fastcoll.is_initialized()

@pytest.mark.ranks(2, backend="shm")
def test_in_a_world(rank, world_size, members):
    assert (fastcoll.get_rank(), members) == (rank, world_size)
    assert fastcoll.get_backend() == "shm"

@pytest.mark.ranks(2)
def test_again(rank):
    assert fastcoll.get_backend_config() == "cpu:auto"

@pytest.mark.ranks(2, init=False)
def test_without_a_world():
    assert not fastcoll.is_initialized()

@pytest.mark.ranks(2)
def test_peers_of_a_failed_rank_are_told(rank):
    assert rank == 0
    try:
        fastcoll.barrier()
    except fastcoll.PeerDiedError as error:
        raise RuntimeError("the step failed") from error
""",
)


def test_fastcoll_is_initialised_around_the_test_and_its_fixtures(inner: InnerRun) -> None:
    assert inner.outcomes(WORLDS) == {"passed": 3, "failed": 1}
    inner.said("test_peers_of_a_failed_rank_are_told").fnmatch_lines(
        [
            "rank 1 of 2: AssertionError: assert 1 == 0",
            "rank 0 of 2, as a consequence: RuntimeError: the step failed",
        ]
    )


REUSE = file(
    "test_reuse.py",
    """
def note(rank, name):
    with open(f"{name}-{rank}", "w") as file:
        file.write(str(os.getpid()))

@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("name", ["a", "b"])
def test_reused(rank, name):
    note(rank, name)

@pytest.mark.ranks(2, init=False, fresh=True)
def test_fresh(rank):
    note(rank, "c")

@pytest.mark.ranks(2, init=False)
def test_fails():
    assert False

@pytest.mark.ranks(2, init=False)
def test_replaced(rank):
    note(rank, "d")
""",
)


def test_workers_are_reused_and_replaced_after_a_failure(inner: InnerRun) -> None:
    assert inner.outcomes(REUSE) == {"passed": 4, "failed": 1}
    for rank in range(2):
        a, b, c, d = ((inner.folder / f"{name}-{rank}").read_text() for name in "abcd")
        assert a == b
        assert len({a, c, d}) == 3


file(
    "conftest.py",
    """
import pytest
import enum, pathlib
Shape = enum.Enum("Shape", "square round")
def pytest_addoption(parser):
    parser.addoption("--flavour", default="plain")
    parser.addoption("--shape", type=lambda name: {Shape[name]}, default=set())
    parser.addoption("--not-sent", default=lambda: None)
@pytest.fixture
def shape(request):
    found, = request.config.getoption("--shape")
    return found is Shape.round
@pytest.fixture(scope="session")
def flavour(request):
    return request.config.getoption("--flavour")
""",
)
FIXTURES = file(
    "test_fixtures.py",
    """
@pytest.fixture
def twice(rank):
    yield 2 * rank
    open(f"torn-down-{rank}", "w").close()

class TestIt:
    def setup_method(self):
        self.ready = True

    @pytest.mark.ranks(2, init=False)
    @pytest.mark.parametrize("unpicklable", [lambda: 7])
    def test_it(self, rank, twice, unpicklable, monkeypatch, flavour, capsys):
        monkeypatch.setenv("SOME_VARIABLE", "1")
        print("seen")
        assert self.ready and twice == 2 * rank and unpicklable() == 7
        assert flavour == "sour"
        assert capsys.readouterr().out == "seen\\n"

    @pytest.mark.ranks(2, init=False)
    def test_undone(self):
        assert "SOME_VARIABLE" not in os.environ
""",
)


def test_fixtures_parameters_classes_and_monkeypatch_work_in_the_ranks(inner: InnerRun) -> None:
    assert inner.outcomes(FIXTURES) == {"passed": 2}
    assert (inner.folder / "torn-down-0").exists()
    assert (inner.folder / "torn-down-1").exists()


CONFIGURATION = file(
    "test_configuration.py",
    """
@pytest.mark.ranks(2, init=False)
def test_options(shape, request, cache):
    assert shape
    assert request.config.getoption("verbose") == 1
    cache.set("example", [1])
    assert cache.get("example", None) == [1]

@pytest.mark.ranks(2, init=False)
def test_warning():
    import warnings
    warnings.warn("an error here")

@pytest.mark.ranks(2, init=False)
def test_local_variables():
    shown = "as a local variable"
    assert False
""",
)


def test_ranks_have_the_options_of_pytest(inner: InnerRun) -> None:
    assert inner.outcomes(CONFIGURATION) == {"passed": 1, "failed": 2}
    inner.said("test_warning").fnmatch_lines(["all 2 ranks: UserWarning: an error here"])
    inner.said("test_local_variables").fnmatch_lines(["shown *= 'as a local variable'"])


@pytest.mark.long
def test_ranks_start_without_the_capture_of_output(tmp_path: Path) -> None:
    files = {"test_it.py": "import pytest\n@pytest.mark.ranks(2, init=False)\ndef test_it():\n    pass"}
    assert InnerRun(tmp_path, files, "-p", "no:capture").outcomes("test_it.py") == {"passed": 1}


EQUAL = file(
    "test_equal.py",
    """
@pytest.mark.ranks(2, init=False)
def test_equal_failures(rank):
    print(f"printed by {rank}")
    values = [1, 2]
    assert values == [1, 4]
""",
)


def test_equal_failures_are_merged_and_asserts_show_values(inner: InnerRun) -> None:
    assert inner.outcomes(EQUAL) == {"failed": 1}
    said = inner.said("test_equal_failures")
    said.fnmatch_lines(
        [
            "all 2 ranks: AssertionError: assert ?1, 2? == ?1, 4?",
            "E*At index 1 diff: 2 != 4",
            "*Captured output of rank 0*",
            "printed by 0",
            "*Captured output of rank 1*",
            "printed by 1",
        ]
    )
    assert str(said).count("At index 1 diff") == 1


file(
    "stranded/conftest.py",
    """
from fastcoll.testing import pool as ranks_pool
usual = ranks_pool._GRACE_SECONDS
def pytest_runtest_setup():
    ranks_pool._GRACE_SECONDS = 0.2
def pytest_runtest_teardown():
    ranks_pool._GRACE_SECONDS = usual
""",
)
STRANDED = file(
    "stranded/test_stranded.py",
    """
@pytest.mark.ranks(2, init=False)
def test_dead_and_stranded(rank):
    print("last words")
    if rank == 1:
        os.kill(os.getpid(), 9)
    time.sleep(1000)
""",
)


def test_a_dead_rank_is_named_and_the_stranded_ones_are_ended(inner: InnerRun) -> None:
    assert inner.outcomes(STRANDED) == {"failed": 1}
    inner.said("test_dead_and_stranded").fnmatch_lines(
        [
            "rank 1 of 2: its process (pid *) ended during the test: signal SIGKILL (9)",
            "rank 0 of 2, as a consequence: was still in the test 0.2 s after another rank had failed",
            "*Captured output of rank 1*",
            "last words",
        ]
    )


DEATHS = file(
    "test_deaths.py",
    """
@pytest.mark.ranks(2, init=False, fresh=True, may_die=[1])
def test_survivors_count(rank):
    if rank == 1:
        os.kill(os.getpid(), 9)

@pytest.mark.ranks(2, init=False, fresh=True, may_die=True)
def test_survivors_fail(rank):
    if rank == 1:
        os.kill(os.getpid(), 9)
    assert rank == 1

@pytest.mark.ranks(2, init=False, fresh=True, may_die=True)
def test_nobody_left(rank):
    os.kill(os.getpid(), 9)
""",
)


def test_deaths_on_purpose(inner: InnerRun) -> None:
    assert inner.outcomes(DEATHS) == {"passed": 1, "failed": 2}
    inner.said("test_survivors_fail").fnmatch_lines(["rank 0 of 2: AssertionError*"])
    inner.said("test_nobody_left").fnmatch_lines(["every rank died*no rank has checked*"])


# The deadline is when the rank has reached its last line, and is in the state that it has named.
file(
    "deadline/conftest.py",
    """
import contextlib, time
from fastcoll.system.processes import status_of
from fastcoll.testing import pool

class Clock:
    sleep, late = time.sleep, 0
    def __init__(self, path):
        self.path = path
    def monotonic(self):
        with contextlib.suppress(FileNotFoundError):
            pid, state = open(self.path).read().split()
            if status_of(int(pid))[0].decode() == state:
                self.late = 1e6
        return time.monotonic() + self.late

def pytest_runtest_setup(item):
    pool.time = Clock(item.name.partition("[")[0])
def pytest_runtest_teardown():
    pool.time = time
""",
)
DEADLINE = file(
    "deadline/test_deadline.py",
    """
def reach(name, state):
    with open(f"{name}.part", "w") as file:
        file.write(f"{os.getpid()} {state}")
    os.rename(f"{name}.part", name)

def wait_for_ever():
    reach("test_late", "S")
    time.sleep(1000)

@pytest.mark.ranks(1, init=False, timeout=1000)
def test_late():
    wait_for_ever()

@pytest.mark.ranks(1, init=False, timeout=1000)
def test_stopped():
    reach("test_stopped", "T")
    os.kill(os.getpid(), 19)
""",
)


def test_the_deadline_shows_where_each_rank_is(inner: InnerRun) -> None:
    assert inner.outcomes(DEADLINE) == {"failed": 2}
    late, stopped = inner.said("test_late"), inner.said("test_stopped")
    late.fnmatch_lines(
        [
            "rank 0 of 1: did not finish within 1000 s",
            "*hread (most recent call first):",  # the current thread, unless another one has received the signal
            "*line * in wait_for_ever",
            "*line * in test_late",
        ]
    )
    stopped.fnmatch_lines(["rank 0 of 1: did not finish within 1000 s", "it does not say where it is*"])
    for said in (late, stopped):
        said.no_fnmatch_line("*pytest_pyfunc_call*")


LEAKS = file(
    "test_leaks.py",
    f"""
import subprocess, threading
kept = []

@pytest.mark.ranks(2, init=False)
def test_in_the_rank(rank):
    if rank == 1:
        kept.append(open("/dev/zero"))
        kept.append(subprocess.Popen(["sleep", "1000"]))
        stop = threading.Event()
        threading.Thread(target=stop.wait, name="left-alone", daemon=True).start()

@pytest.mark.ranks(1, init=False)
def test_in_shared_memory():
    open("/dev/shm/{SEGMENT}", "w").close()

@pytest.mark.ranks(1, init=False)
def test_of_another_session():
    open("/dev/shm/{SEGMENT}-of-another", "w").close()
    open("/dev/shm/other-{SEGMENT}", "w").close()

@pytest.mark.ranks(1, init=False)
def test_nothing():
    cycle = [open("/dev/zero")]
    cycle.append(cycle)  # the garbage collector closes the file
""",
)


def test_leaks_fail_the_test_by_name(inner: InnerRun) -> None:
    assert inner.outcomes(LEAKS) == {"passed": 2, "failed": 2}
    inner.said("test_in_the_rank").fnmatch_lines(
        ["rank 1 of 2: left behind after the test: *thread 'left-alone'*(/dev/zero)*child *(sleep 1000)*"]
    )
    inner.said("test_in_shared_memory").fnmatch_lines(
        [f"left in shared memory after the test: /dev/shm/{SEGMENT}"]
    )


SKIPS = file(
    "test_skips.py",
    """
@pytest.mark.ranks(2, init=False)
def test_all_skip():
    pytest.skip("not here")

@pytest.mark.ranks(2, init=False)
def test_one_skips(rank):
    if rank == 1:
        pytest.skip("not here")

@pytest.mark.skipif(True, reason="never")
@pytest.mark.ranks(2, init=False)
def test_skip_mark():
    pass

@pytest.mark.xfail(strict=True)
@pytest.mark.ranks(2, init=False)
def test_expected():
    assert False
""",
)


def test_skips_and_expected_failures(inner: InnerRun) -> None:
    assert inner.outcomes(SKIPS) == {"skipped": 2, "failed": 1, "xfail": 1}
    inner.said("test_one_skips").fnmatch_lines(["rank 1 of 2 skipped the test (not here), others ran it*"])
    inner.summary().fnmatch_lines(["SKIPPED*: not here"])


EXPECTED = file(
    "test_expected.py",
    """
import fastcoll

@pytest.mark.ranks(2)
def test_imperative(rank):
    if rank == 1:
        pytest.xfail("not yet")
    fastcoll.barrier()

@pytest.mark.xfail(raises=ValueError, strict=True, reason="as expected")
@pytest.mark.ranks(2)
def test_raises(rank):
    if rank == 1:
        raise ValueError
    fastcoll.barrier()

@pytest.mark.xfail(raises=fastcoll.GroupError)
@pytest.mark.ranks(2)
def test_raises_another(rank):
    if rank == 1:
        raise ValueError("another")
    fastcoll.barrier()

@pytest.mark.xfail(strict=True, reason="as expected")
@pytest.mark.ranks(2)
def test_on_one_rank(rank):
    assert rank == 0

@pytest.mark.xfail(strict=True, reason="as expected")
@pytest.mark.ranks(2)
def test_strict():
    pass

@pytest.mark.xfail
@pytest.mark.ranks(2)
def test_xpass():
    pass
""",
)


def test_xfail_in_the_ranks(inner: InnerRun) -> None:
    assert inner.outcomes(EXPECTED) == {"xfail": 3, "failed": 2, "xpass": 1}
    assert f"{EXPECTED}::test_imperative[n2] XFAIL (not yet)" in inner.text
    assert f"{EXPECTED}::test_raises[n2] XFAIL (as expected)" in inner.text
    inner.said("test_raises_another").fnmatch_lines(["rank 1 of 2: ValueError: another"])
    inner.said("test_strict").fnmatch_lines(["?XPASS(strict)? as expected"])


SUBTESTS = file(
    "test_subtests.py",
    """
@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("how", [pytest.skip, pytest.xfail, pytest.fail])
def test_subtest(subtests, how):
    with subtests.test():
        how("one")
    with subtests.test():
        pass
""",
)


def test_only_failed_subtests_decide_on_the_test(inner: InnerRun) -> None:
    assert inner.outcomes(SUBTESTS) == {"passed": 2, "failed": 1}


WRONG_MARK = file("test_wrong_mark.py", "@pytest.mark.ranks(2, colour=1)\ndef test_it():\n    pass\n")


def test_a_wrong_mark_is_refused_at_collection(inner: InnerRun) -> None:
    inner.said(WRONG_MARK).fnmatch_lines(["*unknown option 'colour'; known are init,*"])
    assert inner.outcomes(WRONG_MARK) == {}


IN_A_WORKER = """
import os
if os.getpid() != int(os.environ.setdefault("FIRST_PROCESS", str(os.getpid()))):
    raise RuntimeError("not importable twice")
"""
NOT_TWICE = file(
    "test_not_twice.py",
    f"{IN_A_WORKER}\n@pytest.mark.ranks(2, init=False)\ndef test_not_twice():\n    pass\n",
)


def test_a_rank_that_cannot_import_the_test_shows_why(inner: InnerRun) -> None:
    assert inner.outcomes(NOT_TWICE) == {"failed": 1}
    inner.said("test_not_twice").fnmatch_lines(["all 2 ranks:*", "E*RuntimeError: not importable twice"])


def test_ranks_start_though_the_directory_has_changed(tmp_path: Path) -> None:
    files = {
        "sub/conftest.py": """
import os, pytest
pytest_plugins = ["pytester"]
@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory):
    os.chdir(tmp_path_factory.mktemp("elsewhere"))
""",
        "sub/test_away.py": """
import pytest
def test_here():
    pass

@pytest.mark.ranks(2, init=False, fresh=True)
def test_away(rank):
    pass
""",
    }
    assert InnerRun(tmp_path, files, "sub").outcomes("sub/test_away.py") == {"passed": 2}


WRONG_PLACES = file(
    "test_wrong_places.py",
    """
import unittest

def test_without_the_mark(rank):
    pass

class TestIt(unittest.TestCase):
    @pytest.mark.ranks(2)
    def test_in_a_case(self):
        pass
""",
)


def test_wrong_places_are_refused(inner: InnerRun) -> None:
    assert inner.outcomes(WRONG_PLACES) == {"error": 2}
    inner.said("test_without_the_mark").fnmatch_lines(
        ["*rank is for tests with the mark @pytest.mark.ranks(n)*"]
    )
    inner.said("TestIt.test_in_a_case").fnmatch_lines(["ranks is for functions and*unittest.TestCase"])


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_survives_pytest(pytester: pytest.Pytester, number: int) -> None:
    pytester.makepyfile(
        """
        import os, time, pytest

        @pytest.mark.ranks(2, init=False)
        def test_it(rank):
            with open(f"pid-{rank}.part", "w") as file:
                file.write(str(os.getpid()))
            os.rename(f"pid-{rank}.part", f"pid-{rank}")
            time.sleep(1000)
        """
    )
    with subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q"], stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        files = [Path(f"pid-{rank}") for rank in range(2)]
        until(lambda: all(file.exists() for file in files))
        pids = [int(file.read_text()) for file in files]
        watched = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(number)
        code = process.wait(LIMIT)
        try:
            assert code == (2 if number == signal.SIGINT else -number)
            assert all(map(_ends, watched))
        finally:
            for descriptor in watched:
                os.close(descriptor)


def _ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], LIMIT)[0])


def test_what_cuda_opens_at_its_first_use_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    event, before = "anon_inode:[eventfd]", Footprint({}, {1: "a"}, {})
    for target, leaks in (
        ("/dev/nvidiactl", []),
        ("/tmp/x", ["descriptor 5 (/tmp/x)", f"descriptor 6 ({event})"]),
    ):
        after = Footprint({}, {1: "a", 5: target, 6: event}, {})
        monkeypatch.setattr(Footprint, "now", staticmethod(lambda after=after: after))
        assert before.growth() == leaks
