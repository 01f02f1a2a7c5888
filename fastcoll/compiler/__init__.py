"""How kernels are compiled, cached and loaded."""
