"""Plans: what each rank sends, receives and reduces in a collective, as pure data.

plan       the format that the engine runs
shape      a call as plans see it, and the limits of plans
direct     each rank exchanges data with every other; and small calls, whose data travels with the meeting's headers
doubling, circulant, ring, binomial   for groups that are too large for `direct`
choose     all algorithms, and the choice of the cheapest one for a call
"""
