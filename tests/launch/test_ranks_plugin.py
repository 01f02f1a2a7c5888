"""The mark `ranks` as its users see it: each test writes a test file and runs pytest on it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester) -> Run:
    """Run pytest in a process of its own on a file with the given text."""

    def run_on(text: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile("import os, time, pytest\n" + textwrap.dedent(text))
        return pytester.runpytest_subprocess(*options)

    return run_on


def test_ranks_get_their_rank_world_environment_and_a_common_directory(run: Run) -> None:
    result = run(
        """
        @pytest.mark.ranks(1, 3, init=False)
        def test_it(rank, world_size, tmp_path):
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
        "-v",
    )
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["*test_it?n1? PASSED*", "*test_it?n3? PASSED*"])


def test_fastcoll_is_initialised_around_the_test_and_its_fixtures(run: Run) -> None:
    result = run(
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
            fastcoll.barrier()

        @pytest.mark.ranks(2, init=False)
        def test_without_a_world():
            assert not fastcoll.is_initialized()

        @pytest.mark.ranks(2)
        def test_peers_of_a_failed_rank_are_told(rank):
            assert rank == 0
            fastcoll.barrier()
        """
    )
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["rank 1 of 2: AssertionError: assert 1 == 0", "rank 0 of 2, as a consequence: PeerDiedError: *"]
    )


def test_workers_are_reused_and_replaced_after_a_failure(run: Run) -> None:
    result = run(
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
        """
    )
    result.assert_outcomes(passed=4, failed=1)
    for rank in range(2):
        a, b, c, d = (Path(f"{name}-{rank}").read_text() for name in "abcd")
        assert a == b
        assert len({a, c, d}) == 3


def test_fixtures_parameters_classes_and_monkeypatch_work_in_the_ranks(
    run: Run, pytester: pytest.Pytester
) -> None:
    pytester.makeconftest(
        """
        import pytest
        def pytest_addoption(parser):
            parser.addoption("--flavour", default="plain")
        @pytest.fixture(scope="session")
        def flavour(request):
            return request.config.getoption("--flavour")
        """
    )
    result = run(
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
        "--flavour=sour",
    )
    result.assert_outcomes(passed=2)
    assert Path("torn-down-0").exists()
    assert Path("torn-down-1").exists()


def test_equal_failures_are_merged_and_asserts_show_values(run: Run) -> None:
    result = run(
        """
        @pytest.mark.ranks(3, init=False)
        def test_it(rank):
            print(f"printed by {rank}")
            values = [1, 2]
            assert values == [1, 4]
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "all 3 ranks: AssertionError: assert ?1, 2? == ?1, 4?",
            "E*At index 1 diff: 2 != 4",
            "*Captured output of rank 0*",
            "printed by 0",
            "*Captured output of rank 2*",
            "printed by 2",
        ]
    )
    # The summary repeats the whole message where the environment says CI.
    failures, _, _ = str(result.stdout).partition("short test summary info")
    assert failures.count("At index 1 diff") == 1


def test_a_failure_that_follows_from_another_comes_second(run: Run) -> None:
    result = run(
        """
        from fastcoll.errors import PeerDiedError

        @pytest.mark.ranks(3, init=False)
        def test_it(rank):
            if rank == 2:
                raise ValueError("the cause")
            raise PeerDiedError("rank 2 is gone", [2])
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 2 of 3: ValueError: the cause",
            "E*ValueError: the cause",
            "rank 0 of 3, as a consequence: PeerDiedError: rank 2 is gone",
            "rank 1 of 3, as a consequence: PeerDiedError: rank 2 is gone",
        ]
    )


