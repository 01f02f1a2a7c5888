"""How each side calls an operation: a module a library, with `join(job, folder)` (see `loop.Side`)."""
