"""GPU arrays on real GPUs, every result against NumPy: pytest -m gpu tests/gpu/test_hardware.py

These tests have never run, because no GPU was available. One GPU is enough: ranks share it, except for NCCL's
collectives, which need one per rank. Two ranks try every operation and dtype, because each rank compiles its kernels;
other numbers of ranks try some.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).parents[1]


def gpus() -> int:
    """Return the number of GPUs, counted in a process of its own, because CUDA does not survive a fork."""
    if importlib.util.find_spec("cupy") is None:
        return 0
    code = "import cupy; print(cupy.cuda.runtime.getDeviceCount())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return int(done.stdout) if done.returncode == 0 else 0


@pytest.fixture(scope="module")
def count() -> int:
    found = gpus()
    if not found or os.environ.get("NUMBA_ENABLE_CUDASIM"):
        pytest.skip("no GPU, or no CuPy")
    return found


def run(ranks: int, backend: str, carrier: str, *part: str) -> None:
    script = str(TESTS / "gpu" / "hardware_ranks.py")
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-m", "fastcoll.launch", "-n", str(ranks), script, backend, carrier, *part],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert done.stdout.count("is right") == ranks


@pytest.mark.usefixtures("count")
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_shared_memory_of_gpus(ranks: int) -> None:
    run(ranks, "shm", "IpcCarrier")


@pytest.mark.usefixtures("count")
def test_staging_through_the_host() -> None:
    run(2, "tcp", "StagedCarrier")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_nccl_with_a_gpu_for_each_rank(count: int, ranks: int) -> None:
    if ranks > count:
        pytest.skip(f"NCCL wants a GPU for each of {ranks} ranks, and there are {count}")
    run(ranks, "nccl", "NcclCarrier")


@pytest.mark.usefixtures("count")
@pytest.mark.parametrize("ranks", [2, 3])
def test_messages_by_nccl(ranks: int) -> None:
    run(ranks, "nccl", "NcclCarrier", "messages")
