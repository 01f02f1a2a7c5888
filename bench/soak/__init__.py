"""Soaks: provoke failures thousands of times and count faults. `cd bench; python -m soak NAME [--long]`.

kills      a rank is killed at a random moment of a call, of the start or of the end, on every backend
phases     a rank kills itself at a named failpoint of a call
survivors  all ranks but one are killed one after the other; the others shrink and continue
stops      a rank is stopped for less than the timeout, and for good
starving   eight ranks run beside four busy loops
strangers  connections with garbage are made to every port of a job
signals    a launcher gets a signal at a random moment
elastic    ranks, joiners and launchers of elastic jobs are killed
rpc        a worker of remote calls is killed
churn      ranks join and are killed, and the survivors make a new group, again and again
history    clients of a store are killed and stopped; the store's answers must be linearizable
schedules  ranks are delayed at random points inside calls

fleet      runs ranks as forked children of a process that has loaded all modules
calls      calls each operation with changing inputs, and checks the results
linearizable  checks whether the answers to concurrent operations can be explained by some order of them
report     has the results of a soak, as text and as a row of docs/robustness.md
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # because a process that forks should have only one thread
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
