"""The check of JAX's release. This module is imported before all others here, and refuses untested releases."""

from __future__ import annotations

from ..errors import install
from ..supported import check_range

try:
    from jax import __version__
except ImportError as error:
    raise ImportError(f"fastcoll.jax needs JAX: {install('jax')}") from error

check_range("JAX", __version__)
