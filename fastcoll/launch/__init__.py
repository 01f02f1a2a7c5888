"""Starting ranks: `python -m fastcoll.launch` (command.py, supervisor.py), `run` and `spawn`.

A node's share of a job is in nodes.py, its processes are in ranks.py, and failures.py ends all nodes together.
lifeline.py ties a process to its parent. console.py has the launcher's signals and its output.
"""
