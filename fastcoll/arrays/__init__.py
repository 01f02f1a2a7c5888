"""Arrays of other libraries as ndarrays over the same memory, or rejected with the cure.

Each file handles one kind of library. None of these libraries is imported here: a caller that has such an array has
imported its library. `arrays.py` chooses by the array's type.
"""
