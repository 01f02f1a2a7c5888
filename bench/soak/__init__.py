"""Soaks: provoke failures thousands of times and count faults. `cd bench; python -m soak NAME [--long]`.

kills      a rank is killed at any moment of any call, start and end, on every backend
phases     a rank kills itself at a named failpoint of a call
stops      a rank is stopped for less than the timeout, and for good
starving   eight ranks beside four busy loops
strangers  connections with garbage to every port of a job
churn      ranks join and are killed, and the ranks that are left make a new group, again and again
history    clients of a store are killed and stopped; the answers to the others must be linearizable
schedules  ranks are delayed at random points inside calls

fleet      ranks as forked children of a process that has loaded all modules
calls      each operation with changing inputs, and a check of its result
linearizable  a check whether a history of concurrent operations has an order
report     the results of a soak, as text and as a row of docs/robustness.md
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks has one thread
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
