"""Rows that were read, as tensors of an exported model."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnxruntime

from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.rows import Jagged, RawRows, is_missing
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors


def tensors_of(rows: RawRows, spec: FeatureSpec) -> dict[str, np.ndarray]:
    """The inputs of ``model.onnx``, for columns that are not derived."""
    columns = {}
    for j, column in enumerate(spec.dense):
        absent = is_missing(rows.dense_missing, j)
        columns[column.name] = [
            None if a else v for v, a in zip(rows.dense[j].tolist(), absent, strict=True)
        ]
    for j, column in enumerate(spec.categorical):
        values = rows.categorical[j]
        kind = RAW_TYPES[column.raw]
        flat = (values.values if isinstance(values, Jagged) else values).tolist()
        flat = [kind.to_log_text(v) if kind.takes_text else v for v in flat]
        if isinstance(values, Jagged):
            ends = itertools.pairwise(values.offsets)
            columns[column.name] = [flat[begin:end] for begin, end in ends]
        else:
            absent = is_missing(rows.categorical_missing, j)
            columns[column.name] = [None if a else v for v, a in zip(flat, absent, strict=True)]
    by_row = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return to_tensors(list_inputs(spec), by_row)


def score(export: Path, tensors: dict[str, np.ndarray]) -> np.ndarray:
    """Probabilities by ONNX Runtime."""
    session = onnxruntime.InferenceSession(export / "model.onnx")
    (probabilities,) = session.run(["probability"], tensors)
    return probabilities
