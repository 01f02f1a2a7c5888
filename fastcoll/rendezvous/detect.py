"""Rank, world size and address from the environment variables of launchers, as a pure function of a mapping.

`detect` reads torch's variables (set by fastcoll.launch, torchrun or by hand), and those of Open MPI, MPICH and Intel
MPI (Hydra), MVAPICH and Slurm; an empty variable counts as one that is not set. With a wrong rank or size, ranks would
wait for others that never come, so variables that contradict one another are an error. Often one launcher starts
another, which is no error. Slurm is then the outermost launcher, so its variables are read only if no other launcher
has set a rank. A launcher like torchrun, recognised by LOCAL_WORLD_SIZE, is the innermost launcher, so if there is one,
only torch's variables are read.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UsageError

MOST_DIGITS = 20  # of a rank or size; Python raises a ValueError for texts of more than 4,300 digits


@dataclass(frozen=True)
class LauncherVariables:
    """The names of one launcher's variables."""

    name: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_WORLD = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
TORCH = LauncherVariables("environment", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI = LauncherVariables("Open MPI", *(f"OMPI_COMM_WORLD_{what}" for what in _WORLD))
HYDRA = LauncherVariables("MPICH/Hydra", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
MVAPICH = LauncherVariables("MVAPICH", *(f"MV2_COMM_WORLD_{what}" for what in _WORLD))
SLURM = LauncherVariables("Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")
MPI_SOURCES = (OPEN_MPI, HYDRA, MVAPICH)
_NODE_LISTS = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")


@dataclass(frozen=True)
class Detected:
    """The values found in the environment; None for those that are not set."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    source: str = ""  # the launchers whose variables were read
    rank_variable: str = ""  # the variable that `rank` comes from
    found: tuple[str, ...] = ()  # the variables that were set, for messages
    job_id: str | None = None  # the launcher's name for the job, the same on all nodes, if it has one

    @property
    def on_one_node(self) -> bool:
        """True if all ranks run on this machine, according to the launcher."""
        return self.world_size is not None and self.local_size == self.world_size

    @property
    def is_by_mpi_or_slurm(self) -> bool:
        """True if the rank comes from a variable of MPI or Slurm, and not from torch's RANK or only an argument."""
        return self.rank_variable not in ("", TORCH.rank)


class _Reading(NamedTuple):
    source: LauncherVariables
    rank: int | None
    size: int | None
    local_rank: int | None
    local_size: int | None


def detect(environ: Mapping[str, str], rank: int | None = None, world_size: int | None = None) -> Detected:
    """Read rank, world size and address from the environment.

    The arguments `rank` and `world_size` take precedence over the environment. UsageError: a variable is not a number
    or out of range, or variables contradict one another.
    """
    environ = {name: value for name, value in environ.items() if value}
    slurm, torch = _read_slurm(environ), _read(environ, TORCH)
    candidates = [torch]
    if torch is None or torch.rank is None or TORCH.local_size not in environ:
        candidates += [_read(environ, source) for source in MPI_SOURCES]
        if all(reading is None or reading.rank is None for reading in candidates):
            candidates.append(slurm)
    readings = [reading for reading in candidates if reading is not None]
    rank_variable = next((reading.source.rank for reading in readings if reading.rank is not None), "")
    rank = _agreed(readings, "rank") if rank is None else rank
    world_size = _agreed(readings, "size") if world_size is None else world_size
    if rank is not None and world_size is not None and not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} ({rank_variable or 'passed'}) is not in a world of {world_size}")
    # If Slurm started exactly this world, the first node of Slurm's list has rank 0.
    leads = slurm is not None and rank is not None and slurm[1:3] == (rank, world_size)
    nodes = next((environ[name] for name in _NODE_LISTS if environ.get(name)), "")
    names = [name for reading in readings for name in (reading.source.rank, reading.source.size)]
    return Detected(
        rank=rank,
        world_size=world_size,
        local_rank=next((each.local_rank for each in readings if each.local_rank is not None), None),
        local_size=next((each.local_size for each in readings if each.local_size is not None), None),
        master_addr=environ.get("MASTER_ADDR") or (hosts_of(nodes)[0] if leads and nodes else None),
        master_port=number_in(environ, "MASTER_PORT", 1, 65535),
        source=", ".join(reading.source.name for reading in readings),
        rank_variable=rank_variable,
        found=tuple(name for name in (*names, "MASTER_ADDR", "MASTER_PORT") if environ.get(name)),
        job_id=_job_id(environ, leads),
    )


def derived_port(job_id: str) -> int:
    """Return the port at which the nodes of a job meet if no port is set: 10000 to 59999, the same on all nodes."""
    return 10000 + zlib.crc32(job_id.encode()) % 50000


def port_beside(port: int, away: int = 5000) -> int:
    """Return the port of a job's store if MASTER_PORT is `port`, at which torch's own store may listen.

    The two ports are 5000 apart, because the MASTER_PORTs of several jobs are often consecutive.
    """
    return port - away if port - away > 1023 else port + away


def _read(environ: Mapping[str, str], source: LauncherVariables) -> _Reading | None:
    if source.rank not in environ and source.size not in environ:
        return None
    return _Reading(
        source,
        number_in(environ, source.rank, 0),
        number_in(environ, source.size, 1),
        number_in(environ, source.local_rank, 0),
        number_in(environ, source.local_size, 1),
    )


def _read_slurm(environ: Mapping[str, str]) -> _Reading | None:
    """Read Slurm's variables; None if they are not set, or in an interactive shell, which is not a rank.

    A step (srun -n) may have fewer tasks than SLURM_NTASKS, so the variables of the step come first.
    """
    is_shell = environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    if is_shell or SLURM.rank not in environ or SLURM.size not in environ:
        return None
    size = number_in(environ, "SLURM_STEP_NUM_TASKS", 1) or number_in(environ, SLURM.size, 1)
    nodes = number_in(environ, "SLURM_STEP_NUM_NODES", 1) or number_in(environ, "SLURM_JOB_NUM_NODES", 1)
    rank, local_rank = number_in(environ, SLURM.rank, 0), number_in(environ, SLURM.local_rank, 0)
    return _Reading(SLURM, rank, size, local_rank, size if nodes == 1 else None)


def _agreed(readings: list[_Reading], what: str) -> int | None:
    """Return the value that all readings agree on, or None if none has it; UsageError if they differ."""
    readings = [reading for reading in readings if getattr(reading, what) is not None]
    values = [(getattr(reading.source, what), getattr(reading, what)) for reading in readings]
    for variable, value in values[1:]:
        if value != values[0][1]:
            raise UsageError(
                f"the environment disagrees with itself: {values[0][0]}={values[0][1]}, but {variable}={value}; unset "
                "one of them, or pass rank and world_size"
            )
    return values[0][1] if values else None


def _job_id(environ: Mapping[str, str], slurm_leads: bool) -> str | None:
    if slurm_leads and "SLURM_JOB_ID" in environ:
        step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
        return f"slurm {environ['SLURM_JOB_ID']}.{step}"
    if OPEN_MPI.rank in environ:
        name = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid")
        return f"pmix {name}" if name else None
    return None


def number_in(environ: Mapping[str, str], name: str, lowest: int, highest: int = 1 << 31) -> int | None:
    """Return the number in a variable, or None if it is not set or empty; UsageError: no number from `lowest` on."""
    text = environ.get(name)
    if not text:
        return None
    if not text.strip().isdecimal() or len(text) > MOST_DIGITS or not lowest <= int(text) <= highest:
        raise UsageError(f"{name}={text!r:.80} must be a whole number from {lowest} to {highest}")
    return int(text)


_PART = re.compile(r"([^\[\],]+)(?:\[([^\]]*)\])?([^\[\],]*)(?:,|$)")


def hosts_of(nodelist: str) -> list[str]:
    """Return the hosts of a Slurm node list, in order and with leading zeros, or raise UsageError.

    Examples:
        >>> hosts_of("n[08-10,3],login")
        ['n08', 'n09', 'n10', 'n3', 'login']
    """
    hosts: list[str] = []
    at = 0
    while at < len(nodelist):
        part = _PART.match(nodelist, at)
        if part is None:
            break
        prefix, ranges, suffix = part.groups()
        numbers = (
            [""] if ranges is None else [n for item in ranges.split(",") for n in _numbers(item, nodelist)]
        )
        hosts += [prefix + number + suffix for number in numbers]
        at = part.end()
    if at < len(nodelist) or not hosts:
        raise UsageError(
            f"the Slurm node list {nodelist!r} cannot be read; set MASTER_ADDR to the host of rank 0"
        )
    return hosts


def _numbers(item: str, nodelist: str) -> list[str]:
    """Expand a range: `08-10` to 08, 09, 10."""
    low, dash, high = item.partition("-")
    high = high if dash else low
    if not (low.isdecimal() and high.isdecimal() and 0 <= int(high) - int(low) < 1 << 16):
        raise UsageError(
            f"the Slurm node list {nodelist!r} has the range {item!r}; set MASTER_ADDR to rank 0's host"
        )
    return [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
