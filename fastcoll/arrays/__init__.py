"""Import of arrays of other libraries, as ndarrays over the same memory.

An array that cannot be used is rejected by an error that names the cure. Each file handles one kind of library;
`arrays.py` chooses the file by the array's type. None of these libraries is imported here, because a caller that has
such an array has already imported its library.
"""
