"""Operations on arrays in GPU memory.

    device_array         DeviceArray, and the import of arrays of any library
    runtime              memory, streams and events through CuPy, imported when the first GPU array is passed
    auto                 the choice of a group's carrier, and the carrier that makes this choice
    staged, staging
                         GPU arrays over the group's CPU backend, copied through pinned host memory
    streams, stream_work, own_stream
                         shared code of the carriers that queue work on streams
    idle                 calls of CUDA that may wait for all work on a GPU
    nccl/                NCCL
    ipc/                 kernels that read the memory of the node's other ranks
    cuda_aware_mpi       a CUDA-aware MPI library
    several              several arrays of one process, on one GPU or on several

A *carrier* executes a group's operations on GPU arrays. A group creates its carrier when it gets its first GPU array.
Nothing in this package is imported before that.

No code in this package has run on a GPU yet. The tests run it on fakes of CUDA's runtime, of CuPy and of NCCL, and run
the kernels in Numba's CUDA simulator.
"""
