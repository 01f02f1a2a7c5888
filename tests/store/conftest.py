"""Fixtures that the tests of stores share with those of the rendezvous: processes, and a check for leftovers."""

from rendezvous.conftest import clock, in_threads, no_leaks, processes  # noqa: F401
