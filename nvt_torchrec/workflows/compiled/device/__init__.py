"""The compiled workflow on a GPU: the host's arrays, uploaded once, and kernels that read them.

For specs with ``is_criteo_format``. Ids and dense values equal those of
:mod:`workflows.compiled.compiled_workflow` bit for bit: table lookups and quotients in float64 have
only one correct result. Logarithms do not: libraries round them differently. So integers beyond the
table, which are few, are transformed on the host, by the function that made the table.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from nvt_torchrec.base.device import Device, DeviceArray
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.workflows.compiled.compiled_workflow import CompiledWorkflow
from nvt_torchrec.workflows.compiled.dense import DensePlan


@dataclasses.dataclass(frozen=True)
class DeviceEncoded:
    """``n`` rows transformed on a GPU.

    Attributes:
        dense: float32 [dense columns, n].
        ids: int32 [categorical columns, n].
        null: int64 [categorical columns], on the host: the number of missing values.
        oov: int64 [categorical columns], on the host: the number of out-of-vocabulary ids.
    """

    dense: DeviceArray
    ids: DeviceArray
    null: np.ndarray
    oov: np.ndarray


def count_vocabulary_bytes(workflow: CompiledWorkflow) -> int:
    """Return the GPU memory that the vocabularies of a workflow take, in bytes."""
    words, _, _ = workflow.get_host_arrays()
    return words.nbytes


class DeviceWorkflow:
    """A workflow whose tables are on a GPU; several threads may use it."""

    def __init__(self, device: Device, workflow: CompiledWorkflow) -> None:
        """Copy a workflow's tables to the GPU.

        Args:
            device: The GPU.
            workflow: The workflow; its spec has ``is_criteo_format``, and all of its dense columns
                have transforms with the same function.
        """
        words, regions, plan = workflow.get_host_arrays()
        self.spec: FeatureSpec = workflow.spec
        self.schema: TableSchema = workflow.schema
        self._device = device
        self._plan: DensePlan = plan
        self._words = device.upload(words)
        self._regions = device.upload(regions)
        self._table = device.upload(plan.table)
        self._integer_fill = device.upload(plan.fill.astype(np.int64))
        self._parameters = [
            device.upload(values[:, None]) for values in (plan.fill, plan.center, plan.scale)
        ]
        device.synchronize()  # because other streams read the arrays

    def transform(
        self, dense: DeviceArray, categorical: DeviceArray, missing: DeviceArray
    ) -> DeviceEncoded:
        """Encode rows, on the current stream.

        Args:
            dense: int32 [dense columns, n].
            categorical: uint32 [categorical columns, n].
            missing: uint64 [2, n]; bit j is set in the first row where dense column j is missing,
                in the second row where categorical column j is missing.
        """
        from nvt_torchrec.workflows.compiled.device import lookup_kernels as kernels

        device = self._device
        arrays = device.arrays
        ids = arrays.empty(categorical.shape, np.int32)
        tallies = arrays.zeros((len(categorical), 2), np.int64)
        device.launch(
            kernels.encode_columns, len(categorical) * device.lanes, device.lanes,
            categorical, missing[1], self._words, self._regions, ids, tallies,
        )  # fmt: skip
        if len(self._plan.looked_up):
            transformed = self._look_up_dense(dense, missing[0])
        else:
            transformed = self._normalize_dense(dense, missing[0])
        counted = device.download(tallies)
        return DeviceEncoded(transformed, ids, counted[:, 0], counted[:, 1])

    def _look_up_dense(self, dense: DeviceArray, missing: DeviceArray) -> DeviceArray:
        from nvt_torchrec.workflows.compiled.device import lookup_kernels as kernels

        device = self._device
        arrays = device.arrays
        out = arrays.empty(dense.shape, np.float32)
        counts = arrays.zeros(len(dense), np.int64)
        device.launch(
            kernels.look_up_dense, len(dense) * device.lanes, device.lanes,
            dense, missing, self._integer_fill, int(self._plan.minimum[0]), self._table, out,
            counts,
        )  # fmt: skip
        for j in np.flatnonzero(device.download(counts)).tolist():
            absent = (missing >> np.uint64(j)) & np.uint64(1) != 0
            filled = arrays.where(absent, np.int32(self._plan.fill[j]), dense[j])
            rows = arrays.flatnonzero(filled >= self._plan.find_first_beyond(j))
            values = device.download(filled[rows])
            out[j, rows] = device.upload(self._plan.calculate(j, values))
        return out

    def _normalize_dense(self, dense: DeviceArray, missing: DeviceArray) -> DeviceArray:
        arrays = self._device.arrays
        fill, center, scale = self._parameters
        bits = arrays.arange(len(dense), dtype=np.uint64)[:, None]
        absent = (missing >> bits) & np.uint64(1) != 0
        filled = arrays.where(absent, fill, dense.astype(np.float64))
        return ((filled - center) / scale).astype(np.float32)


def count_missing(device: Device, missing: DeviceArray, columns: int) -> np.ndarray:
    """Count the rows in which each column is missing.

    Args:
        device: The GPU.
        missing: uint64 [n]; bit j is set where column j is missing.
        columns: Number of columns.

    Returns:
        int64 [columns], on the host.
    """
    from nvt_torchrec.workflows.compiled.device import lookup_kernels as kernels

    counts = device.arrays.zeros(columns, np.int64)
    device.launch(kernels.count_bits, columns * device.lanes, device.lanes, missing, counts)
    return device.download(counts)
