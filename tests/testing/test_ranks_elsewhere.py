"""Tests with the mark `ranks` on another backend and at other places."""

from __future__ import annotations

from pathlib import Path

import pytest
from inner_pytest import InnerRun

from fastcoll.system.processes import session

# Two nodes, the first with the even ranks; /dev/shm of the second is another folder.
CONFTEST = """
import os, pathlib
from fastcoll.testing.mark import Place

def pytest_ranks_places(config, world_size):
    if world_size == 1:
        return None
    if world_size == 4:
        return [Place(("sh", "-c", "echo no such place; exit 3"))] * 4
    nodes = [
        Place(("env", "NODE=one"), "127.0.0.2"),
        Place(("env", "NODE=two"), "127.0.0.3", pathlib.Path({shm!r})),
    ]
    return [nodes[rank % 2] for rank in range(world_size)]
"""


PLACES = """
import os, pytest

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

NOWHERE = "import pytest\n@pytest.mark.ranks(4, init=False)\ndef test_nowhere(rank):\n    pass\n"
LEFT = """
import pytest

@pytest.mark.ranks(2, init=False)
def test_left(rank):
    open({left!r}, "w").close()
"""

BACKENDS = """
import pytest
import fastcoll as dist

@pytest.mark.ranks(1)
def test_of_any_backend():
    assert dist.get_backend_config() == "cpu:tcp"

@pytest.mark.ranks(1, backend="shm")
def test_of_one_backend():
    assert dist.get_backend_config() == "cpu:shm"
"""


@pytest.fixture(scope="module")
def shm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that is /dev/shm of the second node."""
    return tmp_path_factory.mktemp("shm")


@pytest.fixture(scope="module")
def inner(tmp_path_factory: pytest.TempPathFactory, shm: Path) -> InnerRun:
    """Run pytest with ranks on two nodes."""
    files = {
        "conftest.py": CONFTEST.format(shm=str(shm)),
        "test_places.py": PLACES,
        "test_left.py": LEFT.format(left=str(shm / f"fastcoll-left-{session()}")),
        "test_backends.py": BACKENDS,
        "test_nowhere.py": NOWHERE,
    }
    return InnerRun(tmp_path_factory.mktemp("inner"), files, "--ranks-backend", "tcp")


@pytest.mark.long
def test_ranks_are_where_a_plugin_puts_them(inner: InnerRun) -> None:
    assert inner.outcomes("test_places.py") == {"passed": 4}


@pytest.mark.long
def test_leaks_in_the_shared_memory_of_a_place_are_found(inner: InnerRun, shm: Path) -> None:
    assert inner.outcomes("test_left.py") == {"failed": 1}
    inner.said("test_left").fnmatch_lines(
        [f"left in shared memory after the test: {shm}/fastcoll-left-{session()}"]
    )


@pytest.mark.long
def test_a_rank_that_cannot_start_at_its_place_fails_the_test(inner: InnerRun) -> None:
    assert inner.outcomes("test_nowhere.py") == {"failed": 1}
    inner.said("test_nowhere").fnmatch_lines(
        ["all 4 ranks: its process did not start: exit code 3", "no such place"]
    )


@pytest.mark.long
def test_the_backend_of_tests_that_name_none(inner: InnerRun) -> None:
    """test_ranks_plugin.py has the default."""
    assert inner.outcomes("test_backends.py") == {"passed": 2}


def test_a_backend_that_is_not_available(tmp_path: Path) -> None:
    run = InnerRun(tmp_path, {"test_backends.py": BACKENDS}, "--ranks-backend", "nccl")
    assert run.code == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: --ranks-backend: backend 'nccl' is not available here" in run.text
