"""Operations on arrays of GPUs: what describes such an array, CUDA's runtime, and what carries the operations out.

    array, border        DeviceArray, and how any library's array becomes one
    runtime              memory, streams, events: CUDA's runtime as CuPy binds it, imported when a GPU array first comes
    choice, chosen       which carrier serves a group of the backends shm and auto
    staging, staged_mail, segments, transit, pinned
                         any group's CPU backend, through pinned host memory
    streams, stream_work, stream_watch
                         what the carriers share that queue work on streams
    nccl*                NCCL
    mpi*                 a CUDA-aware MPI library
    ipc*                 kernels over the memory of the other ranks of a node
    multi, several, movers
                         several arrays of one process, on one GPU or many

A group's carrier of GPU arrays is made when the first one comes. Nothing here is imported before.
"""
