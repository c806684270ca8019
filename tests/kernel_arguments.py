"""What each kernel is launched with: the simulator checks it, and the compiler is told it."""

from __future__ import annotations

import numpy as np

#: By kernel, the type of each argument, and the dimensions of an array.
ARGUMENTS = {
    "count_line_ends": "uint8[1] int64[1]",
    "write_line_ends": "uint8[1] int64[1] int64[1]",
    "parse_lines": "uint8[1] int64[1] int64 uint8[1] int32[2] uint32[2] uint64[2] int32[1]",
    "encode_columns": "int64 uint32[2] uint64[1] uint64[1] int64[2] int32[2] int64[2]",
    "look_up_dense": "int64 int32[2] uint64[1] int64[1] int64 float32[2] float32[2] int64[1]",
    "count_bits": "int64 uint64[1] int64[1]",
}


def described(argument: object) -> str:
    """An argument as in :data:`ARGUMENTS`."""
    if isinstance(argument, np.ndarray):
        return f"{argument.dtype}[{argument.ndim}]"
    return "int64" if isinstance(argument, int) else type(argument).__name__
