"""Which releases of JAX there may be. Importing this module, before all others here, refuses the rest by name."""

from __future__ import annotations

from ..errors import install
from ..supported import check_range

try:
    from jax import __version__
except ImportError as error:
    raise ImportError(f"fastcoll.jax needs JAX: {install('jax')}") from error

check_range("JAX", __version__)
