"""Environment for tests that run pytest, or MPI ranks, in another process with the same package under test.

`python -m` and `python -c` search the working directory first. In that of the sources they would find other files
than those of an installed package: other code to test, and kernels to compile again.
"""

from __future__ import annotations

import os
from pathlib import Path

import fastcoll

TESTS = Path(__file__).parent
ELSEWHERE = "/"
"""The working directory of such a process."""


def environment(**more: str) -> dict[str, str]:
    """Return the environment of such a process; the tests' modules are on its path, too."""
    package = Path(fastcoll.__file__).parents[1]
    paths = package, TESTS, TESTS.parent / "bench"
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths)), **more}
