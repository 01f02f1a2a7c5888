"""Everything that needs a GPU, in one call on a machine that is lent for some minutes.

    python bench/gpu_machine.py --out OUT --wheels WHEELS --minutes 9.5
    python bench/gpu_machine.py --out OUT --rehearse --tiny                  without a GPU

One GPU is enough: ranks share it. Nothing is downloaded: WHEELS has the wheels of packages that the machine lacks
(posix_ipc, and a NumPy that its numba-cuda works with); they are installed into an environment in a temporary folder,
beside the packages of the Python that runs this script. Steps run one after the other, the most important first, each
with a limit in seconds; after a failure the next one runs, and a second call with --steps and another OUT may run those
for which there was no time. The report (report.md, report.json, junit.xml) is written after each step, and log.txt has
all output, so that they are complete up to the last step if the machine is taken away. Without a GPU the steps that
need one are reported so; with --rehearse they run with host arrays or a fake GPU as far as they can.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
_LAST_SECONDS = 8.0  # for the report of a step that has taken too long
_MOST_TEXT = 500_000  # characters of a step's output in log.txt, its beginning and its end
GPU, ANY = "a GPU", ""

PASSED, FAILED, OUT_OF_TIME = "passed", "failed", "took too long"
NO_GPU, NO_TIME, REHEARSED = "no GPU", "no time left", "rehearsed"


class Step(NamedTuple):
    """One command.

    `seconds` is its limit; `needs` says what it needs, GPU or ANY; `rehearsal` has the words that are added to the
    command to run it without a GPU, None if it cannot run so.
    """

    name: str
    checks: str
    command: tuple[str, ...]
    seconds: float
    needs: str = GPU
    rehearsal: tuple[str, ...] | None = None
    environ: Mapping[str, str] = MappingProxyType({})


class Done(NamedTuple):
    step: Step
    result: str
    seconds: float = 0.0
    output: str = ""


# ---- the steps -----------------------------------------------------------------------------------------------


def steps(tiny: bool) -> list[Step]:
    """Return all steps, the most important first; `tiny`: with as little data as possible."""
    python, tests = "{python}", str(ROOT / "tests")

    def hazard(case: str, checks: str, ranks: int = 2, backend: str = "shm", **environ: str) -> Step:
        words = (python, f"{tests}/gpu/hazards.py", case, "-n", str(ranks), "--backend", backend)
        name = f"{case}, {backend}, {ranks} ranks"
        return Step(name, checks, words, 75, rehearsal=("--host", "--backend", "shm"), environ=environ)

    def hardware(ranks: int, backend: str, carrier: str, *part: str) -> Step:
        launch = (python, "-m", "fastcoll.launch", "-n", str(ranks), f"{tests}/gpu/hardware_ranks.py")
        name = f"operations{''.join(f', {each}' for each in part)}: {backend}, {ranks} ranks"
        checks = f"{part[0] if part else 'every operation and dtype'} against NumPy, carried by {carrier}"
        return Step(name, checks, (*launch, backend, carrier, *part), 150)

    def conformance(library: str) -> Step:
        # The left out tests look at an array before they wait, or at two arrays that share memory.
        # Calls that differ fail the group there, by design.
        chosen = "n2 and not async and not objects and not share_memory and not both_calls and not public"
        chosen += " and not wrong_calls"
        words = pytest("-p", "gpu.on_gpu", f"{tests}/conformance", "-k", chosen, "-x" if tiny else "-ra")
        rehearsal = ("-k", "n2 and test_broadcast") if tiny else ()
        environ = {"GPU_TEST_ARRAYS": library}
        checks = f"the conformance suite on arrays of {library}, 2 ranks on one GPU"
        return Step(f"conformance: {library}", checks, words, 100, rehearsal=rehearsal, environ=environ)

    def pytest(*words: str) -> tuple[str, ...]:
        plugins = ("-p", "fastcoll.testing.plugin", "-p", "no:cacheprovider", "-W", "default")
        return (python, "-m", "pytest", "-q", "-c", str(ROOT / "pyproject.toml"), *plugins, *words)

    def cpu(ranks: int, backend: str) -> Step:
        sizes = "8,1K" if tiny else "8,4K,64K,1M,16M,64M"
        words = ("all_reduce", "-n", str(ranks), "--backend", backend, "--sizes", sizes, "--seconds", "0.1")
        name = f"all_reduce on cores: {backend}, {ranks} ranks"
        return Step(name, "times with many cores", (python, "-m", "fastcoll.bench", *words), 60, ANY)

    on_gpu = ("--device", "cuda", "--sizes", "8,1M,256M", "all_reduce", "broadcast", "all_gather", "-n", "2")
    return [
        Step("facts", "GPU, driver, MIG, MPS, versions", (python, __file__, "--facts"), 60, ANY),
        Step(
            "compile for the CPU",
            "host kernels compile, also on this many cores",
            (python, "-m", "fastcoll.warmup", "--dtypes", "float32" if tiny else "all", "-j", str(os.cpu_count())),
            150,
            ANY,
        ),
        hazard("smoke", "all_reduce and broadcast over shared GPU memory"),
        hazard("smoke", "the same, staged through the host", backend="tcp"),
        hardware(1, "nccl", "NcclCarrier"),
        hardware(2, "shm", "IpcCarrier"),
        hazard("load_module", "lazy loading of a program's kernel behind a waiting kernel"),
        hazard("load_our_kernel", "loading of a kernel of fastcoll behind a waiting kernel"),
        hazard("free_memory", "cudaFree behind a waiting kernel"),
        hazard("free_pinned_memory", "pinned memory of fastcoll, freed by the garbage collector"),
        hazard("free_pinned_memory_of_cupy", "cudaFreeHost by the garbage collector"),
        hazard("fill_the_queue", "40 calls queued behind a waiting kernel"),
        hazard("large", "1 GiB: more launches than the driver's queue holds"),
        hazard("killed", "a killed rank is named, and the waits on the GPU end", 3),
        hazard("aborted", "an abort ends the stream's waits on a shared GPU"),
        hazard("regions_again", "shared memory is reused; handles of reused memory are opened again"),
        Step(
            "kernels",
            "reductions, packing and records on the GPU against NumPy",
            pytest("-m", "gpu", f"{tests}/kernels/cuda", "--deselect", f"{tests}/kernels/cuda/test_simulator.py"),
            200,
        ),
        Step(
            "bandwidth",
            "kernels beside copies; shared GPU memory beside staging and beside NCCL over its network",
            (python, str(ROOT / "bench" / "gpu.py"), *(("--tiny",) if tiny else ())),
            90,
        ),
        conformance("cupy"),
        conformance("torch"),
        conformance("numba"),
        hazard("refused", "NCCL refuses ranks that share a GPU; the error says so", backend="nccl"),
        hardware(2, "nccl", "NcclCarrier", "apart"),
        hardware(2, "nccl", "NcclCarrier", "messages"),
        hazard("split", "communicators split from the world's, non-blocking", backend="nccl"),
        hazard("aborted", "an abort of a non-blocking communicator", backend="nccl"),
        hazard("killed", "a killed rank with NCCL", 3, "nccl"),
        hazard("structured", "records with unaligned fields and a user's function"),
        hazard("misaligned", "views that begin at any element"),
        hazard("many_groups", "false dependencies: 20 groups", CUDA_DEVICE_MAX_CONNECTIONS="8"),
        hazard("threads_in_another_order", "false dependencies: one queue", CUDA_DEVICE_MAX_CONNECTIONS="1"),
        hazard("threads_in_another_order", "the same with 32 queues", CUDA_DEVICE_MAX_CONNECTIONS="32"),
        hardware(4, "shm", "IpcCarrier"),
        hardware(2, "tcp", "StagedCarrier"),
        *(cpu(ranks, backend) for ranks in (4, 8, 16) for backend in ("shm", "tcp")),
        Step("times, shared memory", "bench on the GPU", (python, "-m", "fastcoll.bench", *on_gpu), 60),
        Step(
            "times, staged", "bench on the GPU", (python, "-m", "fastcoll.bench", *on_gpu, "--backend", "tcp"), 60
        ),
    ]  # fmt: skip


def facts() -> None:
    """Print what the steps depend on: the machine, the GPU and the versions of packages."""
    from importlib import metadata

    print(f"{platform.platform()}, Python {platform.python_version()}, {len(os.sched_getaffinity(0))} cores")
    names = (
        "numpy numba llvmlite numba-cuda cupy-cuda12x cupy-cuda13x torch mpi4py posix_ipc nvidia-nccl-cu12 "
    )
    names += "nvidia-nccl-cu13 nvidia-nvjitlink nvidia-nvvm cuda-bindings cuda-core cuda-pathfinder ml-dtypes pytest"
    for name in names.split():
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name}: not installed")
    for command in (
        ("nvidia-smi", "-L"),
        ("nvidia-smi", "-q", "-d", "COMPUTE"),
        ("pgrep", "-a", "nvidia-cuda-mps"),
    ):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30)
            print(f"$ {' '.join(command)}\n{done.stdout or 'nothing'}")
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"$ {' '.join(command)}\n{error}")
    print(f"CUDA_HOME: {os.environ.get('CUDA_HOME', 'not set')}")
    logging.basicConfig(level=logging.INFO)  # fastcoll then says which carrier it has chosen, and why
    from fastcoll.gpu import auto
    from fastcoll.gpu.nccl.bindings import why_unavailable

    print(f"NCCL: {why_unavailable() or 'usable'}")
    try:
        from fastcoll.kernels.cuda.driver import driver

        found = driver()
        print(f"streams can wait for words (cuStreamWaitValue64): {found.can_wait(0)}")
        print(f"GPU {found.uuid(0).hex()} on bus {found.bus_id(0).decode()}")
        print(f"fastcoll's kernels can be used: {auto.has_kernels()}")
        from numba.cuda.cudadrv import nvvm

        print(f"NVVM: version {nvvm.NVVM().get_version()}")
    except Exception as error:
        print(f"CUDA: {type(error).__name__}: {error}")


# ---- running them --------------------------------------------------------------------------------------------


def environment_with(wheels: Path | None, folder: Path) -> str:
    """Install wheels beside this Python's packages; return the Python that imports both.

    An environment, and not only a folder on the path, because numba-cuda needs its .pth file to be read.
    """
    if wheels is None:
        return sys.executable
    made = folder / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (packages,) = made.glob("lib/python3*/site-packages")
    others = [path for path in site.getsitepackages() if Path(path).is_dir()]
    # addsitedir reads the .pth files there, too; the wheels come before these folders. cuda-pathfinder looks for CUDA's
    # libraries in site.getsitepackages(), so this must name them, too.
    lines = [f"import site; site.PREFIXES.append({sys.prefix!r})"]
    lines += [f"import site; site.addsitedir({path!r})" for path in others]
    (packages / "beside.pth").write_text("\n".join(lines) + "\n")
    python = str(made / "bin" / "python")
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
    ]
    subprocess.run([*install, *map(str, sorted(wheels.glob("*.whl")))], check=True)
    return python


def has_gpu(python: str, environ: dict[str, str]) -> bool:
    """Return whether CuPy finds a GPU, in a process of its own, because CUDA does not survive a fork."""
    code = "import cupy; assert cupy.cuda.runtime.getDeviceCount()"
    try:
        done = subprocess.run([python, "-c", code], env=environ, capture_output=True, timeout=120)
    except subprocess.TimeoutExpired:
        return True  # something answers slowly; the steps will say what
    return done.returncode == 0


def run(command: list[str], environ: dict[str, str], folder: Path, seconds: float) -> tuple[int | None, str]:
    """Run a command in a session of its own; return its exit code, or None if it took too long, and its output."""
    log = folder / "output"
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            process.send_signal(signal.SIGINT)  # pytest then reports the failures so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LAST_SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
            process.wait()
    return code, log.read_text(errors="replace")


class Machine:
    """Runs steps on this machine, and reports them.

    Args:
        seconds: the time for all steps.
        rehearse: run steps that need a GPU without one, if they can.
    """

    def __init__(self, out: Path, wheels: Path | None, folder: Path, seconds: float, rehearse: bool) -> None:
        self.began, self.seconds, self.rehearse = time.monotonic(), seconds, rehearse
        self.out, self.folder, self.done = out, folder, list[Done]()
        try:
            self.python = environment_with(wheels, folder)
        except subprocess.CalledProcessError as error:
            (out / "log.txt").write_text(f"the wheels cannot be installed: {error}\n")
            self.python = sys.executable
        path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
        # Plugins of pytest are named by the steps: the sources are not installed here, and other plugins may be.
        self.environ = {
            **os.environ, "PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"
        }  # fmt: skip
        if "CUDA_HOME" not in os.environ and (nvcc := shutil.which("nvcc")):
            self.environ["CUDA_HOME"] = str(Path(nvcc).resolve().parents[1])
        self.gpu = has_gpu(self.python, self.environ)

    def take(self, step: Step) -> None:
        """Run a step, or find out why it cannot run, and write the report."""
        left = self.seconds - (time.monotonic() - self.began)
        without = step.needs == GPU and not self.gpu
        if without and not (self.rehearse and step.rehearsal is not None):
            self.done.append(Done(step, NO_GPU))
        elif left < 5:
            self.done.append(Done(step, NO_TIME))
        else:
            words = [word.replace("{python}", self.python) for word in step.command]
            environ = {**self.environ, **step.environ}
            if without:
                words += step.rehearsal or ()
                if "GPU_TEST_ARRAYS" in environ:
                    environ["GPU_TEST_ARRAYS"] = "fake"
            began = time.monotonic()
            code, output = run(words, environ, self.folder, min(step.seconds, left))
            result = {0: REHEARSED if without else PASSED, None: OUT_OF_TIME}.get(code, FAILED)
            self.done.append(Done(step, result, time.monotonic() - began, output))
        self._report()

    def _report(self) -> None:
        last = self.done[-1]
        print(f"{last.result:>13} {last.seconds:6.1f} s  {last.step.name}", flush=True)
        with (self.out / "log.txt").open("a") as log:
            text, half = last.output, _MOST_TEXT // 2
            if len(text) > _MOST_TEXT:
                text = f"{text[:half]}\n[...]\n{text[-half:]}"
            log.write(f"==== {last.step.name}: {last.result}\n$ {' '.join(last.step.command)}\n{text}\n")
        (self.out / "report.md").write_text(markdown(self.done, self.gpu))
        rows = [
            {"step": d.step.name, "checks": d.step.checks, "result": d.result, "seconds": round(d.seconds, 2),
             "output": d.output[-4000:]}
            for d in self.done
        ]  # fmt: skip
        (self.out / "report.json").write_text(json.dumps({"gpu": self.gpu, "steps": rows}, indent=1) + "\n")
        ElementTree.ElementTree(junit(self.done)).write(self.out / "junit.xml")


def markdown(done: list[Done], gpu: bool) -> str:
    """Return the report: a table of all steps, and the end of each one's output."""
    lines = [f"# {'With' if gpu else 'Without'} a GPU, {time.strftime('%Y-%m-%d %H:%M')}", ""]
    lines += ["| step | checks | result | seconds |", "|---|---|---|--:|"]
    lines += [f"| {d.step.name} | {d.step.checks} | {d.result} | {d.seconds:.1f} |" for d in done]
    for d in done:
        if d.output.strip():
            lines += [
                "",
                f"## {d.step.name}: {d.result}",
                "",
                "```",
                *d.output.strip().splitlines()[-25:],
                "```",
            ]
    return "\n".join(lines) + "\n"


