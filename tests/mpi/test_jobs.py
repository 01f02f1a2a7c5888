"""MPI jobs: the conformance suite and MPI's own cases with each library, and jobs that fail."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import apart
import pytest
from results import results_in

from fastcoll.testing.worker import shm_names

from .environments import environment, mpiexec, python_with

ROOT = Path(__file__).parents[2]
CASES = ["tests/mpi/cases.py", "tests/mpi/cases_between_nodes.py", "tests/mpi/cases_gpu.py"]
SUITE = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/conformance/test_*.py"))
# Our code combines the data and compares the calls. MPI itself does more in the other half of the suite.
COMPUTING = [path for path in SUITE if path.endswith(("_reductions.py", "_objects.py", "_wrong_calls.py"))]
MOVING = [path for path in SUITE if path not in COMPUTING]
JOBS = {
    ("mpich", 2): [*COMPUTING, *CASES],
    ("openmpi", 2): [*MOVING, *CASES],
    ("mpich", 4): MOVING,
    ("openmpi", 4): [*COMPUTING, *CASES],
}
ON_GPUS = [f"tests/conformance/test_{name}.py" for name in ("moves", "reductions", "point_to_point")]
SHM = Path("/dev/shm")
JOB_SECONDS = 900.0  # only a hang takes so long
COMPILE_SECONDS = 600.0
pytestmark = pytest.mark.limit(1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the environments, made once for all tests of this file."""
    return tmp_path_factory.mktemp("mpi")


@pytest.fixture(params=["mpich", pytest.param("openmpi", marks=pytest.mark.long)])
def python(request: pytest.FixtureRequest, folder: Path) -> Path:
    """An interpreter with one of the MPI libraries."""
    return python_with(request.param, folder)


@pytest.fixture
def swept() -> Iterator[None]:
    """Remove what MPI libraries leave in shared memory: when a rank is killed, and Open MPI for a world of one."""
    before, names = set(SHM.iterdir()), shm_names()
    yield
    mapped = "".join(map(maps_of, Path("/proc").glob("[0-9]*")))
    for path in set(SHM.iterdir()) - before:
        if path.name.startswith(("mpich_shm_", "sm_segment.")) and str(path) not in mapped:
            path.unlink(missing_ok=True)
    assert shm_names() <= names


def maps_of(process: Path) -> str:
    """Return the files that a process has mapped."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        return (process / "maps").read_text()
    return ""


def start(python: Path, ranks: int, *program: str, **variables: str) -> subprocess.Popen[str]:
    """Start a job, as the leader of its process group."""
    words, env = [*mpiexec(python, ranks), *program], {**environment(), **variables}
    out, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        words, cwd=ROOT, env=env, text=True, stdout=out, stderr=both, start_new_session=True
    )


def run(python: Path, ranks: int, *program: str, **variables: str) -> tuple[int, str]:
    """Run a job; return its exit status and output. If it takes too long, kill it and fail the test."""
    job = start(python, ranks, *program, **variables)
    try:
        output, _ = job.communicate(timeout=JOB_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        pytest.fail(f"the job took longer than {JOB_SECONDS:g} s:\n{job.communicate()[0]}", pytrace=False)
    return job.returncode, output


@pytest.fixture(scope="module")
def kernels_between_nodes(folder: Path) -> None:
    """Compile the kernels of the cases between nodes: compiling them can take longer than their deadlines.

    In another directory, because here Python would import the sources, which need not be what the jobs import.
    """
    warmup = [sys.executable, "-m", "fastcoll.warmup", "--dtypes", "float32,float64,int64"]
    subprocess.run(warmup, cwd=folder, env=environment(), check=True, timeout=COMPILE_SECONDS)


@pytest.mark.mpi
@pytest.mark.usefixtures("kernels_between_nodes")
@pytest.mark.parametrize(("library", "ranks"), JOBS)
def test_the_conformance_suite(folder: Path, library: str, ranks: int) -> None:
    """Each half of it runs with both libraries and in both worlds, as fastcoll decides who sends what."""
    options = ["-q", "--color=no", "-W", "error", *results_in(f"mpi-{library}-{ranks}")]
    suite = JOBS[library, ranks]
    status, output = run(python_with(library, folder), ranks, "tests/mpi/rank.py", *options, *suite)
    expect_passed(20, status, output)


def expect_passed(least: int, status: int, output: str) -> None:
    """Fail unless so many tests have passed, and none has failed."""
    passed = re.search(r"(\d+) passed", output)
    if status or passed is None or int(passed[1]) < least:
        pytest.fail(f"exit status {status}\n{output}", pytrace=False)


@pytest.mark.mpi
def test_fake_gpus_with_a_library_that_is_cuda_aware(folder: Path) -> None:
    """The tests of the conformance suite that are quick on Numba's simulator, which runs our kernels."""
    quick = "premul or coalesced or gather or all_to_all or broadcast or strided or tags or does_not_fit"
    status, output = run(
        python_with("mpich", folder), 2, "tests/mpi/rank.py", "-q", "--color=no", "-p", "gpu.on_fakes",
        "-p", "mpi.cuda_aware", "-k", quick, *ON_GPUS,
        PYTHONPATH=apart.environment()["PYTHONPATH"], NUMBA_ENABLE_CUDASIM="1",
    )  # fmt: skip
    expect_passed(15, status, output)


