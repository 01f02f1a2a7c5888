"""Metrics of a job for Prometheus: FASTCOLL_METRICS=[HOST:]PORT serves them over HTTP as long as the job runs.

**Who serves.** One process of each node serves the ranks of that node. If fastcoll's launcher (or `fastcoll.run`) has
started the ranks, the launcher serves: it outlives ranks, so that counters go on after a rank's death and over
restarts, it is the only process that knows restarts and exit codes, and it does nothing else. Under other launchers
(torchrun, srun, mpiexec, multiprocessing) the lowest rank of the node serves from a daemon thread. A separate process
there would be unknown to Slurm and MPI, and could outlive the job. The ranks of several nodes are not collected by one
server: it would be a bottleneck and one point of failure, and Prometheus scrapes any number of targets.

**How it counts.** The ranks add nothing to their calls. The server reads their flight records (record/record.py), which
are in shared memory. A record has the number of each group's calls, which is exact, and the last 1,024 calls with
operation and size. The server reads so often that it sees each call in the ring, but it uses at most a twentieth of a
core. Calls that it has missed are counted as the operation "unseen", so the sum over operations is always exact. Only
the time of waiting is from samples, because reading a clock would cost each call 25 ns.

**How the server gets the records.** A rank of a launcher hands its record over when it makes its first group
(FASTCOLL_METRICS_SOCKET), so even the calls of a rank that ends at once are counted. The serving rank opens the records
of its peers in /proc, as `python -m fastcoll top` does. A group that is closed stays in the record until 64 more are
closed.
"""
