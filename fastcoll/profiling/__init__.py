"""Profiles of jobs: how they are merged over ranks, printed and drawn, and the command `python -m fastcoll profile`."""
