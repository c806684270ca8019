"""Stands in for the module that Triton gives its Python backend, after its documented interface.

https://github.com/triton-inference-server/python_backend: ``Tensor(name, array)`` with ``name()``
and ``as_numpy()``; ``InferenceRequest(inputs=…)`` with ``inputs()``; ``get_input_tensor_by_name``,
which gives None for a name that is not there; ``InferenceResponse(output_tensors, error=None)``
with ``output_tensors()`` and ``error()``; ``TritonError(message)`` with ``message()``.
"""

from __future__ import annotations

import numpy as np


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError("a NumPy array is needed")
        self.name, self.as_numpy = lambda: name, lambda: array


class TritonError:
    def __init__(self, message: str) -> None:
        self.message = lambda: message


class InferenceRequest:
    def __init__(self, inputs: list[Tensor]) -> None:
        self.inputs = lambda: inputs


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self.output_tensors, self.error = lambda: output_tensors, lambda: error


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)