def junit(done: list[Done]) -> ElementTree.Element:
    """Return the results as a test suite; steps that did not run on a GPU count as skipped."""
    suite = ElementTree.Element("testsuite", name="gpu_machine", tests=str(len(done)))
    for d in done:
        case = ElementTree.SubElement(suite, "testcase", name=d.step.name, time=f"{d.seconds:.2f}")
        if d.result in (FAILED, OUT_OF_TIME):
            text = "".join(c for c in d.output[-4000:] if c.isprintable() or c in "\n\t")
            ElementTree.SubElement(case, "failure", message=d.result).text = text
        elif d.result != PASSED:
            ElementTree.SubElement(case, "skipped", message=d.result)
    return suite


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first")
    parser.add_argument("--minutes", type=float, default=9.5, help="for all steps (default: 9.5)")
    parser.add_argument("--steps", default="", help="run only steps whose name contains one of: A|B|...")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU, run what can run")
    parser.add_argument("--tiny", action="store_true", help="with as little data as possible")
    parser.add_argument("--facts", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.facts:
        facts()
        return 0
    wanted: Callable[[Step], bool] = lambda step: any(  # noqa: E731
        part in step.name for part in given.steps.split("|")
    )
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "log.txt").write_text("")
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(given.out, given.wheels, Path(folder), 60 * given.minutes, given.rehearse)
        for step in filter(wanted, steps(given.tiny)):
            machine.take(step)
    return int(any(d.result in (FAILED, OUT_OF_TIME) for d in machine.done))


if __name__ == "__main__":
    sys.exit(main())