SCRIPT = """
import os, signal, sys, time
import numpy as np
import fastcoll as dist

dist.init_process_group("mpi", timeout=200)
rank = dist.get_rank()
"""


@pytest.mark.long
@pytest.mark.usefixtures("swept")
def test_a_world_of_one_needs_no_launcher(python: Path) -> None:
    code = SCRIPT + "dist.all_reduce(np.ones(3)); print(dist.get_backend(), dist.is_mpi_available())"
    words = [str(python), "-c", code]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=JOB_SECONDS)
    assert done.stdout == "mpi True\n", done.stderr


@pytest.mark.usefixtures("swept")
def test_ranks_meet_over_mpi_where_it_is_used_between_nodes(python: Path) -> None:
    """Also over TCP, where Open MPI sends nothing on a new connection while it is not called."""
    network = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "tcp,self", "OMPI_MCA_btl_tcp_if_include": "lo"}
    code = SCRIPT.replace('"mpi", ', "") + "x = np.ones(3); dist.all_reduce(x)\n"
    code += "assert (dist.get_world_size(), dist.get_backend(), x.sum()) == (2, 'shm', 6.0)"
    status, output = run(python, 2, "-c", code, FASTCOLL_BETWEEN_NODES="mpi", **network)
    assert status == 0, output


@pytest.mark.usefixtures("swept")
def test_a_world_without_mpi_may_have_a_group_over_mpi(python: Path) -> None:
    """MPI_Init waits for all ranks of the job, so the ranks outside the group initialise MPI, too."""
    code = SCRIPT.replace('"mpi", ', "") + "group = dist.new_group([0], backend='mpi')\n"
    code += "rank or (group.barrier(), print('on', dist.get_backend(group)))\ndist.barrier()"
    status, output = run(python, 2, "-c", code)
    assert status == 0, output
    assert "on mpi" in output


@pytest.mark.usefixtures("swept")
def test_a_rank_that_leaves_out_the_first_group_over_mpi_is_named(python: Path) -> None:
    """The others wait for it before they call MPI_Init, which has no timeout."""
    code = f"""{SCRIPT.replace('"mpi", ', "")}
if rank == 0:
    try:
        dist.new_group([0], timeout=2, backend="mpi")
    except dist.StoreTimeoutError as error:
        print("named:", "rank 1" in str(error))
dist.barrier()
"""
    status, output = run(python, 2, "-c", code)
    assert status == 0, output
    assert "named: True" in output


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize(
    ("end", "why"), [("rank or os.kill(os.getpid(), signal.SIGKILL)", ""), ("assert rank", "AssertionError")]
)
def test_a_rank_that_ends_ends_the_job(python: Path, end: str, why: str) -> None:
    """MPI's launcher ends all ranks, so none waits, but none can continue either."""
    status, output = run(python, 2, "-c", f"{SCRIPT}{end}\ndist.barrier(); print('went on')")
    assert status != 0
    assert "went on" not in output
    assert why in output


def test_a_thread_level_below_multiple_is_enough(python: Path) -> None:
    """One lock serialises all MPI calls; collectives, messages and asynchronous calls still progress concurrently."""
    code = f"""
import mpi4py
mpi4py.rc.thread_level = "serialized"
{SCRIPT}
works = [dist.all_reduce(np.ones(100_000), async_op=True) for _ in range(20)]
got = np.zeros(100_000)
receive = dist.irecv(got, 1 - rank)
send = dist.isend(np.full(100_000, float(rank)), 1 - rank)
group = dist.new_group()
for _ in range(20):
    dist.barrier(group=group)
for work in (*works, receive, send):
    work.wait()
from mpi4py import MPI
assert (got == 1 - rank).all() and MPI.Query_thread() == MPI.THREAD_SERIALIZED
print("done")
"""
    status, output = run(python, 2, "-c", code)
    assert (status, output.count("done")) == (0, 2), output


@pytest.mark.usefixtures("swept")
def test_a_program_may_finalize_mpi_before_it_leaves(python: Path) -> None:
    """Then later calls raise, MPI cannot be used again, and the program ends well."""
    code = f"""{SCRIPT}
from mpi4py import MPI
x = np.ones(3)
dist.all_reduce(x)
MPI.COMM_WORLD.Barrier()
MPI.Finalize()
calls = [lambda: dist.all_reduce(x), lambda: dist.send(x, 1 - rank)]
for call, error in [*[(call, "MPI_Finalize") for call in calls], (dist.new_group, "MPI_Finalize was called")]:
    try:
        call()
    except dist.FastcollError as raised:
        assert error in str(raised), raised
    else:
        assert False
assert not dist.is_mpi_available()
print("done")
"""
    status, output = run(python, 2, "-c", code)
    assert (status, output.count("done")) == (0, 2), output


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("world", ["mpi", "auto"])
def test_fastcoll_finalizes_the_mpi_that_it_has_initialised(python: Path, world: str) -> None:
    """It does so after it has left its groups, also one that was made after the world."""
    code = f"""
import mpi4py
mpi4py.rc.initialize = False
{SCRIPT.replace('"mpi"', repr(world))}
group = dist.new_group(backend="mpi")
from mpi4py import MPI
def at_finalize(*_):
    sys.stdout.write(f"finalized, in a group: {{dist.is_initialized()}}\\n")
MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=at_finalize), 1)
dist.all_reduce(np.ones(3), group=group)
"""
    status, output = run(python, 2, "-c", code)
    assert (status, output.count("finalized, in a group: False")) == (0, 2), output


