"""The environment that each rank gets."""

from __future__ import annotations

from fastcoll.launch.nodes import NodeShare


def job(local_size: int = 2, nodes: int = 1, node_rank: int = 0) -> NodeShare:
    return NodeShare(("program",), local_size, nodes, node_rank, "host", 1234)


def test_one_node() -> None:
    environment = job().environment(1, {"HOME": "/home", "RANK": "9"})
    secret = environment.pop("FASTCOLL_SECRET")
    assert len(bytes.fromhex(secret)) == 32
    assert environment == {
        "HOME": "/home",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "host",
        "MASTER_PORT": "1234",
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": "1",
    }


def test_ranks_of_one_job_share_a_secret_and_jobs_do_not() -> None:
    one, other = job(), job()
    secrets = [each.environment(local, {})["FASTCOLL_SECRET"] for each in (one, other) for local in (0, 1)]
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert secrets[0] not in repr(one)


def test_many_nodes() -> None:
    environment = job(local_size=4, nodes=3, node_rank=2).environment(1, {})
    assert (environment["RANK"], environment["WORLD_SIZE"], environment["GROUP_RANK"]) == ("9", "12", "2")
    assert "FASTCOLL_SECRET" not in environment


def test_variables_of_the_user_are_kept() -> None:
    inherited = {"OMP_NUM_THREADS": "3", "NUMBA_NUM_THREADS": "2", "FASTCOLL_SECRET": "mine"}
    environment = job().environment(0, inherited)
    assert {name: environment[name] for name in inherited} == inherited
    assert job().single_threaded({"OMP_NUM_THREADS": "3"}) == ["NUMBA_NUM_THREADS"]


def test_no_secret_is_made_if_a_file_has_one() -> None:
    assert "FASTCOLL_SECRET" not in job().environment(0, {"FASTCOLL_SECRET_FILE": "/run/secret"})


def test_a_single_rank_may_use_all_cores() -> None:
    assert "OMP_NUM_THREADS" not in job(local_size=1).environment(0, {})
