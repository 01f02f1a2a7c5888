"""The one place that imports `numba.cuda` and knows whether it is the simulator.

On a GPU it must be numba-cuda's: the target inside Numba is deprecated. Either has a simulator, which needs no extra.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

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


def _load_compiler() -> None:
    """Import what the first compilation would, as numba-cuda does not look whether NumPy is too new for it."""
    import numba_cuda
    from numba.cuda.descriptor import cuda_target

    try:
        cuda_target.target_context.refresh()
    except Exception as error:  # an AttributeError, for what NumPy no longer has
        raise UnavailableError(
            f"numba-cuda {numba_cuda.__version__} does not work with NumPy {np.__version__} "
            f"({type(error).__name__}: {error}): {INSTALL}, which installs versions that fit"
        ) from error


with warnings.catch_warnings():
    # What numba-cuda uses of NumPy that is to go is no fault of who has warnings as errors.
    warnings.simplefilter("ignore", DeprecationWarning)
    cuda: Any = _import_cuda()
    if not SIMULATED:
        _load_compiler()


def device(function: Callable[..., Any]) -> Any:
    """A function for kernels to call."""
    return function if SIMULATED else cuda.jit(device=True)(function)
