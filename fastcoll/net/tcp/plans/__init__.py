"""Plans: what each rank sends, receives and reduces in a collective, as pure data.

table      the format, which the engine runs
shape      a call as plans see it, and the limits that they keep to
parts      how arrays are divided among ranks and into segments
attached   small calls: everything travels with the headers of the meeting
direct     every rank with every other: reductions in rank order
exchange   every rank with every other: what only moves
scans      prefix reductions
doubling, halving, ring, trees, pipeline   for more ranks than can usefully talk to each other at once
choose     which of them a call takes
"""
