"""Soaks: what goes wrong is done thousands of times, and counted. `cd bench; python -m soak NAME [--long]`.

kills      a rank is killed at any moment of any call, start and end, on every backend
phases     a rank kills itself at a named failpoint of a call
stops      a rank is stopped for less than the timeout, and for good
starving   eight ranks beside four busy loops
strangers  connections with garbage at every door of a job
churn      ranks come and are killed, those that are left make a new group, again and again
history    clients of a store are killed and stopped, and what the others saw must have an order
schedules  ranks are delayed at random points inside of calls

fleet      ranks as forked children of a process that has everything loaded
calls      each operation with inputs that change, and whether its result was right
linearizable  whether a history of concurrent operations has an order
report     what a soak found, as text and as a row of docs/robustness.md
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process that forks has one thread
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
