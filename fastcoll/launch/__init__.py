"""Starting ranks: `python -m fastcoll.launch`, `spawn`, and the pytest plugin.

lifeline.py ties a process to its parent, ports.py picks a rendezvous port; command.py and supervisor.py
are the launcher, spawn.py the function, pytest_plugin.py and ranks_*.py the plugin.
"""
