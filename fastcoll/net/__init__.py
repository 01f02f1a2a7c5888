"""What lies between nodes: TCP and MPI."""
