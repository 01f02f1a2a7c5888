"""Everything that Numba compiles for every backend; the only room that imports Numba, and only to compile."""
