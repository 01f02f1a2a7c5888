"""`python -m fastcoll.bench`: time and verify the operations, with the columns of nccl-tests.

`command` reads the options and starts the ranks. Each rank runs `rank`: it takes the cases of `cases`, measures them
with `measuring`, which also defines the contents of the arrays, and shows them with `results`. `start_times`,
`first_calls`, `overlap` and `tune` are runs of other kinds. Studies, such as the comparison with other libraries, are
in the folder bench/ of the sources.
"""
