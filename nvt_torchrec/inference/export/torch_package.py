"""``model.pt2``: values of features to the probability, for programs that have only PyTorch.

Workflow and model are one PyTorch module of PyTorch's own operators: sorted vocabularies and
``searchsorted``, not hash tables.
"""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow.parquet as pq
import torch
from torch import nn

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import new_directory, write_json
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID, CategoricalColumn
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.inference.model.bundle import WORKFLOW
from nvt_torchrec.inference.model.scoring import ServingModel, Table
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.workflows.compiled.dense import normalization
from nvt_torchrec.workflows.description import inspect

PACKAGE, COLUMNS = "model.pt2", "columns.json"
_PROBES, _LONGEST_LIST = 500, 4
#: Values of dense columns with which the package is tried.
_NUMBERS = (-5, -1, 0, 1, 2, 3, 7, 50, 99, 2_000_000_000, float("nan"))
_TOLERANCE = 1e-5
#: Dense values, single categorical values, and a tensor for each column of lists.
Arguments: TypeAlias = tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]
#: Represents a missing integer, and fills lists up to the length of the longest.
MISSING = -(2**63)
_32_BITS = 0xFFFFFFFF


class RawModel(nn.Module):
    """The values of features, derived ones included → probabilities.

    Args:
        description: The workflow's description.
        path: The workflow's directory.
        model: The model that was trained on the workflow's data, on the CPU.

    Raises:
        SettingsError: A column holds strings, which tensors cannot hold.
    """

    def __init__(self, description: WorkflowDescription, path: Path, model: ServingModel) -> None:
        super().__init__()
        spec = description.spec
        strings = [c.name for c in spec.categorical if RAW_TYPES[c.raw].is_text]
        if strings:
            raise SettingsError(
                f"columns of strings, which tensors cannot hold: {', '.join(strings)}",
                "export for Triton instead, or serve the bundle",
            )
        self.columns = spec.categorical
        self.transforms = [spec.transform_of(column) for column in spec.dense]
        keep = self.register_buffer
        if spec.dense:  # tensors without elements cannot be packed
            center, scale = normalization(spec, description.statistics)
            keep("center", torch.from_numpy(center))
            keep("scale", torch.from_numpy(scale))
            fill = [float(column.fill) for column in spec.dense]
            keep("fill", torch.tensor(fill, dtype=torch.float64))
        self.vocabularies = list(spec.vocabularies)
        for place, columns in enumerate(spec.vocabularies.values()):
            values = _values(path / description.vocabularies[columns[0].name].file)
            if len(values):  # likewise
                order = np.argsort(values)
                keep(f"values_{place}", torch.from_numpy(values[order]))
                keep(f"ids_{place}", torch.from_numpy(order) + columns[0].reserved_ids)
        keep("table", model.table.values)
        keep("ranges", model.table.ranges)
        keep("first", model.first)
        self.head = model.head

    def forward(
        self, dense: torch.Tensor, categorical: torch.Tensor, lists: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return probabilities float32 [n].

        Args:
            dense: Float64 [n, dense columns], NaN for missing values.
            categorical: Int64 [n, other columns without lists], :data:`MISSING` for missing values.
            lists: Int64 [n, length] for each column of lists, filled with :data:`MISSING`.
        """
        table = Table(self.table, self.ranges)
        embedded, singles = [], 0
        for j, column in enumerate(self.columns):
            if column.multi_hot:
                values = lists[j - singles]
            else:
                values = categorical[:, singles]
                singles += 1
            rows = table.rows(self._ids(column, values) + self.first[j])
            if column.multi_hot:
                rows = (rows * (values != MISSING).unsqueeze(-1)).sum(1)
            embedded.append(rows)
        logits = self.head(self._dense(dense), torch.stack(embedded, 1))
        return torch.sigmoid(logits.squeeze(-1))

    def vocabulary(self, column: CategoricalColumn) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the sorted values of a column's vocabulary, and their ids; None if it is empty."""
        place = self.vocabularies.index(column.vocabulary_name)
        if not hasattr(self, f"values_{place}"):
            return None
        return getattr(self, f"values_{place}"), getattr(self, f"ids_{place}")

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        if not self.transforms:
            return x.to(torch.float32)
        filled = torch.where(x.isnan(), self.fill, x).unbind(1)
        y = [transform.y(x, torch) for transform, x in zip(self.transforms, filled, strict=True)]
        return ((torch.stack(y, 1) - self.center) / self.scale).to(torch.float32)

    def _ids(self, column: CategoricalColumn, x: torch.Tensor) -> torch.Tensor:
        result = torch.full_like(x, FIRST_OOV_ID)
        if column.oov_ids > 1:
            result = result + _murmur3(x) % column.oov_ids
        vocabulary = self.vocabulary(column)
        if vocabulary is not None:
            values, ids = vocabulary
            at = torch.searchsorted(values, x.contiguous()).clamp_max(len(values) - 1)
            result = torch.where(values[at] == x, ids[at], result)
        return torch.where(x == MISSING, NULL_ID, result)


def export_torch(bundle: Path, output: Path) -> None:
    """Write ``model.pt2`` and ``columns.json`` into a new directory, and check the scores.

    ``torch.export.load("model.pt2").module()(dense, categorical, lists)`` gives float32 [n]; see
    :meth:`RawModel.forward` for the arguments, ``columns.json`` for the order of the columns.

    Args:
        bundle: Directory of a bundle.
        output: Directory to make.

    Raises:
        SettingsError: There are columns of strings.
        OutputError: ``output`` exists or cannot be written.
    """
    predictor = Predictor.load(bundle, check=True)
    workflow = bundle / WORKFLOW
    network = RawModel(inspect(workflow), workflow, predictor.model).eval()
    inputs = _probes(network)
    rows = torch.export.Dim("rows", min=1)
    lengths = [torch.export.Dim(f"length_{k}", min=1) for k in range(len(inputs[2]))]
    shapes = {0: rows}, {0: rows}, [{0: rows, 1: length} for length in lengths]
    with new_directory(output) as temporary, torch.no_grad():
        program = torch.export.export(network, inputs, dynamic_shapes=shapes)
        with io.BytesIO() as package:  # if a disk is full, PyTorch ends the process (terminate)
            torch.export.save(program, package)
            (temporary / PACKAGE).write_bytes(package.getvalue())
        write_json(temporary / COLUMNS, describe(predictor.spec, predictor.workflow.digest))
        module = torch.export.load(temporary / PACKAGE).module()
        for count in (1, _PROBES):
            dense, categorical, lists = inputs
            some = dense[:count], categorical[:count], [values[:count] for values in lists]
            difference = (module(*some) - network(*some)).abs().max()
            if not difference <= _TOLERANCE:
                raise AssertionError(f"{PACKAGE}: scores differ from the model's by {difference}")


def _probes(network: RawModel) -> Arguments:
    """Return arguments with known, unseen and missing values of every column."""
    generator = torch.Generator().manual_seed(0)

    def draw(values: torch.Tensor, *shape: int) -> torch.Tensor:
        return values[torch.randint(len(values), shape, generator=generator)]

    single, lists = [torch.empty(_PROBES, 0, dtype=torch.int64)], []
    for column in network.columns:
        known = network.vocabulary(column)
        values = torch.tensor([*RAW_TYPES[column.raw].probes, MISSING])
        if known is not None:
            values = torch.cat([draw(known[0], 20), values])
        if column.multi_hot:
            lists.append(draw(values, _PROBES, _LONGEST_LIST))
        else:
            single.append(draw(values, _PROBES, 1))
    numbers = torch.tensor(_NUMBERS, dtype=torch.float64)
    return draw(numbers, _PROBES, len(network.transforms)), torch.cat(single, 1), lists


def describe(spec: FeatureSpec, digest: str) -> dict[str, Any]:
    """Return the content of ``columns.json``, which describes the arguments."""
    columns = (*spec.dense, *spec.categorical)
    nulls = {c.name: list(c.reading.nulls) for c in columns if c.reading.nulls}
    derived = {
        c.name: {"from": list(c.reading.sources)}
        | {key: value for key, value in dataclasses.asdict(c.derive).items() if value}
        for c in columns
        if c.derive
    }
    single, lists = (
        [column.name for column in spec.categorical if column.multi_hot == multi_hot]
        for multi_hot in (False, True)
    )
    return {
        "workflow_digest": digest,
        "dense": {"dtype": "float64", "missing": "NaN", "columns": list(spec.dense_names)},
        "categorical": {"dtype": "int64", "missing": MISSING, "columns": single},
        "lists": {"dtype": "int64", "filled_with": MISSING, "columns": lists},
        "hex32": "pass the number that the hexadecimal digits represent",
        "bool": "pass 1 for true, 0 for false",
        "nulls": nulls,
        "nulls_are": "passed as missing values",
        "derived": derived,
        "derived_are": "computed by the caller",
    }


def _values(file: Path) -> np.ndarray:
    """Return the values of a vocabulary, int64 in its order."""
    with pq.ParquetFile(file) as parquet:
        column = parquet.read(columns=[parquet.schema_arrow.names[0]]).column(0)
    return column.to_numpy().astype(np.int64)


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
