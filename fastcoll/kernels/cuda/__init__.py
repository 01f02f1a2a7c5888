"""The element-wise kernels for CUDA: reductions, copies, and packing of strided arrays, compiled by numba-cuda.

Importing this package imports `numba.cuda`, so nothing imports it until an array lies on a GPU. What a kernel does to
elements and addresses is plain Python, which Numba's simulator runs too (NUMBA_ENABLE_CUDASIM=1); the few machine
instructions (accesses.py, steps.py) have twins for it, chosen in kernel.py.
"""

from ...errors import install

INSTALL = f"{install('cuda12')} (or '.[cuda13]', as the driver is)"
