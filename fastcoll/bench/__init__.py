"""`python -m fastcoll.bench`: time and verify the operations, with the columns of nccl-tests.

`command` reads the options and starts the ranks. Each rank runs `rank`, which takes the cases from `cases`, measures
them with `measuring`, and shows them with `results`. `measuring` also defines the contents of the arrays.
`start_times`, `first_calls`, `overlap` and `tune` make other measurements. Larger studies, such as the comparison with
other libraries, are in the folder bench/ of the sources.
"""
