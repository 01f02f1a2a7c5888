"""Plans: what each rank sends, receives and reduces in a collective, as pure data.

table      the format, which the engine runs
shape      a call as plans see it, the limits that they keep to, and the segments that arrays are divided into
exchange   small calls, which travel with the headers of the meeting; every rank with every other: what only moves
direct     every rank with every other: reductions in rank order
doubling, circulant, ring, trees   for more ranks than can usefully talk to each other at once
choose     which of them a call takes, by costs
"""
