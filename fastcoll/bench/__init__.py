"""`python -m fastcoll.bench`: time and verify the operations, with the columns of nccl-tests.

command   arguments, and who runs: own workers or a launcher's ranks
worker    what a rank does: join, measure case after case, report on rank 0
cases     which measurements there are, in order: pure data, the same on every rank
operations, patterns   how an operation is called and what it must give
timing    batches of calls, their median and p99
machine   what this ran on
table, per_element, report, export, plot   what rank 0 makes of the rows
parsing, files   words of the command line, and files that it names
versus/   beside other libraries
"""
