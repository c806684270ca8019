"""Rows that a bundle carries with their scores, by which it is tried before it is served.

They are encoded rows: ids drawn from the tables, and dense values from a normal distribution, which
are what the ETL writes. Each categorical column has one id, each history up to three events.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.rows import Ids
from nvt_torchrec.inference.model.scoring import ServingModel

FOLDER = "reference"
_NUM_ROWS, _MAX_EVENTS = 64, 3
#: By how much a probability may differ on another machine, or with other threads.
_TOLERANCE = 1e-4


def make_rows(model: ServingModel) -> dict[str, np.ndarray]:
    """Return rows and their scores.

    Returns:
        ``dense`` float32 [dense columns, n]; ``ids`` int64 [all ids], column by column; ``lengths``
        int64 [features, n]; ``scores`` float32 [n, labels].
    """
    config, generator = model.config, np.random.default_rng(0)
    sizes = dict(zip(config.categorical, config.num_embeddings, strict=True))
    dense = generator.normal(size=(len(config.dense), _NUM_ROWS)).astype(np.float32)
    lengths = np.ones((len(config.features), _NUM_ROWS), np.int64)
    histories = lengths[len(config.categorical) :]
    max_events = min(_MAX_EVENTS, config.max_events)
    histories[:] = generator.integers(0, max_events + 1, histories.shape)
    columns = [
        generator.integers(0, sizes[column], lengths[j].sum())
        for j, column in enumerate(config.features.values())
    ]
    ids = Ids.from_lengths(columns, lengths)
    scores = score(model, dense, ids)
    return {"dense": dense, "ids": np.concatenate(columns), "lengths": lengths, "scores": scores}


@torch.inference_mode()
def score(model: ServingModel, dense: np.ndarray, ids: Ids) -> np.ndarray:
    """Return probabilities, float32 [n, labels]."""
    return torch.sigmoid(model.logits(dense, model.lookup(ids), ids)).cpu().numpy()


def check_scores(bundle: Path, model: ServingModel) -> None:
    """Compare the scores of a bundle's rows with those that it gave when it was made.

    Raises:
        BadInputError: They differ, or the files are damaged.
    """
    remedy = "make the bundle again from the checkpoint: python -m inference bundle"
    try:
        dense, ids, lengths, expected = (
            np.load(bundle / FOLDER / f"{name}.npy", allow_pickle=False)
            for name in ("dense", "ids", "lengths", "scores")
        )
        columns = np.split(ids, lengths.sum(1).cumsum()[:-1])
        scores = score(model, dense, Ids.from_lengths(columns, lengths))
        difference = float(np.abs(scores - expected).max())
    except (OSError, ValueError, IndexError, RuntimeError) as error:
        raise BadInputError(f"{bundle / FOLDER}: damaged: {error}", remedy) from error
    if not difference <= _TOLERANCE:
        raise BadInputError(
            f"{bundle}: the scores of its reference rows differ by {difference:g} from those that "
            "it gave when it was made",
            remedy,
        )
