"""Starting ranks: `python -m fastcoll.launch` (command.py, supervisor.py), `run` and `spawn`.

nodes.py is what is to be started and how nodes end together, lifeline.py ties a process to its parent.
console.py is what the launcher hears and says.
"""
