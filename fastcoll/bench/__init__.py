"""`python -m fastcoll.bench`: time and verify the operations, with the columns of nccl-tests.

`command` reads the options and starts the ranks. Each is led by `rank` from `cases` through `measuring` (with what
arrays hold) to `results`. `start_times`, `first_calls` and `overlap` are runs of another kind. Studies, such as the
comparison with other libraries, are in the sources' folder bench/.
"""
