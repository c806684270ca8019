"""Reference rows: a bundle carries some encoded rows and the scores that it gave when it was made.

:mod:`inference.publish.trial` scores them again before the bundle is served.
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
#: How many rows a bundle carries.
_NUM_ROWS = 64
#: The longest list, and the longest history, that is made up.
_MAX_LENGTH = 4
#: The share of the rows for which no vector is made up.
_MISSING_SHARE = 1 / 4
#: By how much a probability may differ on another machine, or with other threads.
_TOLERANCE = 1e-4
_REMEDY = "make the bundle again from the checkpoint: python -m inference bundle"


def make_rows(workflow: Path, schema: TableSchema, model: ServingModel) -> dict[str, np.ndarray]:
    """Return rows and their scores: rows of the valid set, if that lies beside the workflow.

    The events of histories, and vectors, are always drawn at random; so are all rows, if the output
    of the ETL is elsewhere or valid has too few.

    Args:
        workflow: ``OUT/workflow``, or a copy elsewhere.
        schema: The columns that it writes.
        model: The model.

    Returns:
        ``dense`` float32 [dense columns, n]; ``ids`` int64 [all ids], feature by feature;
        ``lengths`` int64 [features, n]; ``dense_vectors`` float32 [n, ``config.vector_inputs``], if
        the model takes any; ``scores`` float32 [n, labels].
    """
    config, generator = model.config, np.random.default_rng(0)
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
    every_id = np.concatenate(ids).astype(np.int64)
    rows: dict[str, np.ndarray] = {"dense": dense, "ids": every_id, "lengths": lengths}
    rows["scores"] = scores
    if dense_vectors is not None:
        rows["dense_vectors"] = dense_vectors
    return rows


def _draw_vectors(config: ModelConfig, generator: np.random.Generator) -> np.ndarray:
    """Return vectors of rows, each followed by its indicator; one of four rows has none."""
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
    """Replace the rows that were drawn by the first ones of a part of valid, if it has enough.

    Returns:
        Whether they were replaced.
    """
    import pyarrow.parquet as pq  # imports file systems, which a server does not need

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
    """Return probabilities, float32 [n, labels]."""
    ids = model.fold(ids)
    logits = model.logits(dense, model.lookup(ids), ids, dense_vectors)
    return torch.sigmoid(logits).cpu().numpy()


def check_scores(bundle: Path, model: ServingModel) -> None:
    """Compare the scores of a bundle's rows with those that it gave when it was made.

    Raises:
        BadInputError: They differ, or the files are damaged.
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
        raise BadInputError(f"{bundle / FOLDER}: damaged: {reason}", _REMEDY) from error
    if not np.allclose(scores, expected, rtol=0, atol=_TOLERANCE, equal_nan=True):
        difference = float(np.abs(scores - expected).max())
        raise BadInputError(
            f"{bundle}: the scores of its reference rows differ by {difference:g} from those that "
            "it gave when it was made",
            _REMEDY,
        )


def _read_rows(
    folder: Path, config: ModelConfig
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Read dense values, ids, lengths and scores.

    Raises:
        ValueError, OSError: They are damaged, or not rows of the model.
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
        raise ValueError(f"rows of the shapes {dense.shape}, {lengths.shape}, {scores.shape}")
    if not num_rows or lengths.min(initial=0) < 0 or lengths.sum() != len(ids):
        raise ValueError("lengths that are not those of the ids")
    return dense, ids, lengths, scores


def _read_vectors(folder: Path, config: ModelConfig, num_rows: int) -> np.ndarray:
    """Read the vectors of the rows. Raises ValueError, OSError."""
    path = folder / "dense_vectors.npy"
    # Writable, as PyTorch requires of memory that it shares.
    values = MappedArray(path, np.float32, 2, writable=True).values
    if values.shape != (num_rows, config.vector_inputs):
        raise ValueError(f"vectors of the shape {values.shape}")
    return values
