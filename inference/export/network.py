"""Workflow and model as one PyTorch module: raw values in, probabilities out.

It uses PyTorch's own operators only: sorted vocabularies and ``searchsorted``, not hash tables.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

from clicklog.errors import SettingsError
from clicklog.missing import is_missing
from clicklog.rows import Jagged, RawRows
from clicklog.spec.columns import FIRST_OOV_ID, NULL_ID, CategoricalColumn
from clicklog.spec.feature_spec import FeatureSpec
from inference.model.scoring import ServingModel
from inference.model.tables import Table
from workflows.dense import DENSE_MINIMUM, DENSE_SHIFT
from workflows.description import WorkflowDescription
from workflows.moments import normalization

#: Represents a missing categorical value, and pads lists to the length of the longest.
MISSING = -(2**63)
_32_BITS = 0xFFFFFFFF


class RawModel(nn.Module):
    """Raw values → probabilities.

    Args:
        description: The workflow's description.
        path: The workflow's directory.
        model: The model that was trained on the workflow's data, on the CPU.

    Raises:
        SettingsError: A column is derived, or holds strings, which tensors cannot hold.
    """

    def __init__(self, description: WorkflowDescription, path: Path, model: ServingModel) -> None:
        super().__init__()
        spec = description.spec
        derived = [c.name for c in (*spec.dense, *spec.categorical) if c.derive]
        if derived:
            raise SettingsError(
                f"columns that are derived from others: {', '.join(derived)}; this format takes "
                "columns as they are",
                "export for Triton instead, or serve the bundle",
            )
        strings = [column.name for column in spec.categorical if column.raw == "string"]
        if strings:
            raise SettingsError(
                f"columns of strings, which tensors cannot hold: {', '.join(strings)}",
                "export for Triton instead, or serve the bundle",
            )
        self.columns = spec.categorical
        self.lists = [column.multi_hot for column in spec.categorical]
        logarithms = [spec.transform_of(column) != "normalize" for column in spec.dense]
        self.logarithm, self.some_logarithms = any(logarithms), not all(logarithms)
        keep = self.register_buffer
        self.has_dense = bool(spec.dense)
        if spec.dense:  # tensors without elements cannot be packed
            keep("fill", torch.tensor([float(column.fill) for column in spec.dense], dtype=_F64))
            center, scale = _normalization(description)
            keep("center", center)
            keep("scale", scale)
            if self.logarithm and self.some_logarithms:
                keep("logarithms", torch.tensor(logarithms))
        keep("table", model.table.values)
        keep("ranges", model.table.ranges)
        keep("first", model.first)
        keep("pairs", model.pairs)
        for name, columns in spec.vocabularies.items():
            values, ids = _vocabulary(path / description.vocabularies[columns[0].name].file)
            if len(values):  # tensors without elements cannot be packed
                place = _place(name, spec)
                keep(f"values_{place}", values)
                keep(f"ids_{place}", ids + columns[0].reserved_ids)
        self.places = [_place(column.vocabulary_name, spec) for column in spec.categorical]
        self.layers = {group: len(layers) for group, layers in model.layers.items()}
        for group, layers in model.layers.items():
            for index, (weight, bias) in enumerate(layers):
                keep(f"{group}_{index}_weight", weight)
                keep(f"{group}_{index}_bias", bias)

    def forward(
        self, dense: torch.Tensor, categorical: torch.Tensor, lists: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return probabilities float32 [n].

        Args:
            dense: Float64 [n, dense columns], NaN for missing values.
            categorical: Int64 [n, categorical columns without lists], :data:`MISSING` for missing
                values.
            lists: Int64 [n, length] for each column of lists, padded with :data:`MISSING`.
        """
        table = Table(self.table, self.ranges)
        single, embedded, listed = 0, [], 0
        for j, column in enumerate(self.columns):
            if self.lists[j]:
                values = lists[listed]
                listed += 1
                rows = table.rows(self._ids(j, column, values) + self.first[j])
                embedded.append((rows * (values != MISSING).unsqueeze(-1)).sum(1))
            else:
                ids = self._ids(j, column, categorical[:, single])
                single += 1
                embedded.append(table.rows(ids + self.first[j]))
        layers = {
            group: [
                (getattr(self, f"{group}_{i}_weight"), getattr(self, f"{group}_{i}_bias"))
                for i in range(count)
            ]
            for group, count in self.layers.items()
        }
        model = ServingModel(table, self.first, layers, self.pairs)
        return torch.sigmoid(model.interact(self._dense(dense), torch.stack(embedded, 1)))

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_dense:
            return x.to(torch.float32)
        y = torch.where(x.isnan(), self.fill, x)
        if self.logarithm:
            logarithm = torch.log(y.clamp_min(DENSE_MINIMUM) + DENSE_SHIFT)
            y = torch.where(self.logarithms, logarithm, y) if self.some_logarithms else logarithm
        return ((y - self.center) / self.scale).to(torch.float32)

    def _ids(self, j: int, column: CategoricalColumn, x: torch.Tensor) -> torch.Tensor:
        values = getattr(self, f"values_{self.places[j]}", None)
        result = torch.full_like(x, FIRST_OOV_ID)
        if column.oov_ids > 1:
            result = result + _murmur3(x) % column.oov_ids
        if values is not None:
            at = torch.searchsorted(values, x.contiguous()).clamp_max(len(values) - 1)
            ids = getattr(self, f"ids_{self.places[j]}")
            result = torch.where(values[at] == x, ids[at], result)
        return torch.where(x == MISSING, NULL_ID, result)


