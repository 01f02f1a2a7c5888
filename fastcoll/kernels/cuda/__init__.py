"""Element-wise CUDA kernels, compiled by numba-cuda.

They reduce and copy arrays, and pack strided arrays. Most modules of this package import `numba.cuda`, so nothing
imports them until there is an array on a GPU. The code that computes elements and addresses is plain Python, which
Numba's simulator also runs (NUMBA_ENABLE_CUDASIM=1). The few machine instructions (accesses.py, steps.py) have Python
versions for the simulator; kernel.py finds out whether the simulator is in use.

These kernels have never run on a GPU. The tests run them in the simulator, and compile them to PTX.
"""

from ...errors import install

INSTALL = f"{install('cuda12')} (or '.[cuda13]', as the driver is)"
