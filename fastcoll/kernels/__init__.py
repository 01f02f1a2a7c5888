"""Everything that is compiled for every backend: memory, waiting, sockets, reductions."""
