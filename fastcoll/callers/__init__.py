"""What callers in compiled code of every kind share: rows of groups and the door; and fastcoll inside numba.njit."""
