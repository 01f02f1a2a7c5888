"""`python -m fastcoll.bench`: time and verify the operations, with the columns of nccl-tests.

`command` reads the options and starts the ranks, which `worker` leads from `cases` through `operations` (with the
`patterns` that arrays hold) and `timing` to `results`; `show` is the terminal and the picture, `machine` what this ran
on. Studies, such as the comparison with other libraries, are in the sources' folder bench/.
"""
