"""`python -m fastcoll.bench --vs PEERS`: the same calls on fastcoll and on others, in turn.

The command's half, with all of fastcoll:
options    the command line
command    from the options to the exit code
peers      what can be compared, and where it lives; install makes environments for it
launch     one side's ranks, started, watched and ended
rounds     who runs when, and what their files say
outcome    the times of all sides, their ratios
targets    what is aimed at, and what a report misses
tables, record, picture   what is printed, written and drawn

The ranks' half, which runs in the peer's own Python and so imports NumPy and nothing of fastcoll:
start      the script that every rank runs
plan       cells: operations, sizes and numbers of calls; the job as a file
cells      the arrays of a cell, what goes in and what must come out
pinning    where the threads of a rank run, the same for all sides
loop       verify, warm up, measure
single_copy  how often a library lets the kernel copy between processes
limits     what the machine's own limit is, operation by operation
sides/     how each side calls an operation
probe      asked in a peer's Python: what is there
"""

from pathlib import Path

# `measuring` of fastcoll.bench needs NumPy alone. As a module of this package it needs no fastcoll, either.
__path__.append(str(Path(__file__).resolve().parents[2] / "fastcoll" / "bench"))
