"""Refuse untested releases of JAX on import. fastcoll.jax imports this module before all its others."""

from __future__ import annotations

from ..errors import install
from ..supported import check_range

try:
    from jax import __version__
except ImportError as error:
    raise ImportError(f"fastcoll.jax needs JAX: {install('jax')}") from error

check_range("JAX", __version__)
