"""Tests that run pytest, or MPI's ranks, again in a process of its own: with the package that is under test here.

`python -m` and `python -c` look in the working directory first, and in that of the sources they would find files other
than an installed package's: others to test, and kernels to compile once more.
"""

from __future__ import annotations

import os
from pathlib import Path

import fastcoll

TESTS = Path(__file__).parent
ELSEWHERE = "/"
"""The working directory of such a process."""


def environment(**more: str) -> dict[str, str]:
    """The environment of such a process, which finds the tests' modules, too."""
    package = Path(fastcoll.__file__).parents[1]
    return {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{TESTS}", **more}
