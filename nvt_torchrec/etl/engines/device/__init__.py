"""Count and encode on GPUs, for logs in Criteo's format; docs/gpu.md says what was tested."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from nvt_torchrec.formats.feature_spec import FeatureSpec


def supports(spec: FeatureSpec) -> bool:
    """Return True if a spec has Criteo's format and only one function of dense columns."""
    functions = {spec.get_transform(column).function for column in spec.dense}
    return spec.is_criteo_format and len(functions) < 2


def gpu_count() -> int:
    """Count the GPUs that cuDF can use on this machine; 0 without cuDF.

    ``CUDA_VISIBLE_DEVICES`` is respected, and each MIG instance in it (``MIG-…``) counts as a GPU.
    """
    if find_spec("cudf") is None or find_spec("dask_cuda") is None:
        return 0
    from numba import cuda  # loads the CUDA driver, so import it only if cuDF is installed

    if not cuda.is_available():
        return 0
    # CUDA shows only the first of several MIG instances to a process.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return max(len(cuda.gpus), sum(device.startswith("MIG-") for device in visible))


def first_gpu() -> str:
    """Return the UUID of the first visible GPU or MIG instance, which this process uses."""
    from numba import cuda

    return cuda.gpus[0].uuid


def gpu_memory() -> int:
    """Return the memory in bytes of the first visible GPU or MIG instance.

    All others are assumed to be equal.

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
