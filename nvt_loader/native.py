"""Memory addresses as arrays of the loader's compiled loops.

The loops take addresses (of Arrow's buffers, of a file's bytes), so that one call handles all
columns and nothing is compiled again for another number of columns; the caller keeps the memory
alive. Addresses, and loops that count from zero, also let the compiler use vector instructions,
which an index that might be negative prevents. Addresses need no alignment on the processors that
PyTorch runs on.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic


@intrinsic
def pointer(_context, address):
    """Return the memory at an address, for ``numba.carray``."""

    def generate(context, builder, _signature, values):
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate
