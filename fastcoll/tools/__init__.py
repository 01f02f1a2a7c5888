"""`python -m fastcoll`: the list of commands, and the commands that inspect this machine and the jobs on it."""
