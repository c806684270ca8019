"""The compiled workflow on a card: the arrays of the host's, uploaded once, and kernels.

Ids and dense values equal those of :mod:`workflows.compiled.compiled_workflow` bit for bit, for
specs with ``is_criteo_format``: tables of results and quotients in float64 have one right value.
Logarithms have not. Those of integers beyond the table, which are few, are therefore computed on
the host, by the function that also made the table.
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
    """``n`` rows transformed on a card; see
    :class:`workflows.compiled.compiled_workflow.EncodedRows`.

    Attributes:
        dense: float32 [dense columns, n].
        ids: int32 [categorical columns, n].
        null: int64 [categorical columns], on the host.
        oov: int64 [categorical columns], on the host.
    """

    dense: DeviceArray
    ids: DeviceArray
    null: np.ndarray
    oov: np.ndarray


def vocabulary_bytes(workflow: CompiledWorkflow) -> int:
    """Return how much memory of a card the vocabularies of a workflow take."""
    return workflow.host_arrays()[0].nbytes


class DeviceWorkflow:
    """A workflow whose tables are on a card; several threads may use it."""

    def __init__(self, device: Device, workflow: CompiledWorkflow) -> None:
        """Copy a workflow's tables to the card.

        Args:
            device: The card.
            workflow: Of a spec with ``is_criteo_format``, whose dense columns have transforms of
                one function.
        """
        words, places, plan = workflow.host_arrays()
        self.spec: FeatureSpec = workflow.spec
        self.schema: TableSchema = workflow.schema
        self._device = device
        self._plan: DensePlan = plan
        self._words = device.upload(words)
        self._places = device.upload(places)
        self._table = device.upload(plan.table)
        self._integer_fill = device.upload(plan.fill.astype(np.int64))
        self._parameters = [
            device.upload(values[:, None]) for values in (plan.fill, plan.center, plan.scale)
        ]
        device.synchronize()  # other streams read them

    def transform(
        self, dense: DeviceArray, categorical: DeviceArray, missing: DeviceArray
    ) -> DeviceEncoded:
        """Encode rows, on the current stream.

        Args:
            dense: int32 [dense columns, n].
            categorical: uint32 [categorical columns, n].
            missing: uint64 [2, n], bit j set where a dense column, or in the second row a
                categorical column, is missing.
        """
        from nvt_torchrec.workflows.compiled.device import lookup_kernels as kernels

        device, arrays = self._device, self._device.arrays
        ids = arrays.empty(categorical.shape, np.int32)
        tallies = arrays.zeros((len(categorical), 2), np.int64)
        device.launch(
            kernels.encode_columns, len(categorical) * device.lanes, device.lanes,
            categorical, missing[1], self._words, self._places, ids, tallies,
        )  # fmt: skip
        if len(self._plan.looked_up):
            transformed = self._looked_up(dense, missing[0])
        else:
            transformed = self._normalized(dense, missing[0])
        counted = device.download(tallies)
        return DeviceEncoded(transformed, ids, counted[:, 0], counted[:, 1])

    def _looked_up(self, dense: DeviceArray, missing: DeviceArray) -> DeviceArray:
        from nvt_torchrec.workflows.compiled.device import lookup_kernels as kernels

        device, arrays = self._device, self._device.arrays
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
            rows = arrays.flatnonzero(filled >= self._plan.first_beyond(j))
            values = device.download(filled[rows])
            out[j, rows] = device.upload(self._plan.calculate(j, values))
        return out

    def _normalized(self, dense: DeviceArray, missing: DeviceArray) -> DeviceArray:
        arrays = self._device.arrays
        fill, center, scale = self._parameters
        bits = arrays.arange(len(dense), dtype=np.uint64)[:, None]
        absent = (missing >> bits) & np.uint64(1) != 0
        filled = arrays.where(absent, fill, dense.astype(np.float64))
        return ((filled - center) / scale).astype(np.float32)


def count_missing(device: Device, missing: DeviceArray, columns: int) -> np.ndarray:
    """Count in how many rows each column is missing: uint64 [n] → int64 [columns], on the host."""
    from nvt_torchrec.workflows.compiled.device import lookup_kernels as kernels

    counts = device.arrays.zeros(columns, np.int64)
    device.launch(kernels.count_bits, columns * device.lanes, device.lanes, missing, counts)
    return device.download(counts)
