"""The backend of the ranks of one node, in POSIX shared memory."""
