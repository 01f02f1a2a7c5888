"""Ranks over an MPI library."""
