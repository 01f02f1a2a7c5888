"""Runs the tests marked gpu on Numba's simulator, in a process of its own; and checks imports."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(*args: str, simulate: bool = False) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "NUMBA_ENABLE_CUDASIM"}
    if simulate:
        env["NUMBA_ENABLE_CUDASIM"] = "1"
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, env=env)


def has_simulator() -> bool:
    names = ("numba_cuda", "numba.cuda.simulator") if importlib.util.find_spec("numba") else ()
    return any(importlib.util.find_spec(name) is not None for name in names)


@pytest.mark.long
@pytest.mark.skipif(not has_simulator(), reason="this Numba has no CUDA simulator; pip install numba-cuda")
def test_the_kernels_on_the_simulator() -> None:
    done = run("-m", "pytest", "-q", "-x", "-m", "gpu", "-p", "no:cacheprovider", str(HERE), simulate=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[-1]) > 300
    assert "skipped" not in done.stdout.splitlines()[-1]


def test_the_cpus_kernels_import_nothing_of_cuda() -> None:
    code = "import sys, fastcoll.kernels.reduce, fastcoll.kernels.copy; print(*sys.modules)"
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    modules = set(done.stdout.split())
    assert not [name for name in modules if name.startswith(("numba.cuda", "numba_cuda", "cupy", "cuda."))]


def test_without_the_extra_the_error_names_the_command() -> None:
    code = (
        "import sys; sys.modules['numba_cuda'] = None\n"
        "from fastcoll.errors import UnavailableError\n"
        "try:\n    import fastcoll.kernels.cuda.reducers\n"
        "except UnavailableError as error:\n    print(error)"
    )
    done = run("-c", code)
    assert "pip install '.[cuda12]'" in done.stdout, done.stderr


TOO_NEW = """
import sys, types, warnings
import numba
from fastcoll.errors import UnavailableError

class Context:
    def refresh(self):
        warnings.warn("NumPy's", DeprecationWarning)
        raise AttributeError("module 'numpy' has no attribute 'row_stack'")

cuda, descriptor = types.ModuleType("numba.cuda"), types.ModuleType("numba.cuda.descriptor")
cuda.__file__, cuda.__version__ = "numba_cuda/numba/cuda/__init__.py", "0.30"
descriptor.cuda_target = types.SimpleNamespace(target_context=Context())
sys.modules |= {"numba_cuda": cuda, "numba.cuda": cuda, "numba.cuda.descriptor": descriptor}
numba.cuda = cuda
try:
    import fastcoll.kernels.cuda.kernel
except UnavailableError as error:
    print(error)
from fastcoll.gpu import auto
print("kernels:", auto.has_kernels())
"""


def test_a_too_new_numpy_is_reported_before_compilation() -> None:
    done = run("-W", "error::DeprecationWarning", "-c", TOO_NEW)
    assert "row_stack'): pip install '.[cuda12]'" in done.stdout, done.stderr
    assert "kernels: False" in done.stdout, done.stderr
