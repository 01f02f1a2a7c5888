"""Other libraries' arrays, seen as ndarrays over the same memory or refused with the cure: a file a kind of library.

None of them is imported here: who has made one of their arrays has imported it. `arrays.py` asks by the array's type.
"""
