"""The environment that each rank gets. test_launcher.py has the ranks and addresses of real ones."""

from __future__ import annotations

import pytest

from fastcoll.launch.nodes import NodeShare

ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def job(local_size: int = 2, nodes: int = 1, node_rank: int = 0) -> NodeShare:
    return NodeShare(("program",), local_size, nodes, node_rank, "host", 1234)


def test_a_rank_gets_the_variables_of_its_job_beside_the_users() -> None:
    environment = job().environment(1, {"HOME": "/home", "RANK": "9"})
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    meeting = {"MASTER_ADDR": "host", "MASTER_PORT": "1234"}
    assert len(bytes.fromhex(environment.pop("FASTCOLL_SECRET"))) == 32
    assert environment == {"HOME": "/home", **place, **meeting, **ONE_THREAD}
    environment = job(local_size=4, nodes=3, node_rank=2).environment(1, {})
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["GROUP_RANK"]) == ("9", "12", "2")


def test_ranks_are_none_of_the_mpiexec_that_has_started_the_launcher() -> None:
    """With its variables, MPICH's MPI_Init ends the rank, and the backend mpi takes the rank for one of mpiexec's."""
    mpich = {"PMI_RANK": "0", "PMI_SIZE": "2", "PMI_FD": "9"}
    openmpi = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun@1", "OMPI_COMM_WORLD_RANK": "0"}
    environment = job().environment(0, {**mpich, **openmpi, "HOME": "/home"})
    assert environment["HOME"] == "/home"
    assert not {**mpich, **openmpi}.keys() & environment.keys()


def test_ranks_of_one_job_share_a_secret_and_jobs_do_not() -> None:
    one, other = job(), job()
    secrets = [each.environment(local, {})["FASTCOLL_SECRET"] for each in (one, other) for local in (0, 1)]
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert secrets[0] not in repr(one)


@pytest.mark.parametrize(
    ("share", "inherited"), [(job(nodes=3), {}), (job(), {"FASTCOLL_SECRET_FILE": "/run/secret"})]
)
def test_several_nodes_or_a_file_with_a_secret_get_none(share: NodeShare, inherited: dict[str, str]) -> None:
    assert "FASTCOLL_SECRET" not in share.environment(0, inherited)


def test_variables_of_the_user_are_kept_and_a_single_rank_may_use_all_cores() -> None:
    inherited = {"OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "2", "FASTCOLL_SECRET": "mine"}
    environment = job().environment(0, inherited)
    assert {name: environment[name] for name in inherited} == inherited
    assert job().thread_counts(0, {"OMP_NUM_THREADS": "3"}) == {"NUMBA_NUM_THREADS": "1"}
    assert not ONE_THREAD.keys() & job(local_size=1).environment(0, {})
