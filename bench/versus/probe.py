"""Run in a peer's Python (`probe.py PEER`): print as JSON which library it has.

If it has none, exit with the reason. This script needs only the standard library and the peer. MPI is loaded but not
initialized.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable


def mpi_name(text: str) -> str:
    """Return name and version, such as `Open MPI 5.0.11`, from the text of MPI_Get_library_version."""
    text = text.split("\n")[0].split(",")[0].replace("Version:", " ")
    words = text.replace("(R)", "").replace(" Library", "").partition(" for ")[0].split()
    return " ".join(word.removeprefix("v") if word[1:2].isdigit() else word for word in words)


def _mpi(wanted: str) -> str:
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    name = mpi_name(MPI.Get_library_version())
    if not name.startswith(wanted):
        sys.exit(f"its MPI is {name}, not {wanted}")
    return f"mpi4py {mpi4py.__version__} on {name}"


def _gloo() -> str:
    import torch
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        sys.exit(f"its torch {torch.__version__} has no Gloo")
    return f"torch {torch.__version__} (Gloo)"


_ASK: dict[str, Callable[[], str]] = {
    "gloo": _gloo,
    "openmpi": lambda: _mpi("Open MPI"),
    "mpich": lambda: _mpi("MPICH"),
    "intelmpi": lambda: _mpi("Intel MPI"),
}

if __name__ == "__main__":
    try:
        library = _ASK[sys.argv[1]]()
    except (
        ImportError,
        RuntimeError,
        OSError,
    ) as error:  # mpi4py raises RuntimeError if it finds no MPI library
        sys.exit(str(error))
    print(json.dumps({"library": library, "python": sys.version.split()[0]}))
