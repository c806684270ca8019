"""How the loader's compiled loops reach memory.

Memory comes as addresses (of Arrow's buffers, of a file's bytes), so that one call does all columns
and nothing is compiled again for another number of them; the caller keeps it alive. Addresses, and
loops that count from zero, are also what lets the compiler use vector instructions: an index that
might be negative does not. Addresses need not be multiples of anything: the processors that
PyTorch runs on do not ask for it.
"""

from __future__ import annotations

from numba import types
from numba.extending import intrinsic


@intrinsic
def pointer(_context, address):
    """The memory at an address, for ``numba.carray``."""

    def generate(context, builder, _signature, values):
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate
