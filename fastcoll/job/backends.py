"""Backends by name: the registry, the user's choice, and the backend of a group.

`BACKENDS` has one entry for each backend: a function that imports the backend's package and returns the function that
makes backends of that kind (`Make`). A backend's package, and with it Numba, is imported when a group needs it.
"""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .. import config
from ..core.backend import Backend as Carries
from ..core.backend import DeviceCarrier
from ..core.group import ProcessGroup
from ..errors import UnavailableError, UsageError
from ..store import Store
from ..system.processes import Member

_log = logging.getLogger("fastcoll")

Make = Callable[[Store, str, Sequence[Member], int, float], Carries]
"""`make(store, name, members, group_rank, timeout)` meets the other members and returns a backend; collective."""
MakeInJob = Callable[[Store, str, Sequence[Member], int, float, Sequence[Member]], Carries]
"""The same, with the ranks of the job that this rank knows, which may run on the members' cores."""


def _load_shm() -> MakeInJob:
    from ..shm.backend import ShmBackend

    return ShmBackend.make


def _load_tcp() -> MakeInJob:
    from ..net.tcp.backend import TcpBackend

    return TcpBackend.make


def _load_mpi() -> MakeInJob:
    from ..net.mpi.backend import MpiBackend
    from ..net.mpi.library import load

    load()
    return MpiBackend.make


@atexit.register
def _finalize_mpi() -> None:
    """Finalize MPI at exit if fastcoll has initialised it.

    Hooks run newest first. Those that leave groups are registered after this one, so they run first.
    """
    if (library := sys.modules.get("fastcoll.net.mpi.library")) is not None:
        library.finalize()


BACKENDS: dict[str, Callable[[], MakeInJob]] = {"shm": _load_shm, "tcp": _load_tcp, "mpi": _load_mpi}


class Backend(str):
    """A backend's name, in lower case: `Backend("GLOO") == "gloo"`.

    Raises:
        UsageError: there is no such backend; the message lists the known ones.
    """

    UNDEFINED = "undefined"
    AUTO = "auto"
    SHM = "shm"
    GLOO = "gloo"
    TCP = "tcp"
    MPI = "mpi"
    NCCL = "nccl"

    __slots__ = ()

    def __new__(cls, name: str) -> Backend:
        lower = name.lower() if isinstance(name, str) else name
        if lower not in KNOWN:
            raise UsageError(
                f"there is no backend {name!r}; known: {', '.join(KNOWN)}, or one for each device as in "
                "'cpu:auto,cuda:nccl'"
            )
        return super().__new__(cls, lower)

    @classmethod
    def register_backend(
        cls, name: str, func: Make, extended_api: bool = False, devices: str | Sequence[str] | None = None
    ) -> None:
        """Register a backend under a name. Every rank calls this, before `init_process_group`.

        Args:
            name: a new value for `backend=`, in upper or lower case; it also becomes an attribute, `Backend.NAME`.
            func: `func(store, name, members, group_rank, timeout)` meets the other members and returns a backend as
                core/backend.py describes it; see CONTRIBUTING.md. (torch's function takes other arguments.)
            extended_api: must be False.
            devices: "cpu", ["cpu"] or None.

        Raises:
            UsageError: the name is taken or not an identifier, or `func` is not a function.
            UnavailableError: `extended_api` is True, or a device is not the CPU.
        """
        lower = name.lower() if isinstance(name, str) else ""
        if not lower.isidentifier() or lower in KNOWN or hasattr(cls, lower.upper()):
            raise UsageError(f"name is {name!r}; give a word that is not among {', '.join(KNOWN)}")
        if not callable(func):
            raise UsageError(f"func is {func!r}; give a function that makes a backend")
        if extended_api or devices not in (None, "cpu", ["cpu"], ("cpu",)):
            raise UnavailableError(
                f"extended_api is {extended_api!r} and devices is {devices!r}; a registered backend has no "
                "options, and is for arrays in host memory"
            )
        BACKENDS[lower] = lambda: lambda *args: func(*args[:-1])
        KNOWN.append(lower)
        setattr(cls, lower.upper(), lower)


KNOWN: list[str] = [Backend.AUTO, Backend.SHM, Backend.GLOO, Backend.TCP, Backend.MPI, Backend.NCCL]
DEVICES = ("cpu", "cuda")

# Both names mean "the best backend for CPU arrays here". Scripts written for torch ask for gloo.
_CPU_DEFAULT = (Backend.AUTO, Backend.GLOO)


def is_backend_available(backend: str) -> bool:
    """Return whether `init_process_group` accepts this backend here; False for unknown names."""
    name = str(backend).lower()
    known = name in BACKENDS or name == Backend.NCCL
    return name in _CPU_DEFAULT or (known and _why_unavailable(name) is None)


def _why_unavailable(name: str) -> str | None:
    """Return why a registered backend, or NCCL, cannot be used here, and the cure; None if it can be used."""
    if name == Backend.MPI:
        from ..net.mpi.library import why_unavailable

        return why_unavailable()
    if name == Backend.NCCL:
        from ..gpu.nccl import bindings as nccl_library

        return nccl_library.why_unavailable()
    return None


def is_available() -> bool:
    """Return True, because this package can be imported on supported platforms only."""
    return True


def is_gloo_available() -> bool:
    """Return whether the name "gloo" can be used. It stands for the default backend of CPU arrays."""
    return is_backend_available(Backend.GLOO)


def is_mpi_available() -> bool:
    """Return whether the MPI backend can be used: mpi4py finds a library, and an MPI launcher started this process."""
    return is_backend_available(Backend.MPI)


def is_mpi_initialised() -> bool:
    """Return whether this process has initialised MPI through mpi4py."""
    MPI = sys.modules.get("mpi4py.MPI")
    return MPI is not None and bool(MPI.Is_initialized())


