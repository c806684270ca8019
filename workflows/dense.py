"""Constants of the dense transform y = log(max(x, −2) + 3).

The formulas are in :mod:`workflows.nodes`. This module imports nothing.
"""

#: Smaller values are raised to this: the logarithm is defined above −3.
DENSE_MINIMUM = -2
#: Added before the logarithm.
DENSE_SHIFT = 3
