"""Operations on arrays of GPUs: what describes such an array, CUDA's runtime, and what carries the operations out.

    device_array         DeviceArray, and how any library's array becomes one
    runtime              memory, streams, events: CUDA's runtime as CuPy binds it, imported when a GPU array first comes
    auto                 which carrier serves a group, and the carrier that finds out
    staged, transit
                         any group's CPU backend, through pinned host memory
    streams, stream_work what the carriers share that queue work on streams
    nccl/                NCCL
    ipc/                 kernels over the memory of the other ranks of a node
    cuda_aware_mpi       a CUDA-aware MPI library
    several              several arrays of one process, on one GPU or many

A group's carrier of GPU arrays is made when the first one comes. Nothing here is imported before.
"""
