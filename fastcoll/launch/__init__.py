"""Starting ranks: `python -m fastcoll.launch` (command.py, supervisor.py, nodes.py), `run` and `spawn`.

job.py is what is to be started, lifeline.py ties a process to its parent.
"""
