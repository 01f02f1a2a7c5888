"""How kernels are compiled, kept on the disk and loaded. Numba is imported only to compile."""
