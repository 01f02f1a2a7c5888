"""fastcoll as a backend of torch.distributed, for CPU tensors. Importing this module registers it.

>>> import fastcoll.torch
>>> torch.distributed.init_process_group("fastcoll")
"""

from __future__ import annotations

from importlib.util import find_spec

from ..errors import UnavailableError, install

if find_spec("torch") is None:
    raise UnavailableError(f"fastcoll.torch needs PyTorch, which is not installed: {install('torch')}")

from .registration import register

__all__ = ["register"]

register()
