"""How the loader's compiled loops are compiled, and how they reach memory.

Memory comes as addresses (of Arrow's buffers, of a file's bytes), so that one call does all columns
and nothing is compiled again for another number of them; the caller keeps it alive. Addresses, and
loops that count from zero, are also what lets the compiler use vector instructions: an index that
might be negative does not. Addresses need not be multiples of anything: the processors that
PyTorch runs on do not ask for it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import numba
from numba import types
from numba.extending import intrinsic

#: The modules with compiled loops, and a digest of them.
MODULES = ("native", "crc32", "kernels", "pages", "page_values")
_SOURCES = hashlib.sha256(
    b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in MODULES)
).hexdigest()


def compiled(*signatures: str, nogil: bool = True):
    """Compile a function for these types, once per machine (numba's cache), at import.

    ``nogil`` is for what takes long: to get the interpreter's lock back takes microseconds.
    """

    def compile_all(function: Callable) -> Callable:
        dispatcher = numba.njit(nogil=nogil, cache=True)(function)
        # By itself numba looks at the file of the function alone, not of those that it calls.
        dispatcher._cache._cache_file._source_stamp = _SOURCES
        for signature in signatures:
            dispatcher.compile(signature)
        dispatcher.disable_compile()
        return dispatcher

    return compile_all


@intrinsic
def pointer(_context, address):
    """The memory at an address, for ``numba.carray``."""

    def generate(context, builder, _signature, values):
        return builder.inttoptr(values[0], context.get_value_type(types.voidptr))

    return types.voidptr(address), generate
