"""Measure the means and scales of the data's vectors, with which a model standardizes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.baselines.row_sample import make_single_group
from nvt_torchrec.training.data.loaders import make_sample
from nvt_torchrec.training.settings.train_settings import TrainSettings

#: The number of batches of training rows to read.
_BATCHES = 8
#: The number of rows of a batch; fewer if vectors are wide.
_BATCH_ROWS = 8192
#: A smaller variance, relative to the mean square, counts as rounding errors.
_MIN_VARIANCE = 1e-10
#: The smallest scale, with which quotients stay far from the limits of float32.
_MIN_SCALE = 1e-30


@dataclasses.dataclass(frozen=True)
class VectorStatistics:
    """The constants that standardize vectors (:class:`models.dense_vectors.DenseVectors`).

    Attributes:
        center: The mean of each value over the rows that have the vector, float32 [all inputs]; 0
            for indicators.
        scale: For each vector, the root mean square of its centered values, float32 [vectors]; 1
            if all vectors are equal.
    """

    center: np.ndarray
    scale: np.ndarray


def measure_vectors(
    settings: TrainSettings, config: ModelConfig, files: tuple[Path, ...] | None
) -> VectorStatistics | None:
    """Measure the vectors of a random sample of training rows; None if the model takes no vectors.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        files: The files of the training set that the run reads; None for all.
    """
    if not config.dense_vectors:
        return None
    inputs = config.vector_inputs
    without_events = dataclasses.replace(config, histories=(), max_events=0, sequences=())
    sums = np.zeros(inputs)
    squares = np.zeros(inputs)
    group = make_single_group()
    for batch in make_sample(
        settings, without_events, "train", group, _BATCHES, _BATCH_ROWS, files
    ):
        assert batch.dense_vectors is not None
        values = batch.dense_vectors.numpy()
        sums += values.sum(0, dtype=np.float64)
        squares += np.einsum("ij,ij->j", values, values, dtype=np.float64)
    center = np.zeros(inputs, np.float32)
    scale = np.ones(len(config.dense_vectors), np.float32)
    for i, (begin, end) in enumerate(config.vector_bounds.values()):
        count = sums[end - 1]  # the sum of the indicators
        if not count:
            continue
        mean = sums[begin : end - 1] / count
        mean_square = np.mean(squares[begin : end - 1]) / count
        variance = mean_square - np.mean(mean**2)
        center[begin : end - 1] = mean
        # If all vectors are equal, the variance consists of rounding errors, and the scale stays 1.
        if variance > _MIN_VARIANCE * mean_square and variance > _MIN_SCALE**2:
            scale[i] = np.sqrt(variance)
    return VectorStatistics(center, scale)
