"""Rows that were read, as arguments of an exported model."""

from __future__ import annotations

import numpy as np
import torch

from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.rows import Jagged, RawRows, is_missing
from nvt_torchrec.inference.export.torch_package import MISSING


def arguments_of(
    rows: RawRows, spec: FeatureSpec
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """The arguments of :meth:`inference.export.torch_package.RawModel.forward`."""
    dense = rows.dense.T.astype(np.float64, order="C")
    for j in range(len(spec.dense)):
        dense[is_missing(rows.dense_missing, j), j] = np.nan
    single, lists = [], []
    for j in range(len(spec.categorical)):
        values = rows.categorical[j]
        if isinstance(values, Jagged):
            lists.append(padded(values))
        else:
            absent = is_missing(rows.categorical_missing, j)
            single.append(np.where(absent, MISSING, values.astype(np.int64)))
    categorical = np.stack(single, 1) if single else np.empty((len(rows), 0), np.int64)
    return torch.from_numpy(dense), torch.from_numpy(categorical), lists


def padded(values: Jagged) -> torch.Tensor:
    """Lists of integers as a tensor."""
    lengths = np.diff(values.offsets)
    result = np.full((len(lengths), max(1, lengths.max(initial=0))), MISSING)
    result[np.arange(result.shape[1]) < lengths[:, None]] = values.values
    return torch.from_numpy(result)
