"""A store's server and its limit of file descriptors: it is raised in time, or the error is clear."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from fastcoll.errors import ResourceError
from fastcoll.store import TCPStore, tcp_store
from fastcoll.system.address import FOR_OTHERS, make_room

FEW = """
import resource, sys
from fastcoll.store import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
print(store.port, flush=True)
sys.stdin.readline()
store.close()
"""


@pytest.fixture
def few_descriptors() -> Iterator[Callable[[int, int], None]]:
    """Set this process's limits of descriptors, for one test."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda soft, hard: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def test_a_server_without_free_descriptors_says_so(processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_store, "_FULL_SECONDS", 0.3)
    server = processes.start(FEW, 0, 40, 40)
    port = int(server.stdout.readline())
    why = r"rank 0\) has reached its limit of file descriptors; raise it before the start \(ulimit -n"
    stores: list[TCPStore] = []
    with ExitStack() as crowd:
        with pytest.raises(ResourceError, match=why):
            stores.extend(crowd.enter_context(TCPStore("127.0.0.1", port, timeout=60)) for _ in range(60))
        assert stores[0].add("n", 1) == 1
        stores.pop().close()
        monkeypatch.setattr(tcp_store, "_FULL_SECONDS", 60.0)  # a busy server may see the first one
        with TCPStore("127.0.0.1", port, timeout=60) as late:
            assert late.add("n", 1) == 2
    server.stdin.write("\n")
    assert server.communicate(timeout=60)[1].count("the store takes no more than") == 1


def test_a_server_raises_its_soft_limit(processes) -> None:
    server = processes.start(FEW, 0, 40, 300)
    port = int(server.stdout.readline())
    with ExitStack() as crowd:
        stores = [crowd.enter_context(TCPStore("127.0.0.1", port, timeout=60)) for _ in range(100)]
        assert [store.add("n", 1) for store in stores] == list(range(1, 101))


def test_the_limit_is_raised_before_the_ranks_come(few_descriptors, caplog: pytest.LogCaptureFixture) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    few_descriptors(200, hard)
    with caplog.at_level(logging.INFO, "fastcoll"):
        make_room(10, "ten ranks")
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (200, hard)
        make_room(500, "the store for 500 ranks")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 500 + FOR_OTHERS < soft < 700
    (record,) = caplog.records
    assert f"from 200 to {soft} for the store for 500 ranks" in record.message


def test_rank_0_refuses_more_ranks_than_its_hard_limit_allows(processes) -> None:
    source = """
import resource, sys
from fastcoll.rendezvous.methods import meet_at_address
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
meet_at_address("127.0.0.1", int(sys.argv[1]), 0, 1000, 20.0, "this test")
"""
    started = processes.start(source, 1)
    err = started.communicate(timeout=60)[1]
    assert "ResourceError: the store for 1000 ranks needs 10" in err
    assert "may have 100; raise it before the start (ulimit -n" in err
