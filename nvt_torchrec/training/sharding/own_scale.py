"""What the vectors of an own model are multiplied by, found from the module itself.

Tables learn by steps of one size, whatever is computed from them, and begin small. A module that
multiplies vectors at once, as a factorization machine, learns from such steps, and diverges if they
are four times as large; layers that begin as ``torch.nn.Linear`` does hardly change the logit by
them. So the module is asked, with its initial weights: how far do vectors of the size that learned
ones have move its logits?
"""

from __future__ import annotations

import dataclasses
import logging

import torch
from torch import nn

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build, Columns, find_raw_columns
from nvt_torchrec.models.head import build_head
from nvt_torchrec.training.launch.distributed import Group, call_on_rank_0
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: The scales that may be chosen. Layers that hardly react would else get any.
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: The standard deviation of the coordinates of learned vectors, about, and that of the logits which
#: these may make at most. Found by training on the logs ``crossed`` and ``demo``.
_LEARNED, _MOST_CHANGE = 0.2, 1.0
_ROWS = 256


def choose_scale(
    config: ModelConfig, settings: TrainSettings, build: Build, group: Group
) -> ModelConfig:
    """Choose ``vector_scale`` of an own model, if it is not given, nor a checkpoint's (collective).

    It is 1 without the first-order term, which would stay as it is, and with SGD, whose steps grow
    with the square of the scale.

    Args:
        config: The model.
        settings: Those of the run, with what its checkpoint says.
        build: The function that makes the module.
        group: This rank.
    """
    adaptive = OPTIMIZERS[settings.table_optimizer].ADAPTIVE
    if settings.vector_scale is not None or not (adaptive and config.first_order):
        return config
    scale = call_on_rank_0(group, find_scale, config, build, settings.seed)
    if group.rank == 0:
        log.info("--vector_scale %g, found from how far vectors move the logits", scale)
    return dataclasses.replace(config, vector_scale=scale)


def find_scale(config: ModelConfig, build: Build, seed: int) -> float:
    """Return the largest scale at which learned vectors move the logits by no more than 1.

    It is a function of the module's initial weights, and so of the seed.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = build_head(config, seed=seed, build=build).module.eval()
        found = _SCALES[0]
        for scale in _SCALES:
            change = _measure_change(module, config.columns, config.first_order_width, scale, seed)
            if not change <= _MOST_CHANGE:  # nor if it is not finite
                break
            found = scale
    return found


def _measure_change(
    module: nn.Module, columns: Columns, first_order_width: int, scale: float, seed: int
) -> float:
    """Return the standard deviation over rows of what vectors add to the logit; of the label for
    which it is largest."""
    generator = torch.Generator().manual_seed(seed)
    dense = torch.randn(_ROWS, len(columns.dense), generator=generator)
    shape = len(columns.vectors), columns.embedding_dim
    vectors = torch.randn(_ROWS, *shape, generator=generator) * (_LEARNED * scale)
    vectors[..., :first_order_width] = 0  # the module does not see them
    inputs = {}
    for argument, names in find_raw_columns(module).items():
        value = 1 if argument == "lengths" else 0
        inputs[argument] = torch.full((_ROWS, len(names)), value)
    if columns.lists:
        shape = len(columns.lists), columns.max_events, columns.embedding_dim
        lists = torch.randn(_ROWS, *shape, generator=generator) * (_LEARNED * scale)
        lists[..., :first_order_width] = 0
        inputs["lists"], inputs["present"] = lists, torch.ones(lists.shape[:3], dtype=torch.bool)
    logits = module(dense, vectors, **inputs)
    if columns.lists:
        inputs["lists"] = torch.zeros_like(lists)
    change = logits - module(dense, torch.zeros_like(vectors), **inputs)
    return float(change.reshape(_ROWS, -1).std(0).max())
