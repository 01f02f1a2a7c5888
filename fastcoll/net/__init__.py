"""The backends between nodes: TCP and MPI."""
