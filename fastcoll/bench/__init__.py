"""`python -m fastcoll.bench`: time and verify the operations, with the columns of nccl-tests.

command      arguments, and who runs: own workers or a launcher's ranks
worker       what a rank does: join, measure case after case, show on rank 0
cases        which measurements there are, in order: pure data, the same on every rank
operations   how an operation is called, and what it must give (`patterns`)
timing       batches of calls, their median and p99
results      rows, and what becomes of them; `show` is the terminal and the picture
machine      what this ran on
tune         `--tune`: thresholds for this machine

Studies, such as the comparison with other libraries, are in the sources' folder bench/.
"""
