"""LLVM instructions for the kernels of :mod:`workflows.compiled.tables`."""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def prefetch(typing_context, array, index):
    """Start loading ``array[index]`` into the cache."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte_pointer, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte_pointer)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch",
            [byte_pointer],
            ir.FunctionType(ir.VoidType(), [byte_pointer, number, number, number]),
        )
        builder.call(function, [address, number(0), number(3), number(1)])  # read, keep, data
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def eight_bytes(typing_context, array, index):
    """Load ``array[index:index + 8]`` of a uint8 array as one word; it need not be aligned."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        address = builder.gep(data, [arguments[1]])
        word = builder.bitcast(address, ir.IntType(64).as_pointer())
        return builder.load(word, align=1)

    return types.uint64(array, index), generate
