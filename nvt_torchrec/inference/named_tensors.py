"""Raw rows as named tensors: the inputs of ``model.onnx`` and of the Open Inference Protocol.

Each column of the log that is read becomes a tensor [rows] with the column's name: strings as in
the log, int64, or float64, in which "", :data:`MISSING` and NaN represent missing values. A
multi-hot column becomes two tensors: its values [rows, length of the longest list], arbitrary after
the end of a list, and the lengths of its lists, int64 [rows]. A vector becomes a tensor float32
[rows, width], with a row of NaN where it is missing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.read_plan import Read
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables

#: The name of the served model, in Triton and in our server.
MODEL_NAME = "click_probability"
#: The name of its output. With several labels, :func:`inference.predictor.name_by_label` adds the
#: label.
OUTPUT = "probability"
#: The integer that represents a missing value.
MISSING = -(2**63)
#: Kind of tensor → the value that represents a missing one.
MISSING_VALUES: dict[str, Any] = {
    "string": "",
    "int64": MISSING,
    "float64": np.nan,
    "float32": np.nan,
}
#: Kind of tensor → NumPy type, from the widest kind to the narrowest.
DTYPES: dict[str, Any] = {
    "string": object,
    "int64": np.int64,
    "float64": np.float64,
    "float32": np.float32,
}


@dataclasses.dataclass(frozen=True)
class Input:
    """A column of the log, or a vector, as a tensor.

    Attributes:
        name: The name of the column, and of the tensor.
        kind: "string", "int64" or "float64"; "float32" for vectors.
        multi_hot: True if values are lists.
        width: The number of elements of a vector; 0 for a column of the log.
    """

    name: str
    kind: str
    multi_hot: bool = False
    width: int = 0

    @property
    def tensors(self) -> dict[str, tuple[str, int]]:
        """The kind and the rank of each of its tensors, by name."""
        if self.width:
            return {self.name: (self.kind, 2)}
        if not self.multi_hot:
            return {self.name: (self.kind, 1)}
        return {self.name: (self.kind, 2), self.lengths: ("int64", 1)}

    def get_second_size(self, name: str) -> int:
        """Return the size of a tensor's second dimension as clients see it; -1 if it may vary."""
        _, rank = self.tensors[name]
        if self.width:
            return self.width
        return 1 if rank == 1 else -1

    @property
    def lengths(self) -> str:
        """The name of the tensor of list lengths."""
        return f"{self.name}.length"


def get_tensor_type(read: Read) -> str:
    """Return the kind of tensor for one read of a column."""
    if RAW_TYPES[read.raw].takes_text and read.time_format not in EPOCHS:
        return "string"
    return "int64" if RAW_TYPES[read.raw].is_whole else "float64"


def list_inputs(spec: FeatureSpec) -> list[Input]:
    """Return the columns of the log; a column that is read in several ways gets the widest kind."""
    inputs = []
    for name in spec.sources(label=False):
        reads = [read for read in spec.read_plan(label=False).reads if read.source == name]
        kinds = {get_tensor_type(read) for read in reads}
        kind = next(kind for kind in DTYPES if kind in kinds)  # the widest
        inputs.append(Input(name, kind, reads[0].multi_hot))
    return inputs


def list_vector_inputs(spec: FeatureSpec) -> list[Input]:
    """Return the vectors of the spec."""
    return [Input(vector.name, "float32", width=vector.width) for vector in spec.vectors]


def list_inputs_without_tables(spec: FeatureSpec) -> list[Input]:
    """Return the inputs of a program without tables: columns of the log and of tables, vectors."""
    return [*list_inputs(drop_tables(spec)), *list_vector_inputs(spec)]


def to_tensors(inputs: list[Input], rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Convert rows with values as in the log, None where missing, to tensors."""
    tensors = {}
    for column in inputs:
        missing = MISSING_VALUES[column.kind]
        dtype = DTYPES[column.kind]
        values = [row[column.name] for row in rows]
        if column.width:
            absent = [missing] * column.width
            filled = [absent if value is None else value for value in values]
            tensors[column.name] = np.array(filled, dtype).reshape(len(rows), column.width)
        elif column.multi_hot:
            lists = [value or [] for value in values]
            lengths = [len(items) for items in lists]
            width = max(1, *lengths)
            padded = [[*items, *[missing] * (width - len(items))] for items in lists]
            tensors[column.lengths] = np.array(lengths, np.int64)
            tensors[column.name] = np.array(padded, dtype)
        else:
            filled = [missing if value is None else value for value in values]
            tensors[column.name] = np.array(filled, dtype)
    return tensors


def to_columns(inputs: list[Input], tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Convert tensors to columns that :meth:`inference.predictor.Predictor.predict` accepts.

    Raises:
        ValueError: The length of a list is negative or exceeds the width of its tensor.
    """
    columns: dict[str, Any] = {}
    for column in inputs:
        values = tensors[column.name]
        if column.width:
            is_absent = np.isnan(values).all(axis=1)
            vectors = zip(values, is_absent, strict=True)
            columns[column.name] = [None if absent else vector for vector, absent in vectors]
        elif column.multi_hot:
            lengths = tensors[column.lengths]
            if ((lengths < 0) | (lengths > values.shape[1])).any():
                raise ValueError(f"{column.lengths} has a value outside 0 to {values.shape[1]}")
            rows = zip(values.tolist(), lengths.tolist(), strict=True)
            columns[column.name] = [items[:length] for items, length in rows]
        elif column.kind == "int64" and (values == MISSING).any():
            columns[column.name] = [None if v == MISSING else v for v in values.tolist()]
        else:
            columns[column.name] = values.tolist() if column.kind == "string" else values
    return columns
