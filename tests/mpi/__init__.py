"""The MPI backend: the conformance suite inside MPI jobs, with each MPI library in an environment of its own."""
