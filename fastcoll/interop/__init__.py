"""Other libraries' arrays, seen as ndarrays over the same memory or refused with the cure.

A file a library, or a kind of them. None of these libraries is imported here: who has made one of their arrays has
imported it. `arrays.py` asks by the array's type.
"""
