"""Workflow and model as one PyTorch module: raw values in, probabilities out.

It uses PyTorch's own operators only: sorted vocabularies and ``searchsorted``, not hash tables.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.spec.columns import FIRST_OOV_ID, NULL_ID, CategoricalColumn
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.export.derived import Cross, missing, module_of
from nvt_torchrec.inference.export.sources import MISSING, Sources
from nvt_torchrec.inference.model.scoring import ServingModel
from nvt_torchrec.inference.model.tables import Table
from nvt_torchrec.workflows.compiled.dense import normalization

_32_BITS = 0xFFFFFFFF


class RawModel(nn.Module):
    """Raw values → probabilities.

    Args:
        description: The workflow's description.
        path: The workflow's directory.
        model: The model that was trained on the workflow's data, on the CPU.

    Raises:
        SettingsError: A column holds strings, which tensors cannot hold; or a cross is one of
            texts, or hashes its values as texts.
    """

    def __init__(self, description: WorkflowDescription, path: Path, model: ServingModel) -> None:
        super().__init__()
        spec = description.spec
        strings = [c.name for c in spec.categorical if _is_text(c) and not c.derive]
        if strings:
            raise SettingsError(
                f"columns of strings, which tensors cannot hold: {', '.join(strings)}",
                "export for Triton instead, or serve the bundle",
            )
        hashed = [c.name for c in spec.categorical if _is_text(c) and c.oov_ids > 1]
        if hashed:
            raise SettingsError(
                f"crosses whose values are hashed as texts: {', '.join(hashed)}",
                "fit without their num_buckets or hash_buckets, export for Triton, or serve the "
                "bundle",
            )
        self.columns = spec.categorical
        self.sources = Sources.of(spec)
        self.derived = nn.ModuleDict()
        self.lists = [column.multi_hot for column in spec.categorical]
        transforms = [spec.transform_of(column) for column in spec.dense]
        self.functions = {transform.function: transform for transform in transforms}
        keep = self.register_buffer
        self.has_dense = bool(spec.dense)
        for j, column in enumerate(spec.dense):
            if column.derive:
                self.derived[f"dense_{j}"] = module_of(column.derive)
        if spec.dense:  # tensors without elements cannot be packed
            keep("fill", torch.tensor([float(column.fill) for column in spec.dense], dtype=_F64))
            center, scale = _normalization(description)
            keep("center", center)
            keep("scale", scale)
            for function in self.functions if len(self.functions) > 1 else ():
                chosen = [transform.function == function for transform in transforms]
                keep(f"computed_by_{function}", torch.tensor(chosen))
        keep("table", model.table.values)
        keep("ranges", model.table.ranges)
        keep("first", model.first)
        keep("pairs", model.pairs)
        for name, columns in spec.vocabularies.items():
            values = _values(path / description.vocabularies[columns[0].name].file)
            if _is_text(columns[0]):
                cross = Cross(columns[0].name, values.tolist())
                values = cross.codes if cross.known else np.empty(0)
            values, ids = _sorted(values)
            for column in columns:
                if column.derive:
                    module = cross if _is_text(column) else module_of(column.derive)
                    self.derived[f"categorical_{self.columns.index(column)}"] = module
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
            dense: Float64 [n, numbers of the log], NaN for missing values.
            categorical: Int64 [n, other columns without lists], :data:`MISSING` for missing values.
            lists: Int64 [n, length] for each column of lists, padded with :data:`MISSING`.
        """
        table = Table(self.table, self.ranges)
        features, columns = self.encode(dense, categorical, lists)
        embedded = []
        for j, ids in enumerate(columns):
            rows = table.rows(ids + self.first[j])
            if self.lists[j]:
                ((_, index),) = self.sources.of_categorical[j]
                rows = (rows * (lists[index] != MISSING).unsqueeze(-1)).sum(1)
            embedded.append(rows)
        layers = {
            group: [
                (getattr(self, f"{group}_{i}_weight"), getattr(self, f"{group}_{i}_bias"))
                for i in range(count)
            ]
            for group, count in self.layers.items()
        }
        model = ServingModel(table, self.first, layers, self.pairs)
        return torch.sigmoid(model.interact(features, torch.stack(embedded, 1)))

    def encode(
        self, dense: torch.Tensor, categorical: torch.Tensor, lists: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the dense features float32 [n, columns], and the ids of each categorical column.

        Args:
            dense: As :meth:`forward` takes them.
            categorical: Likewise.
            lists: Likewise.
        """

        def source(is_number: bool, index: int) -> torch.Tensor:
            return (dense if is_number else categorical)[:, index]

        ids = []
        for j, column in enumerate(self.columns):
            places = self.sources.of_categorical[j]
            if self.lists[j]:
                ids.append(self._ids(j, column, lists[places[0][1]]))
                continue
            values = [source(*place) for place in places]
            if column.derive:
                found = self.derived[f"categorical_{j}"](*values)
                values = [torch.where(missing(values), MISSING, found)]
            ids.append(self._ids(j, column, values[0]))
        as_passed = tuple(((True, j),) for j in range(len(self.sources.dense)))
        if self.sources.of_dense != as_passed:
            numbers = []
            for j, places in enumerate(self.sources.of_dense):
                values = [source(*place) for place in places]
                if f"dense_{j}" in self.derived:
                    found = self.derived[f"dense_{j}"](*values)
                    values = [torch.where(missing(values), torch.nan, found)]
                numbers.append(values[0])
            dense = torch.stack(numbers, 1) if numbers else dense[:, :0]
        return self._dense(dense), ids

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        if not self.has_dense:
            return x.to(torch.float32)
        y = torch.where(x.isnan(), self.fill, x)
        filled = y
        for function, transform in self.functions.items():
            computed = transform.y(filled, torch)
            chosen = getattr(self, f"computed_by_{function}", None)
            y = computed if chosen is None else torch.where(chosen, computed, y)
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


def _is_text(column: CategoricalColumn) -> bool:
    return RAW_TYPES[column.raw].is_text


def _place(vocabulary: str, spec: FeatureSpec) -> int:
    return list(spec.vocabularies).index(vocabulary)


def _normalization(description: WorkflowDescription) -> tuple[torch.Tensor, torch.Tensor]:
    center, scale = normalization(description.spec, description.statistics)
    return torch.from_numpy(center), torch.from_numpy(scale)


def _values(file: Path) -> np.ndarray:
    """Return the values of a vocabulary, in its order."""
    with pq.ParquetFile(file) as parquet:
        return parquet.read(columns=[parquet.schema_arrow.names[0]]).column(0).to_numpy()


def _sorted(values: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sorted values and the position of each in the vocabulary."""
    order = np.argsort(values)
    return torch.from_numpy(values[order].astype(np.int64)), torch.from_numpy(order)


def _murmur3(x: torch.Tensor) -> torch.Tensor:
    """Hash int64 as :func:`base.hashing.murmur3_of_int` does, with operators on int64."""
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
