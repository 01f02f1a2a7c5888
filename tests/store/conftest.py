"""What the tests of stores share with those of the rendezvous: processes, and a look at what is left behind."""

from rendezvous.conftest import clock, in_threads, no_leaks, processes  # noqa: F401
