"""Ranks of one node meet in a POSIX shared-memory segment."""
