"""Plans: what each rank sends, receives and reduces in a collective, as pure data.

plan       the format, which the engine runs
shape      a call as plans see it, and the limits that they keep to
direct     every rank with every other, and small calls, which travel with the headers of the meeting
doubling, circulant, ring, binomial   for more ranks than can usefully talk to each other at once
choose     all of them, and which a call takes, by costs
"""