def test_a_dead_rank_is_named_and_the_stranded_ones_are_ended(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from fastcoll.launch import ranks_pool\nranks_pool._GRACE_SECONDS = 0.2")
    result = run(
        """
        @pytest.mark.ranks(2, init=False)
        def test_it(rank):
            print("last words")
            if rank == 1:
                os.kill(os.getpid(), 9)
            time.sleep(1000)
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2: its process (pid *) ended during the test: signal SIGKILL (9)",
            "rank 0 of 2, as a consequence: was still in the test 0.2 s after another rank had failed",
            "*Captured output of rank 1*",
            "last words",
        ]
    )


def test_deaths_on_purpose(run: Run) -> None:
    result = run(
        """
        @pytest.mark.ranks(3, init=False, fresh=True, may_die=[1])
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
        """
    )
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(["rank 0 of 2: AssertionError*", "every rank died*nobody has checked*"])


def test_the_deadline_shows_where_each_rank_is(run: Run) -> None:
    result = run(
        """
        def wait_for_ever():
            time.sleep(1000)

        @pytest.mark.ranks(2, init=False, timeout=0.5)
        def test_it(rank):
            if rank == 1:
                wait_for_ever()

        @pytest.mark.ranks(1, init=False, timeout=0.5)
        def test_stopped(rank):
            os.kill(os.getpid(), 19)
        """
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2: did not finish within 0.5 s",
            "Current thread (most recent call first):",
            "*line * in wait_for_ever",
            "*line * in test_it",
            "rank 0 of 1: did not finish within 0.5 s",
            "it does not say where it is*",
        ]
    )
    result.stdout.no_fnmatch_line("*pytest_pyfunc_call*")


def test_leaks_fail_the_test_by_name(run: Run) -> None:
    segment = f"fastcoll-test-{os.getpid()}"
    result = run(
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
            open("/dev/shm/{segment}", "w").close()

        @pytest.mark.ranks(1, init=False)
        def test_nothing():
            cycle = [open("/dev/zero")]
            cycle.append(cycle)  # the garbage collector closes the file
        """,
        "-W",
        "ignore::pytest.PytestUnraisableExceptionWarning",
    )
    Path("/dev/shm", segment).unlink()
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2: left behind after the test: *thread 'left-alone'*(/dev/zero)*child *(sleep 1000)*",
            f"left in shared memory after the test: /dev/shm/{segment}",
        ]
    )


def test_skips_and_expected_failures(run: Run) -> None:
    result = run(
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
        "-rs",
    )
    result.assert_outcomes(skipped=2, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(
        ["rank 1 of 2 skipped the test (not here), others ran it*", "SKIPPED*: not here"]
    )


def test_a_wrong_mark_is_refused_at_collection(run: Run) -> None:
    result = run("@pytest.mark.ranks(2, colour=1)\ndef test_it():\n    pass")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*unknown option 'colour'; known are init,*"])


IN_A_WORKER = """
import os
if os.getpid() != int(os.environ.setdefault("FIRST_PROCESS", str(os.getpid()))):
    raise RuntimeError("not importable twice")
"""


def test_a_rank_that_cannot_import_the_test_shows_why(run: Run) -> None:
    result = run(f"{IN_A_WORKER}\n@pytest.mark.ranks(2, init=False)\ndef test_it():\n    pass")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["all 2 ranks:*", "E*RuntimeError: not importable twice"])


def test_a_worker_that_cannot_start_shows_why(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makeconftest(IN_A_WORKER)
    result = run("@pytest.mark.ranks(2, init=False)\ndef test_it():\n    pass")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["all 2 ranks: its process did not start: exit code *", "*not importable twice"]
    )


def test_wrong_places_are_refused(run: Run) -> None:
    result = run(
        """
        import unittest

        def test_without_the_mark(rank):
            pass

        class TestIt(unittest.TestCase):
            @pytest.mark.ranks(2)
            def test_it(self):
                pass
        """
    )
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        [
            "*rank is for tests with the mark @pytest.mark.ranks(n)*",
            "ranks is for functions and*unittest.TestCase",
        ]
    )


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
        pids = [int(_read_when_there(Path(f"pid-{rank}"))) for rank in range(2)]
        watched = [os.pidfd_open(pid) for pid in pids]
        process.send_signal(number)
        code = process.wait(10)
        try:
            assert code == (2 if number == signal.SIGINT else -number)
            assert all(map(_ends, watched))
        finally:
            for descriptor in watched:
                os.close(descriptor)


def _read_when_there(path: Path) -> str:
    end = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < end, f"{path} does not appear"
        time.sleep(0.01)
    return path.read_text()


def _ends(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 5)[0])
