"""Reference rows of a bundle: encoded rows, and the scores that the model gave them at the start.

They are written when the bundle is made. :mod:`inference.publish.trial` scores them again before
the bundle is served.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.inference.model.scoring import ServingModel
from nvt_torchrec.models.config import ModelConfig

#: The directory of the rows in a bundle.
FOLDER = "reference"
#: The number of rows in a bundle.
_NUM_ROWS = 64
#: The length of the longest random list and history.
_MAX_LENGTH = 4
#: The share of the rows without a vector.
_MISSING_SHARE = 1 / 4
#: The most by which a probability may differ on another machine, or with other threads.
_TOLERANCE = 1e-4
_REMEDY = "make the bundle again from the checkpoint: python -m inference bundle"


def make_rows(workflow: Path, schema: TableSchema, model: ServingModel) -> dict[str, np.ndarray]:
    """Choose reference rows and score them.

    The rows are the first ones of the valid set, if the workflow is still in the ETL's output and
    the set has enough rows. Otherwise they are random. Events of histories, and vectors, are always
    random.

    Args:
        workflow: ``OUT/workflow``, or a copy elsewhere.
        schema: The columns that the workflow writes.
        model: The model.

    Returns:
        ``dense`` float32 [dense columns, rows]; ``ids`` int64 [all ids], feature by feature;
        ``lengths`` int64 [features, rows]; ``dense_vectors`` float32 [rows,
        ``config.vector_inputs``], if the model takes any; ``scores`` float32 [rows, labels].
    """
    config = model.config
    generator = np.random.default_rng(0)
    sizes = dict(zip(config.categorical, config.num_embeddings, strict=True))
    dense = generator.standard_normal((len(config.dense), _NUM_ROWS)).astype(np.float32)
    lengths = np.ones((len(config.features), _NUM_ROWS), np.int64)
    ids = []
    for j, (name, column) in enumerate(config.features.items()):
        if name not in sizes:  # a history
            max_length = min(_MAX_LENGTH, config.max_events)
            lengths[j] = generator.integers(0, max_length + 1, _NUM_ROWS)
        elif name in schema.multi_hot:
            lengths[j] = generator.integers(0, _MAX_LENGTH + 1, _NUM_ROWS)
        ids.append(generator.integers(0, sizes[column], lengths[j].sum()))
    for part in sorted((EtlOutput(workflow.absolute().parent).splits / "valid").glob("*.parquet")):
        if _take_rows(part, config, dense, ids, lengths):
            break
    dense_vectors = _draw_vectors(config, generator) if config.dense_vectors else None
    scores = _score(model, dense, Ids.from_lengths(ids, lengths), dense_vectors)
    rows: dict[str, np.ndarray] = {
        "dense": dense,
        "ids": np.concatenate(ids).astype(np.int64),
        "lengths": lengths,
        "scores": scores,
    }
    if dense_vectors is not None:
        rows["dense_vectors"] = dense_vectors
    return rows


def _draw_vectors(config: ModelConfig, generator: np.random.Generator) -> np.ndarray:
    """Draw a vector for most rows, each followed by its indicator, [rows, ``vector_inputs``]."""
    drawn = []
    for vectors in config.dense_vectors:
        values = generator.standard_normal((_NUM_ROWS, vectors.num_inputs), np.float32)
        values[:, -1] = 1
        values[generator.random(_NUM_ROWS) < _MISSING_SHARE] = 0
        drawn.append(values)
    return np.concatenate(drawn, axis=1)


def _take_rows(
    part: Path,
    config: ModelConfig,
    dense: np.ndarray,
    ids: list[np.ndarray],
    lengths: np.ndarray,
) -> bool:
    """Replace the random rows by the first rows of a parquet file, if it has enough.

    Returns:
        True if they were replaced.
    """
    import pyarrow.parquet as pq  # also imports file systems, which a server does not need

    names = [*config.dense, *config.categorical]
    file = pq.ParquetFile(part)
    if file.metadata.num_rows < _NUM_ROWS or {*names} - {*file.schema_arrow.names}:
        return False
    rows = next(file.iter_batches(_NUM_ROWS, columns=names))
    if rows.num_rows < _NUM_ROWS:
        return False
    for j, name in enumerate(config.dense):
        dense[j] = to_numpy(rows[name])
    for j, name in enumerate(config.categorical):
        column = rows[name]
        if hasattr(column, "value_lengths"):  # a list
            lengths[j] = to_numpy(column.value_lengths())
            column = column.flatten()
        ids[j] = to_numpy(column).astype(np.int64)
    return True


@torch.inference_mode()
def _score(
    model: ServingModel, dense: np.ndarray, ids: Ids, dense_vectors: np.ndarray | None
) -> np.ndarray:
    """Return probabilities, float32 [rows, labels]."""
    ids = model.fold(ids)
    logits = model.compute_logits(dense, model.lookup(ids), ids, dense_vectors)
    return torch.sigmoid(logits).cpu().numpy()


def check_scores(bundle: Path, model: ServingModel) -> None:
    """Score the reference rows again; compare the scores with those in the bundle.

    Raises:
        BadInputError: The scores differ, or the files are damaged.
    """
    try:
        dense, ids, lengths, expected = _read_rows(bundle / FOLDER, model.config)
        dense_vectors = None
        if model.config.dense_vectors:
            dense_vectors = _read_vectors(bundle / FOLDER, model.config, len(expected))
        columns = np.split(ids, lengths.sum(1).cumsum()[:-1])
        scores = _score(model, dense, Ids.from_lengths(columns, lengths), dense_vectors)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadInputError(f"{bundle / FOLDER} is damaged: {reason}", _REMEDY) from error
    if not np.allclose(scores, expected, rtol=0, atol=_TOLERANCE, equal_nan=True):
        difference = float(np.abs(scores - expected).max())
        raise BadInputError(
            f"{bundle}: the scores of its reference rows differ by {difference:g} from the scores "
            "at the time it was made",
            _REMEDY,
        )


def _read_rows(
    folder: Path, config: ModelConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read dense values, ids, lengths and scores.

    Raises:
        ValueError, OSError: They are damaged, or do not have the shapes of the model's inputs.
    """
    dense = MappedArray(folder / "dense.npy", np.float32, 2).values
    ids = MappedArray(folder / "ids.npy", np.int64, 1).values
    lengths = MappedArray(folder / "lengths.npy", np.int64, 2).values
    scores = MappedArray(folder / "scores.npy", np.float32, 2).values
    num_rows = len(scores)
    has_shapes = (
        dense.shape == (len(config.dense), num_rows)
        and lengths.shape == (len(config.features), num_rows)
        and scores.shape == (num_rows, len(config.labels))
    )
    if not has_shapes:
        raise ValueError(f"rows with the shapes {dense.shape}, {lengths.shape}, {scores.shape}")
    if not num_rows or lengths.min(initial=0) < 0 or lengths.sum() != len(ids):
        raise ValueError(f"the lengths do not add up to the {len(ids)} ids")
    return dense, ids, lengths, scores


def _read_vectors(folder: Path, config: ModelConfig, num_rows: int) -> np.ndarray:
    """Read the vectors of the rows. Raises ValueError, OSError."""
    path = folder / "dense_vectors.npy"
    # PyTorch only wraps writable memory without a warning.
    values = MappedArray(path, np.float32, 2, writable=True).values
    if values.shape != (num_rows, config.vector_inputs):
        raise ValueError(f"vectors with the shape {values.shape}")
    return values
