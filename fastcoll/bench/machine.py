"""What the numbers were measured on: machine, versions, and how fast its memory is for these ranks."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from .._version import __version__

_STREAM_BYTES = 64 << 20
_STREAM_REPEATS = 9


def machine(usable_cores: int) -> dict[str, Any]:
    """Facts about this machine and its software, ready for JSON.

    Args:
        usable_cores: how many cores the measured processes may use together.
    """
    return {
        "hostname": os.uname().nodename,
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "fastcoll": __version__,
    }


def cpu_model() -> str:
    """The processor's name as the kernel has it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "cpu"):
            return value.strip()
    return platform.machine()


def memory_speed(barrier: Callable[[], Any]) -> dict[str, float]:
    """This rank's GB/s while all ranks do the same: bytes of the array a second, the median of nine.

    `update_gbs` is an in-place `x *= 1` on 64 MiB of float32, the least that an all_reduce must do;
    `copy_gbs` a copy of as much, the least that an operation must do that moves data.

    Args:
        barrier: returns when all ranks have called it.
    """
    x = np.ones(_STREAM_BYTES // 4, np.float32)
    y, one = np.ones_like(x), np.float32(1)

    def gbs(sweep: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(_STREAM_REPEATS):
            barrier()
            start = perf_counter()
            sweep()
            seconds.append(perf_counter() - start)
        return _STREAM_BYTES / median(seconds) / 1e9

    return {
        "update_gbs": gbs(lambda: np.multiply(x, one, out=x)),
        "copy_gbs": gbs(lambda: np.copyto(y, x)),
    }


def describe(facts: dict[str, Any]) -> str:
    """Processor, cores, kernel and versions in one line."""
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({facts['usable_cores']} usable), {facts['kernel']}, "
        f"Python {facts['python']}, NumPy {facts['numpy']}, Numba {facts['numba']}"
    )
