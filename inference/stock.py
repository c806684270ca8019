"""Scoring without this project: the baseline of the benchmark, and the reference of tests.

Frame → ``nvtabular.Workflow.transform`` → KeyedJaggedTensor → TorchRec's DLRM.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pandas as pd
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.dlrm.checkpoint.store import load_model
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.frames import to_frame
from nvt_torchrec.workflows.store import load

Timed = Callable[[str, Callable[[], Any]], Any]


class Stock:
    """NVTabular's Workflow and TorchRec's model."""

    def __init__(self, workflow: Path, checkpoint: Path, device: torch.device) -> None:
        description = inspect(workflow)
        self.spec, self.schema = description.spec, description.table_schema
        self.device = device
        self._workflow = load(workflow, label=False, raw=False)
        self._model, _ = load_model(checkpoint, device)

    def frame(self, rows: RawRows) -> pd.DataFrame:
        """Return the frame that the Workflow transforms, without labels."""
        return to_frame(rows, self.spec)

    def predict(self, frame: pd.DataFrame, timed: Timed) -> np.ndarray:
        """Return probabilities float32 [n]; ``timed`` runs a stage and measures its time."""
        features = timed("  Workflow.transform", lambda: self._workflow.transform(frame))
        return timed("  plain model", lambda: self._score(features))

    @torch.inference_mode()
    def _score(self, features: pd.DataFrame) -> np.ndarray:
        dense, sparse = to_tensors(features, self.schema)
        logits = self._model(dense.to(self.device), sparse.to(self.device))
        return torch.sigmoid(logits).cpu().numpy()


def to_tensors(features: pd.DataFrame, schema: Any) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Convert a Workflow's output to the model's inputs: dense float32 [n, columns], and ids."""
    values, lengths = [], []
    for name in schema.categorical:
        column = features[name]
        if name in schema.multi_hot:
            lengths.append(np.array([len(ids) for ids in column], np.int32))
            values += [np.asarray(ids, np.int64) for ids in column]
        else:
            lengths.append(np.ones(len(column), np.int32))
            values.append(column.to_numpy(np.int64))
    sparse = KeyedJaggedTensor(
        keys=list(schema.categorical),
        values=torch.from_numpy(np.concatenate(values)),
        lengths=torch.from_numpy(np.concatenate(lengths)),
    )
    dense = features[list(schema.dense)].to_numpy(np.float32)
    return torch.from_numpy(np.array(dense)), sparse  # a copy: pandas' array may be read-only
