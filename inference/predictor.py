"""One saved workflow and one trained model, put together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from clicklog.errors import SchemaError, SettingsError
from clicklog.spec import FeatureSpec
from clicklog.tokenizer import RawRows
from dlrm.checkpoint import load_model, read_model_file
from dlrm.config import ModelConfig
from workflows import inspect, to_frame
from workflows.description import WorkflowDescription
from workflows.store import load

#: Rows that go through the model at once: bounds the memory of its activations.
MODEL_ROWS = 8192


class Predictor:
    """Scores raw rows as the model would have scored them in training's evaluation.

    Args:
        workflow: directory of a saved workflow.
        checkpoint: directory of a training checkpoint, of any world size.
        device: where the model runs; it must hold all tables. The workflow runs on the CPU.

    Raises:
        BadInputError: one of them is missing or damaged.
        SchemaError: they do not belong together.
        SettingsError: there is no such device.
    """

    def __init__(
        self, workflow: Path | str, checkpoint: Path | str, device: torch.device | str = "cpu"
    ) -> None:
        description = inspect(workflow)
        self.spec: FeatureSpec = description.spec
        self.device = _usable(device)
        trained_on = read_model_file(checkpoint)["training"].get("workflow_digest")
        if trained_on and trained_on != description.digest:
            raise SchemaError(
                f"{checkpoint} was trained on data of another workflow (digest "
                f"{trained_on[:12]}…) than {workflow} (digest {description.digest[:12]}…)",
                "pass the OUT/workflow beside the OUT/criteo_binary it was trained on",
            )
        self._model, config = load_model(checkpoint, self.device)
        _check_fit(description, config, workflow, checkpoint)
        self._config = config
        self._workflow = load(workflow, label=False)

    def predict_rows(self, rows: RawRows) -> np.ndarray:
        """Probabilities float32 [n] of parsed rows, with or without labels."""
        return self.predict(to_frame(rows, self.spec))

    def predict(self, frame: pd.DataFrame) -> np.ndarray:
        """Probabilities of a click.

        Args:
            frame: the raw columns by name, of any numeric dtype that holds them exactly: counts,
                and categories as the integer their hexadecimal digits spell; NaN or NA where
                missing. Further columns, a label among them, are ignored.

        Returns:
            float32 [rows], in the order of the frame.

        Raises:
            SchemaError: a column is missing, or holds what is no count or no category.
        """
        frame = _checked(frame, self.spec)
        if not len(frame):
            return np.empty(0, np.float32)
        features = self._workflow.transform(frame)
        dense = features[list(self._config.dense)].to_numpy(np.float32)
        ids = features[list(self._config.categorical)].to_numpy(np.int32).T
        probabilities = [
            self._score(dense[at : at + MODEL_ROWS], ids[:, at : at + MODEL_ROWS])
            for at in range(0, len(frame), MODEL_ROWS)
        ]
        return np.concatenate(probabilities)

    @torch.inference_mode()
    def _score(self, dense: np.ndarray, ids: np.ndarray) -> np.ndarray:
        columns, rows = ids.shape
        values = torch.from_numpy(np.ascontiguousarray(ids)).view(-1)
        sparse = KeyedJaggedTensor(
            keys=list(self._config.categorical),
            values=values,
            lengths=torch.ones(columns * rows, dtype=torch.int32),
        )
        logits = self._model(
            torch.from_numpy(np.ascontiguousarray(dense)).to(self.device), sparse.to(self.device)
        )
        return torch.sigmoid(logits).cpu().numpy()


def _usable(device: torch.device | str) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SettingsError(f"--device {device}: {reason}", "the CPU always works: cpu") from error
    return chosen


def _checked(frame: pd.DataFrame, spec: FeatureSpec) -> pd.DataFrame:
    """The columns of ``spec`` in float64, NaN where missing."""
    names = spec.dense_names + spec.categorical_names
    missing = [name for name in names if name not in frame]
    if missing:
        raise SchemaError(f"the frame has no column {', '.join(missing)}")
    columns = {}
    for name in names:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            raise SchemaError(
                f"column {name}: {frame[name].dtype} values, numbers are needed",
                "parse hexadecimal digits first: int(text, 16)",
            )
        columns[name] = frame[name].to_numpy(np.float64, na_value=np.nan)
    for name in spec.categorical_names:
        values = columns[name]
        wrong = ~(np.isnan(values) | ((values >= 0) & (values < 2**32) & (values % 1 == 0)))
        if wrong.any():
            raise SchemaError(
                f"column {name}, row {int(wrong.argmax())}: {values[wrong][0]!r} is no category",
                "a category is an unsigned integer of 32 bits",
            )
        if frame[name].dtype == np.float32 and (values > 2**24).any():
            raise SchemaError(
                f"column {name}: float32 rounds categories above {2**24}", "use float64 or int64"
            )
    return pd.DataFrame(columns, copy=False)


def _check_fit(
    description: WorkflowDescription, config: ModelConfig, workflow: Path | str, checkpoint
) -> None:
    schema = description.table_schema
    for what, ours, theirs in (
        ("dense columns", schema.dense, config.dense),
        ("categorical columns", schema.categorical, config.categorical),
    ):
        if ours != theirs:
            raise SchemaError(
                f"{what} of {workflow}: {', '.join(ours)}; of {checkpoint}: {', '.join(theirs)}",
                "pass the workflow whose data the model was trained on",
            )
    for name, needed, rows in zip(
        schema.categorical, schema.table_sizes, config.num_embeddings, strict=True
    ):
        if needed > rows:
            raise SchemaError(
                f"column {name}: {workflow} gives ids up to {needed - 1}, the table in "
                f"{checkpoint} has {rows} rows",
                "pass the workflow whose data the model was trained on",
            )
