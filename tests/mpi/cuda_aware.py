"""Plugin: the MPI library declares that it accepts arrays on GPUs. Its memory is the host's, as that of fake arrays is.

    PYTHONPATH=tests NUMBA_ENABLE_CUDASIM=1 mpiexec -n 2 python tests/mpi/rank.py -p gpu.on_fakes -p mpi.cuda_aware \
        tests/conformance
"""

from __future__ import annotations

import pytest

from fastcoll.net.mpi import library as mpi_library


def pytest_configure(config: pytest.Config) -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr(mpi_library, "is_cuda_aware", lambda functions: True)
    patch.setattr(mpi_library, "_loaded", None)
    config.add_cleanup(patch.undo)
