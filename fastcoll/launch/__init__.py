"""Starting ranks: `python -m fastcoll.launch` (command.py, supervisor.py), `run` and `spawn`.

nodes.py describes a node's share of a job, and ranks.py runs the process of one rank. failures.py publishes a failure
to the launchers of all nodes, which then end their ranks. lifeline.py has a process killed when its parent ends.
console.py collects signals and writes output.
"""
