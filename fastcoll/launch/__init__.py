"""Starting ranks: `python -m fastcoll.launch` (command.py, supervisor.py), `run` and `spawn`.

nodes.py describes a node's share of a job, ranks.py runs the process of one rank, and failures.py publishes failures,
so that the ranks of all nodes end. lifeline.py ties a process to its parent. console.py handles signals and writes
output.
"""
