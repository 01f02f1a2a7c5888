"""Tests with the mark `ranks` on another backend, and in other places."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., pytest.RunResult]

# Two nodes of which the first has the even ranks; /dev/shm of the second is another folder.
CONFTEST = """
import os, pathlib
from fastcoll.launch.ranks_mark import Place

def pytest_ranks_places(config, world_size):
    if world_size == 1:
        return None
    nodes = [
        Place(("env", "NODE=one"), "127.0.0.2"),
        Place(("env", "NODE=two"), "127.0.0.3", pathlib.Path({shm!r})),
    ]
    return [nodes[rank % 2] for rank in range(world_size)]
"""


@pytest.fixture
def run(pytester: pytest.Pytester, tmp_path: Path) -> Run:
    """Run pytest in a process of its own on a file with the given text, with ranks on two nodes."""

    def run_on(text: str, *options: str) -> pytest.RunResult:
        pytester.makeconftest(CONFTEST.format(shm=str(tmp_path)))
        pytester.makepyfile("import os, pytest\nimport fastcoll as dist\n" + textwrap.dedent(text))
        return pytester.runpytest_subprocess(*options)

    return run_on


def test_ranks_are_where_a_plugin_puts_them(run: Run) -> None:
    result = run(
        """
        @pytest.mark.ranks(1, 2, 3, init=False)
        def test_it(rank, world_size):
            names = ["NODE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"]
            found = [os.environ.get(name) for name in names]
            if world_size == 1:
                assert found == [None, "0", "1", "127.0.0.1"]
            else:
                node = ["one", "two"][rank % 2]
                neighbours = len(range(rank % 2, world_size, 2))
                assert found == [node, str(rank // 2), str(neighbours), "127.0.0.2"]

        @pytest.mark.ranks(2)
        def test_a_rank_serves_another_number_of_ranks_where_it_was(rank):
            assert os.environ["NODE"] == ["one", "two"][rank]
        """
    )
    result.assert_outcomes(passed=4)


def test_what_is_left_in_the_shared_memory_of_a_place_is_seen(run: Run, tmp_path: Path) -> None:
    left = tmp_path / "fastcoll-left"
    result = run(
        f"""
        @pytest.mark.ranks(2, init=False)
        def test_it(rank):
            open({str(left)!r}, "w").close()
        """
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"left in shared memory after the test: {left}"])


def test_a_rank_that_cannot_start_in_its_place_fails_the_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
        from fastcoll.launch.ranks_mark import Place

        def pytest_ranks_places(world_size):
            return [Place(("sh", "-c", "echo no such place; exit 3"))] * world_size
        """
    )
    pytester.makepyfile("import pytest\n@pytest.mark.ranks(1, init=False)\ndef test_it(rank):\n    pass\n")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["rank 0 of 1: its process did not start: exit code 3", "no such place"])


BACKENDS = """
@pytest.mark.ranks(1)
def test_of_any_backend():
    assert dist.get_backend_config() == "cpu:tcp"

@pytest.mark.ranks(1, backend="shm")
def test_of_one_backend():
    assert dist.get_backend_config() == "cpu:shm"
"""


def test_the_backend_of_tests_that_name_none(run: Run) -> None:
    run(BACKENDS, "--ranks-backend", "tcp").assert_outcomes(passed=2)
    run(BACKENDS).assert_outcomes(passed=1, failed=1)


def test_a_backend_that_is_not_there(run: Run) -> None:
    result = run(BACKENDS, "--ranks-backend", "nccl")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --ranks-backend: backend 'nccl' has no backend for CPU arrays*"])
