"""Calls from compiled code: group descriptors, which JAX and Numba share, and fastcoll's functions in numba.njit."""
