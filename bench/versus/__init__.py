"""`python -m fastcoll.bench --vs PEERS`: fastcoll compared with other libraries.

A *peer* is another library. A *side* is a library whose calls are timed: fastcoll, a peer, or the *limit*, the machine
without a library. A *cell* is one operation of one size.

These modules run in the command's process, and may import all of fastcoll:
options    reads the command line
command    runs a comparison, from the options to the exit code
peers      finds the peers, and makes environments for them
launch     starts, watches and ends the ranks of a side
rounds     runs the sides in turn, and reads the files of their ranks
outcome    has the times of all sides, and their ratios
targets    has fastcoll's aims, and finds those that a report misses
tables, record, picture   make what is printed, written and drawn

These modules run in the ranks, in the peer's own Python. So they import NumPy and nothing of fastcoll, except the two
sides that are fastcoll's:
start      is the script that every rank runs
plan       has the cells with their numbers of calls, and the job that is passed in a file
cells      makes, fills and checks the arrays of a cell
pinning    places the threads of a rank, in the same way for all sides
loop       verifies, warms up and measures
single_copy  counts how often a library lets the kernel copy between processes
limits     lists the machine's limit for each operation
sides/     calls the operations of each side
probe      reports in a peer's Python which library it has
"""

from pathlib import Path

# fastcoll/bench/measuring.py needs only NumPy. Ranks import it as a module of this package, without fastcoll.
__path__.append(str(Path(__file__).resolve().parents[2] / "fastcoll" / "bench"))
