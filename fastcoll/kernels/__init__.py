"""Everything that Numba compiles for every backend; the only room that imports Numba."""

import numba

from ..supported import check_version

check_version("Numba", numba.__version__)
