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


def machine(usable_cores: int) -> dict[str, Any]:
    """Facts about this machine and its software, ready for JSON; the measured processes share `usable_cores`."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    names = (value.strip() for key, _, value in lines if key.strip() in ("model name", "Model", "cpu"))
    return {
        "hostname": os.uname().nodename,
        "cpu": next(names, platform.machine()),
        "cores": os.cpu_count(),
        "usable_cores": usable_cores,
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "numba": version("numba"),
        "fastcoll": __version__,
    }


def describe(facts: dict[str, Any]) -> str:
    """Processor, cores, kernel and versions in one line."""
    return (
        f"{facts['cpu']}, {facts['cores']} cores ({facts['usable_cores']} usable), {facts['kernel']}, "
        f"Python {facts['python']}, NumPy {facts['numpy']}, Numba {facts['numba']}"
    )


def memory_speed(barrier: Callable[[], Any]) -> dict[str, float]:
    """This rank's GB/s while all ranks, which meet in `barrier`, do the same: bytes of the array a second.

    `update_gbs` is an in-place `x *= 1` on 64 MiB of float32, the least that an all_reduce must do;
    `copy_gbs` a copy of as much, the least that an operation must do that moves data. Medians of nine.
    """
    x = np.ones(_STREAM_BYTES // 4, np.float32)
    y, one = np.ones_like(x), np.float32(1)

    def gbs(sweep: Callable[[], Any]) -> float:
        seconds = []
        for _ in range(9):
            barrier()
            start = perf_counter()
            sweep()
            seconds.append(perf_counter() - start)
        return _STREAM_BYTES / median(seconds) / 1e9

    return {
        "update_gbs": gbs(lambda: np.multiply(x, one, out=x)),
        "copy_gbs": gbs(lambda: np.copyto(y, x)),
    }
