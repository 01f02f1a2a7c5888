"""pytest: the fixtures `join_hosts` and `slurm`, and `--ranks-hosts N`: tests with the mark ranks run on N hosts.

With the option, the first two ranks are on the first host, the next two on the second one and so on; in a world of
two, each rank has its own host. So four hosts run worlds of up to eight ranks; nodes of 3 and 5 ranks differ in size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastcoll.hybrid import backend as hybrid
from fastcoll.testing.mark import Place
from hosts.network import Host, Network, lacking
from hosts.slurm import Cluster, slurm_cluster, slurm_lacking

_RANKS_A_HOST = 2


@pytest.fixture
def join_hosts() -> Iterator[Callable[..., Network]]:
    """Return a function that makes networks, with the arguments of Network, for the test; skip if none can be made."""
    if reason := lacking():
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda *args, **options: stack.enter_context(Network(*args, **options))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Return a Slurm of two hosts, for the whole session; skip if none can run here."""
    if reason := slurm_lacking():
        pytest.skip(reason)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("fastcoll")
    group.addoption("--ranks-hosts", type=int, metavar="N", help="run tests with the mark ranks on N hosts")
    text = "let groups over several nodes send everything through the nodes, however small"
    group.addoption("--ranks-through-nodes", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if (hosts := config.getoption("ranks_hosts")) is not None:
        config.pluginmanager.register(Placing(hosts), "fastcoll-ranks-hosts")
    if config.getoption("ranks_through_nodes"):
        hybrid.FLAT = 0


class Placing:
    """Places ranks on hosts, which are made for the first test that needs them.

    Args:
        hosts: how many.
    """

    def __init__(self, hosts: int) -> None:
        self._count = hosts
        self._network: Network | None = None

    def pytest_ranks_places(self, world_size: int) -> Sequence[Place]:
        if reason := lacking():
            pytest.skip(reason)
        self._network = self._network or Network(self._count)
        return places(self._network.hosts, world_size)

    def pytest_unconfigure(self) -> None:
        if self._network is not None:
            self._network.close()


def places(hosts: Sequence[Host], world_size: int) -> list[Place]:
    """Return a place for each rank, on these hosts in turn."""
    if world_size > _RANKS_A_HOST * len(hosts):
        pytest.skip(f"{world_size} ranks need more than {len(hosts)} hosts")
    share = 1 if world_size <= _RANKS_A_HOST else _RANKS_A_HOST
    return [_place(hosts[rank // share]) for rank in range(world_size)]


def _place(host: Host) -> Place:
    return Place(tuple(host.enter()), host.address, Path(host.root, "dev/shm"))
