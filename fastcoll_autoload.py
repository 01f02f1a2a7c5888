"""What `import torch` runs where fastcoll is installed: torch.distributed learns the name of the backend `fastcoll`.

torch 2.5 and later load the entry point `torch.backends` as they are imported, in every process, spawned children and
other people's workers included. So this is beside the package, which takes a tenth of a second to import and is
imported with the first group. An exception would break `import torch` for everybody: a warning says instead what is
wrong.
"""

from __future__ import annotations

import os
import warnings
from typing import Any


def register() -> None:
    """Register the backend, and make it the default that FASTCOLL_TORCH_DEFAULT asks for."""
    try:
        import torch.distributed as dist

        if os.environ.get("FASTCOLL_TORCH_DEFAULT"):
            import fastcoll.torch  # noqa: F401 - which does both
        elif dist.is_available():
            dist.Backend.register_backend("fastcoll", _create, extended_api=True, devices=["cpu"])
    except Exception as error:
        warnings.warn(f"torch has no backend fastcoll: {type(error).__name__}: {error}", stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from fastcoll.torch.registration import create, register

    register()
    return create(options, pg_options)
