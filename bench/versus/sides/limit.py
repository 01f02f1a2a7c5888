"""The limits: work on memory without communication, done by NumPy.

NumPy has no copy past the caches, so that is fastcoll's. fastcoll also makes the ranks start together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numba
import numpy as np

from fastcoll.kernels.copy import stream

from ..cells import Buffers
from ..plan import Job
from .ours import Fastcoll
from .ours import join as join_fastcoll


class Limit(Fastcoll):
    """The sweeps over memory that `limits` describes."""

    def call(self, operation: str, buffers: Buffers) -> Callable[[], Any]:
        x, out = buffers
        calls: dict[str, Callable[[], Callable[[], Any]]] = {
            "stream": lambda: partial(np.multiply, x, x.dtype.type(1), out=x),
            "fold": lambda: partial(_fold, out, self._parts(x)),
            "copy": lambda: partial(np.copyto, out, x),
            "copy_past": lambda: partial(_stream, out.ctypes.data, x.ctypes.data, x.nbytes),
            "copy_part": lambda: partial(np.copyto, out, x),
            "copy_part_past": lambda: partial(_stream, out.ctypes.data, x.ctypes.data, x.nbytes),
        }
        return calls[operation]()


def join(job: Job, folder: Path) -> Limit:
    """Join as many ranks as the other sides have, on the same cores."""
    join_fastcoll(job, folder)
    return Limit()


@numba.njit(nogil=True)
def _stream(dst: int, src: int, nbytes: int) -> None:
    stream(dst, src, nbytes)


def _fold(out: Any, parts: list[Any]) -> None:
    np.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        np.add(out, part, out=out)
