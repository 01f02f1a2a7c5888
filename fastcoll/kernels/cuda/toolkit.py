"""The one place that imports `numba.cuda` and knows whether it is the simulator.

On a GPU it must be numba-cuda's: the target inside Numba is deprecated. Either has a simulator, which needs no extra.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba

from ...errors import UnavailableError
from . import INSTALL

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
"""Whether kernels run in Python threads, on arrays in host memory."""


def _import_cuda() -> Any:
    try:
        if not SIMULATED:
            import numba_cuda  # noqa: F401
        from numba import cuda
    except ImportError as error:
        raise UnavailableError(f"CUDA kernels need the package numba-cuda ({error}): {INSTALL}") from error
    if not SIMULATED and "numba_cuda" not in (cuda.__file__ or ""):
        raise UnavailableError(
            f"numba.cuda is Numba's own ({cuda.__file__}), not numba-cuda's, although that is installed: its "
            ".pth file is not read where it lies; install it into site-packages"
        )
    return cuda


cuda: Any = _import_cuda()


def device(function: Callable[..., Any]) -> Any:
    """A function for kernels to call."""
    return function if SIMULATED else cuda.jit(device=True)(function)