def is_nccl_available() -> bool:
    """Return whether the NCCL backend can be used: NCCL, CuPy and a GPU are present. Imports CuPy."""
    return is_backend_available(Backend.NCCL)


@dataclass(frozen=True)
class BackendChoice:
    """The user's choice: a backend for each kind of device."""

    by_device: Mapping[str, Backend]  # the keys are "cpu" and perhaps "cuda"
    nccl_alone: bool = False  # the user gave "nccl", without a device

    def __str__(self) -> str:
        return ",".join(f"{device}:{name}" for device, name in self.by_device.items())

    @property
    def initialises_mpi(self) -> bool:
        """True if the world's groups use MPI for arrays in host memory, alone or between nodes."""
        cpu = self.by_device["cpu"]
        return cpu == Backend.MPI or (
            cpu in _CPU_DEFAULT and config.get("FASTCOLL_BETWEEN_NODES") == Backend.MPI
        )


class BackendConfig:
    """The backend for each kind of device in a `backend=` argument: `BackendConfig("cpu:auto,cuda:nccl")`.

    Raises:
        UsageError, UnavailableError: as for `init_process_group`.
    """

    def __init__(self, backend: str | None) -> None:
        choice = parse_backend(None if backend == Backend.UNDEFINED else backend)
        self.device_backend_map = dict(choice.by_device)

    def get_device_backend_map(self) -> dict[str, Backend]:
        """Return the backend of each kind of device."""
        return self.device_backend_map

    def __repr__(self) -> str:
        return str(BackendChoice(self.device_backend_map))


def parse_backend(text: str | None) -> BackendChoice:
    """Parse a `backend=` argument: None, a name, or `device:name,...`; "nccl" means "cpu:auto,cuda:nccl".

    In a list, the backend for a device other than the CPU may be unavailable; calls then refuse arrays of that device.

    Raises:
        UsageError: an unknown backend or device, or a device given twice.
        UnavailableError: the backend for CPU arrays is not available; or "nccl" is given alone and is not available.
    """
    if text is None:
        return BackendChoice({"cpu": Backend(Backend.AUTO)})
    if not isinstance(text, str):
        raise UsageError(
            f"backend is {text!r}, a {type(text).__name__}; give a str as in 'auto' or 'cpu:auto'"
        )
    nccl_alone = text.strip().lower() == Backend.NCCL
    if nccl_alone:  # the user has arrays on GPUs, so NCCL must be available
        if (why := _why_unavailable(Backend.NCCL)) is not None:
            raise UnavailableError(
                f"backend 'nccl' is not available here: {why}; for arrays in host memory: {_for_the_cpu()}"
            )
        text = f"cpu:{Backend.AUTO},cuda:{Backend.NCCL}"
    by_device: dict[str, Backend] = {}
    for part in text.split(",") if ":" in text else [f"cpu:{text}"]:
        device, _, name = part.strip().lower().partition(":")
        if device not in DEVICES or device in by_device:
            raise UsageError(
                f"backend is {text!r}; expected each of {', '.join(DEVICES)} at most once, as in 'cpu:auto'"
            )
        by_device[device] = Backend(name)
    cpu = by_device.get("cpu")
    if cpu is None or cpu == Backend.NCCL or not is_backend_available(cpu):
        why = cpu and _why_unavailable(cpu)
        raise UnavailableError(
            f"backend {text!r} has no backend for CPU arrays that is available here"
            f"{f': {why}' if why else ''}; {_for_the_cpu()}"
        )
    cuda = by_device.get("cuda")
    if cuda is not None and _log.isEnabledFor(logging.INFO) and not is_backend_available(cuda):
        _log.info("backend %r: %s is not available, so cuda arrays will be refused", text, cuda)
    return BackendChoice(by_device, nccl_alone)


def _for_the_cpu() -> str:
    return "available: " + ", ".join(n for n in KNOWN if n != Backend.NCCL and is_backend_available(n))


def load(choice: BackendChoice) -> MakeInJob:
    """Import the backend for arrays in host memory, and return the function that makes backends of this kind.

    The first call imports Numba, too, and takes about half a second; later calls take no time.
    """
    if choice.initialises_mpi:
        _load_mpi()  # this initialises MPI, which is collective; every rank reaches this line
    cpu = choice.by_device["cpu"]
    if cpu not in _CPU_DEFAULT:
        return BACKENDS[cpu]()
    from ..hybrid.by_nodes import make_auto

    return make_auto


def make_group(
    choice: BackendChoice,
    store: Store,
    name: str,
    members: Sequence[Member],
    rank: int,
    timeout: float,
    crowd: Sequence[Member] = (),
) -> ProcessGroup:
    """Make a group whose members meet in `store`, which no other group uses; collective among the members.

    Args:
        crowd: the ranks of the job that this rank knows, members or not.

    Raises:
        UnavailableError: the backend is "shm", and the members are on several nodes.
    """
    make, cpu = load(choice), choice.by_device["cpu"]
    strangers = [member for member in members if not member.same_node(members[0])]
    if cpu == Backend.SHM and strangers:
        raise UnavailableError(
            f"backend {cpu!r} works inside one node, but {strangers[0]} does not share /dev/shm with "
            f"{members[0]}; use 'auto' or 'tcp' for ranks on several nodes (containers: one shared /dev/shm)"
        )

    def make_devices(group: ProcessGroup) -> DeviceCarrier:
        from ..gpu.carriers import carrier_for  # at the first array on a GPU; imports CuPy

        return carrier_for(choice.by_device.get("cuda", cpu), group)

    group = ProcessGroup(make(store, name, members, rank, timeout, crowd))
    group.gpus.serve(make_devices)
    return group
