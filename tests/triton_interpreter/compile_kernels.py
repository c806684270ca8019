"""Compile Triton's kernels for an H100 or H200, without one; print the name of each as it is done.

The interpreter takes names that change their type, pointers for example, and Triton's compiler does
not. Run it as ``python -m tests.triton_interpreter.compile_kernels``, without TRITON_INTERPRET.
"""

from __future__ import annotations

import itertools

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nvt_torchrec.models.cuda import join_kernels

_TARGET = GPUTarget("cuda", 90, 32)


def compile_kernel(kernel, types: dict[str, str], constants: dict[str, int]) -> str:
    """Return a kernel's PTX.

    Args:
        kernel: The function.
        types: The types of its arguments in Triton's notation, in order.
        constants: The values of its other arguments.
    """
    signature = types | dict.fromkeys(constants, "constexpr")
    signature = {name: signature[name] for name in kernel.arg_names}
    values, aligned = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            values[index,] = constants[name]
        elif signature[name].startswith("*"):
            aligned[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    return triton.compile(source, target=_TARGET).asm["ptx"]


def main() -> None:
    """Compile the kernels that join vectors, for each dtype of vectors."""
    sizes = {"num_vectors": 26, "num_others": 1, "num_joined": 32, "dim": 128}
    shape = {"has_factors": True, "program_rows": 32, "width": 128}
    others = {"others": "*fp32", "factors": "*fp32"}
    for dense, vectors in itertools.product(["*fp32", "*bf16"], repeat=2):
        types = {"dense": dense, "vectors": vectors, **others, "joined": dense, "rows": "i32"}
        ptx = compile_kernel(join_kernels._join, types, sizes | shape)
        assert ".v4.b32" in ptx, "values are loaded one by one"
        print("_join", dense, vectors)
        types = {"gradient": dense, "sum_gradient": "*fp32", "factors": "*fp32"}
        types |= {"coordinates": "*i32", "dense_gradient": dense, "vector_gradient": vectors}
        types |= {"other_gradient": "*fp32", "rows": "i32"}
        ptx = compile_kernel(join_kernels._split, types, sizes | shape | {"num_labels": 1})
        assert ".v4.b32" in ptx, "values are loaded one by one"
        print("_split", dense, vectors)


if __name__ == "__main__":
    main()