_F64 = torch.float64


def _place(vocabulary: str, spec: FeatureSpec) -> int:
    return list(spec.vocabularies).index(vocabulary)


def _normalization(description: WorkflowDescription) -> tuple[torch.Tensor, torch.Tensor]:
    center, scale = normalization(description.spec, description.statistics)
    return torch.from_numpy(center), torch.from_numpy(scale)


def _vocabulary(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted values and the position of each in the vocabulary."""
    with pq.ParquetFile(file) as parquet:
        values = parquet.read(columns=[parquet.schema_arrow.names[0]]).column(0).to_numpy()
    order = np.argsort(values)
    return torch.from_numpy(values[order].astype(np.int64)), torch.from_numpy(order)


def _murmur3(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 as :func:`clicklog.hashing.murmur3_of_int` does, with operators on int64."""
    hashed = torch.zeros_like(x)
    for word in (x & _32_BITS, (x >> 32) & _32_BITS):
        word = _rotate((word * 0xCC9E2D51) & _32_BITS, 15)
        hashed = _rotate(hashed ^ ((word * 0x1B873593) & _32_BITS), 13)
        hashed = (hashed * 5 + 0xE6546B64) & _32_BITS
    hashed = hashed ^ 8
    for bits, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashed = ((hashed ^ (hashed >> bits)) * factor) & _32_BITS
    return hashed ^ (hashed >> 16)


def _rotate(x: torch.Tensor, bits: int) -> torch.Tensor:
    return ((x << bits) | (x >> (32 - bits))) & _32_BITS


def to_inputs(
    rows: RawRows, spec: FeatureSpec
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Convert rows to the arguments of :meth:`RawModel.forward`."""
    dense = rows.dense.T.astype(np.float64, order="C")
    dense[_missing(rows.dense_missing, len(spec.dense))] = np.nan
    absent = _missing(rows.categorical_missing, len(spec.categorical))
    single, lists = [], []
    for j in range(len(spec.categorical)):
        values = rows.categorical[j]
        if isinstance(values, Jagged):
            lists.append(_padded(values))
        else:
            single.append(np.where(absent[:, j], MISSING, values.astype(np.int64)))
    categorical = np.stack(single, 1) if single else np.empty((len(rows), 0), np.int64)
    return torch.from_numpy(dense), torch.from_numpy(categorical), lists


def _missing(mask: np.ndarray, columns: int) -> np.ndarray:
    """Unpack a mask of missing values to bool [n, columns]."""
    absent = np.empty((mask.shape[1], columns), bool)
    for j in range(columns):
        absent[:, j] = is_missing(mask, j)
    return absent


def _padded(values: Jagged) -> torch.Tensor:
    lengths = np.diff(values.offsets)
    padded = np.full((len(lengths), max(1, lengths.max(initial=0))), MISSING)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = values.values
    return torch.from_numpy(padded)
