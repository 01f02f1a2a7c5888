"""Plans: what each rank sends, receives and reduces in a collective, as pure data.

plan       the format that the engine runs
shape      a call as plans see it, and the limits of plans
direct     each rank with every other; and small calls, whose data travels with the headers of the meeting
doubling, circulant, ring, binomial   for more ranks than can usefully exchange data with each other at once
choose     all algorithms, and which one a call takes, by cost
"""