@pytest.mark.usefixtures("swept")
def test_variables_of_another_job_do_not_matter(python: Path) -> None:
    """Ranks that meet through MPI take rank and size from MPI; RANK and WORLD_SIZE may be left over."""
    code = SCRIPT + "x = np.ones(3); dist.all_reduce(x); print(f'sum {x.sum()}')"
    status, output = run(python, 2, "-c", code, RANK="0", WORLD_SIZE="1")
    assert (status, output.count("sum 6.0")) == (0, 2), output


@pytest.mark.usefixtures("swept")
def test_a_rank_0_that_cannot_serve_the_store_names_the_reason_on_all_ranks(python: Path) -> None:
    code = f"""
from mpi4py import MPI
import os
if MPI.COMM_WORLD.rank == 0:
    os.environ["FASTCOLL_SECRET_FILE"] = "/nowhere/secret"
{SCRIPT}
"""
    status, output = run(python, 2, "-c", code)
    assert status != 0
    assert "UsageError: FASTCOLL_SECRET_FILE" in output
    assert "RendezvousError: rank 0 cannot serve the store: FASTCOLL_SECRET_FILE" in output


@pytest.mark.long
@pytest.mark.usefixtures("swept")
def test_a_start_follows_attempts_of_rank_0_that_failed(python: Path) -> None:
    """The addresses of the stores of these attempts reach the other rank first."""
    code = """
import fastcoll as dist
from mpi4py import MPI
world = MPI.COMM_WORLD
for _ in range(3) if world.rank == 0 else ():
    try:
        dist.init_process_group("mpi", timeout=0.3)
    except dist.StoreTimeoutError:
        print("late")
world.Barrier()
dist.init_process_group("mpi", timeout=200)
dist.barrier()
print("met")
"""
    status, output = run(python, 2, "-c", code)
    assert (status, output.count("late"), output.count("met")) == (0, 3, 2), output


@pytest.mark.long
@pytest.mark.usefixtures("swept")
def test_too_many_communicators_are_a_resource_error(folder: Path) -> None:
    """MPICH has about 2,000."""
    code = f"""{SCRIPT}
from mpi4py import MPI
mine = []
try:
    while True:
        mine.append(MPI.COMM_SELF.Dup())
except MPI.Exception:
    pass
dist.barrier()
try:
    dist.new_group()
except dist.ResourceError as error:
    print("Too many communicators" in str(error))
for comm in mine:
    comm.Free()
dist.barrier()
dist.barrier(group=dist.new_group())
"""
    status, output = run(python_with("mpich", folder), 2, "-c", code)
    assert (status, output.count("True")) == (0, 2), output


@pytest.mark.usefixtures("swept")
def test_ranks_that_a_rank_starts_by_the_launcher_are_refused(python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import fastcoll as dist\ndist.init_process_group('mpi')")
    status, output = run(python, 2, "-m", "fastcoll.launch", "-n", "2", str(program))
    assert status != 0
    assert "was not started by an MPI launcher; start it with mpiexec" in output
    assert "PMI_Init" not in output


@pytest.mark.long
@pytest.mark.usefixtures("swept")
def test_the_mpiexec_of_another_mpi_is_refused(folder: Path) -> None:
    """Open MPI's library finds one rank where MPICH's launcher has started two. The converse ends in MPI_Init."""
    mpich, openmpi = (python_with(library, folder) for library in ("mpich", "openmpi"))
    code = SCRIPT.replace("timeout=200", "timeout=200, **eval(sys.argv[1])") + "print('world')"
    for given, refused, started in (("{}", 2, 0), ("dict(rank=0, world_size=1)", 0, 2)):
        words = [str(mpich.parent / "mpiexec"), "-n", "2", str(openmpi), "-c", code, given]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=JOB_SECONDS)
        assert done.stderr.count("mpiexec has started 2 ranks (PMI_SIZE), but Open MPI") == refused, (
            done.stderr
        )
        assert done.stdout.count("world") == started


def test_ranks_of_two_jobs_cannot_be_one_world(python: Path, tmp_path: Path) -> None:
    code = (
        "import sys, fastcoll as dist\n"
        "dist.init_process_group('mpi', init_method=sys.argv[1], rank=int(sys.argv[2]), world_size=2, timeout=200)"
    )
    jobs = [start(python, 1, "-c", code, f"file://{tmp_path}/store", str(rank)) for rank in range(2)]
    for job in jobs:
        output, _ = job.communicate(timeout=JOB_SECONDS)
        assert "not ranks of one MPI job" in output
        assert job.returncode != 0
