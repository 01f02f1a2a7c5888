from __future__ import annotations

import pytest

from fastcoll.errors import UsageError
from fastcoll.rendezvous.detect import Detected, derived_port, detect, hosts_of, port_beside


def variables(text: str) -> dict[str, str]:
    """Return the environment that NAME=VALUE, separated by blanks, describe."""
    return dict(each.split("=") for each in text.split())


TORCH = variables("RANK=1 WORLD_SIZE=4 MASTER_ADDR=10.0.0.1 MASTER_PORT=29500")
AGENT = TORCH | variables("LOCAL_RANK=1 LOCAL_WORLD_SIZE=2")
OPEN_MPI = variables(
    "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_LOCAL_SIZE=4 "
    "PMIX_NAMESPACE=prterun-host-1@1"
)
HYDRA = variables("PMI_RANK=0 PMI_SIZE=2 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2")
MVAPICH = variables("MV2_COMM_WORLD_RANK=0 MV2_COMM_WORLD_SIZE=2")
SLURM = variables(
    "SLURM_PROCID=5 SLURM_NTASKS=8 SLURM_LOCALID=1 SLURM_JOB_ID=77 SLURM_JOB_NUM_NODES=2 SLURM_JOB_NODELIST=node[01-02]"
)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCH, ("environment", 1, 4, None, None)),
        (AGENT, ("environment", 1, 4, 1, 2)),
        (OPEN_MPI, ("Open MPI", 3, 4, 3, 4)),
        (HYDRA, ("MPICH/Hydra", 0, 2, 0, 2)),
        (MVAPICH, ("MVAPICH", 0, 2, None, None)),
        (SLURM, ("Slurm", 5, 8, 1, None)),
    ],
)
def test_each_launcher(environ: dict[str, str], expected: tuple) -> None:
    found = detect(environ)
    assert (found.source, found.rank, found.world_size, found.local_rank, found.local_size) == expected


def test_where_to_meet() -> None:
    assert (detect(TORCH).master_addr, detect(TORCH).master_port) == ("10.0.0.1", 29500)
    slurm = detect(SLURM)
    assert (slurm.master_addr, slurm.master_port, slurm.job_id) == ("node01", None, "slurm 77.")
    assert detect(SLURM | {"SLURM_STEP_NODELIST": "node02", "SLURM_STEP_ID": "3"}).master_addr == "node02"
    assert detect(SLURM | {"SLURM_STEP_ID": "3"}).job_id == "slurm 77.3"
    assert detect(OPEN_MPI).job_id == "pmix prterun-host-1@1"
    assert 10000 <= derived_port("slurm 77.3") < 60000
    assert derived_port("slurm 77.3") != derived_port("slurm 77.4")


def test_the_port_beside_has_no_other_use() -> None:
    assert (port_beside(29500), port_beside(6024), port_beside(6023)) == (24500, 1024, 11023)
    for port in range(1, 65536):
        beside = {port, port_beside(port), port_beside(port, away=10000)}
        assert len(beside) == 3
        assert 0 < min(beside) <= max(beside) <= 65535


def test_an_empty_variable_counts_as_one_that_is_not_set() -> None:
    empty = dict.fromkeys([*AGENT, *SLURM, *MVAPICH, "SLURM_STEP_NODELIST"], "")
    assert detect(empty) == Detected()
    assert detect(empty | HYDRA) == detect(HYDRA)
    assert detect(SLURM | {"RANK": "", "LOCAL_WORLD_SIZE": "", "SLURM_STEP_NUM_TASKS": ""}) == detect(SLURM)


def test_one_node() -> None:
    assert detect(OPEN_MPI).on_one_node
    assert detect(HYDRA).on_one_node
    assert not detect(MVAPICH).on_one_node
    assert not detect(SLURM).on_one_node
    assert detect(SLURM | {"SLURM_JOB_NUM_NODES": "1"}).on_one_node
    assert detect(SLURM | {"SLURM_STEP_NUM_TASKS": "6"}).world_size == 6


@pytest.mark.parametrize(
    "environ", [{"HOME": "/"}, *(SLURM | {"SLURM_JOB_NAME": n} for n in ("bash", "interactive"))]
)
def test_no_launcher_and_a_slurm_shell_are_not_a_job(environ: dict[str, str]) -> None:
    assert detect(environ) == Detected()


def test_the_innermost_launcher_counts() -> None:
    """With mpirun or a launcher inside an allocation, each rank inherits the batch step's variables."""
    found = detect(OPEN_MPI | SLURM)
    assert (found.rank, found.world_size, found.master_addr) == (3, 4, None)
    assert detect(TORCH | SLURM).rank == 1
    assert detect(AGENT | OPEN_MPI).rank == 1
    # srun has started this MPI's ranks, so the hosts are Slurm's.
    assert detect({"PMI_RANK": "5", "PMI_SIZE": "8"} | SLURM).master_addr == "node01"


@pytest.mark.parametrize(
    ("environ", "names"),
    [
        (TORCH | OPEN_MPI, ["RANK=1", "OMPI_COMM_WORLD_RANK=3"]),
        (OPEN_MPI | HYDRA, ["OMPI_COMM_WORLD_RANK=3", "PMI_RANK=0"]),
        ({"WORLD_SIZE": "3"} | OPEN_MPI, ["WORLD_SIZE=3", "OMPI_COMM_WORLD_SIZE=4"]),
    ],
)
def test_sources_that_disagree_are_both_named(environ: dict[str, str], names: list[str]) -> None:
    with pytest.raises(UsageError, match="disagrees with itself") as caught:
        detect(environ)
    assert all(name in str(caught.value) for name in names)


def test_agreeing_sources_are_fine_and_arguments_win() -> None:
    found = detect(TORCH | OPEN_MPI | {"RANK": "3"})
    assert (found.rank, found.source) == (3, "environment, Open MPI")
    found = detect(TORCH | OPEN_MPI, rank=0, world_size=2)
    assert (found.rank, found.world_size) == (0, 2)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "one"}, "RANK='one' must be a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK='-1'"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be a whole number from 1"),
        ({"RANK": "4", "WORLD_SIZE": "4"}, r"rank 4 \(RANK\) is not in a world of 4"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_PORT": "70000"}, "from 1 to 65535"),
        (SLURM | {"SLURM_JOB_NODELIST": "node[1-"}, "node list"),
    ],
)
def test_wrong_values_of_variables(environ: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        detect(environ)


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("login", ["login"]),
        ("node[01-03,7]", ["node01", "node02", "node03", "node7"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("n[9-11]-ib", ["n9-ib", "n10-ib", "n11-ib"]),
        ("gpu-a.site.org,gpu-b", ["gpu-a.site.org", "gpu-b"]),
    ],
)
def test_node_lists(nodelist: str, hosts: list[str]) -> None:
    assert hosts_of(nodelist) == hosts


@pytest.mark.parametrize("nodelist", ["", "n[", "n]", "n[1-]", "n[a-b]", "n[3-1]", "n[1-99999999]", ",,"])
def test_malformed_node_lists(nodelist: str) -> None:
    with pytest.raises(UsageError, match="Slurm node list"):
        hosts_of(nodelist)
