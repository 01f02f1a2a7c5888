"""`python -m fastcoll`: its list of commands, and those that look at this machine and the jobs on it."""
