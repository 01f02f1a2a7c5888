"""The backend of ranks on several nodes: shared memory inside nodes and a network between them."""
