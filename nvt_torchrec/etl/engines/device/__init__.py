"""Counting and encoding on a card, for logs in Criteo's format; docs/gpu.md says what has run."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from nvt_torchrec.formats.feature_spec import FeatureSpec


def supports(spec: FeatureSpec) -> bool:
    """Return whether a spec is of Criteo's format, and its dense columns all of one function."""
    functions = {spec.get_transform(column).function for column in spec.dense}
    return spec.is_criteo_format and len(functions) < 2


def gpu_count() -> int:
    """Count the GPUs that cuDF can use here; 0 without cuDF.

    ``CUDA_VISIBLE_DEVICES`` is respected, and each MIG instance it lists (``MIG-…``) is a GPU.
    """
    if find_spec("cudf") is None or find_spec("dask_cuda") is None:
        return 0
    from numba import cuda  # loads the CUDA driver: only where cuDF is installed

    if not cuda.is_available():
        return 0
    # CUDA shows a process only the first of several MIG instances
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(len(cuda.gpus), sum(device.startswith("MIG-") for device in visible))


def first_gpu() -> str:
    """Return the UUID of the GPU, or MIG instance, that this process uses: its first one."""
    from numba import cuda

    return cuda.gpus[0].uuid


def gpu_memory() -> int:
    """Return the bytes of the first visible GPU, or MIG instance; all others are taken as equal.

    Raises:
        OSError: The driver reports an error.
    """
    from cuda.bindings import driver  # installed on GPU machines only

    def call(function: Callable, *arguments: Any) -> Any:
        status, *value = function(*arguments)
        if status != driver.CUresult.CUDA_SUCCESS:
            raise OSError(f"{function.__name__}: {status.name}")
        return value[0] if value else None

    call(driver.cuInit, 0)
    return call(driver.cuDeviceTotalMem, call(driver.cuDeviceGet, 0))
