"""How each side calls an operation: one module per library.

Each has a function `join(job, folder)`, which returns a `loop.Side`.
"""
