"""Constants of the dense transform, for whoever computes it: y = log(max(x, −2) + 3).

See :mod:`workflows.nodes` for the formulas; this module imports nothing.
"""

#: Smaller values are raised to it: below −3 the logarithm does not exist.
DENSE_MINIMUM = -2
#: Added before the logarithm.
DENSE_SHIFT = 3
