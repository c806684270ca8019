"""Find the vector scale of a custom model by evaluating its module.

Embeddings begin small, and an adaptive optimizer moves them by steps of one size, whatever module
uses them. A module that multiplies vectors directly, such as a factorization machine, learns well
from such steps, and diverges if they are four times as large. Through layers initialized like
``torch.nn.Linear`` the same steps hardly change the logit. So the module is evaluated with its
initial weights, on random vectors of the size of learned ones, to measure how far products of
vectors move its logits.

The contribution of products is the part of a logit that stays when all vectors change their sign.
The linear part does no harm: its gradient stays the same while vectors grow; the gradient of
products grows with the vectors.
"""

from __future__ import annotations

import dataclasses
import logging
import math

import torch
from torch import nn

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import (
    Build,
    Columns,
    find_raw_columns,
    find_vector_columns,
)
from nvt_torchrec.models.dense_vectors import draw_random_inputs, locate_vectors, take_inputs
from nvt_torchrec.models.head import build_head
from nvt_torchrec.training.launch.distributed import Group, call_on_rank_0
from nvt_torchrec.training.settings.optimizers import OPTIMIZERS
from nvt_torchrec.training.settings.train_settings import TrainSettings

log = logging.getLogger(__name__)

#: The candidate scales. The upper bound matters for modules that hardly react to their vectors.
_SCALES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
#: The approximate standard deviation of the coordinates of learned vectors.
_LEARNED_DEVIATION = 0.2
#: The largest standard deviation of the logits that products of such vectors may cause. DeepFM on
#: the demo's log is best with 1.0, and diverges with 60; on ``crossed`` of
#: ``benchmarks.regression`` it is best with 0.4, and loses 0.002 of AUROC with 1.5 and 0.009 with
#: 6. Cross networks and others improve up to this value.
_MAX_CHANGE = 1.25
#: The number of random rows that the module is evaluated on.
_ROWS = 256


def choose_scale(
    config: ModelConfig, settings: TrainSettings, build: Build, group: Group
) -> ModelConfig:
    """Choose a custom model's ``vector_scale``, unless the user or a checkpoint gives it.

    This is collective. The scale stays 1 without a linear term, because only models with one scale
    their vectors, and with SGD, whose steps grow with the square of the scale.

    Args:
        config: The model.
        settings: The settings of the run, including those of its checkpoint.
        build: The function that builds the module.
        group: This rank.

    Returns:
        ``config`` with the chosen scale.
    """
    if settings.vector_scale is not None or not config.first_order:
        return config
    if not OPTIMIZERS[settings.table_optimizer].ADAPTIVE:
        return config
    scale = call_on_rank_0(group, find_scale, config, build, settings.seed)
    if group.rank == 0:
        log.info("--vector_scale %g, chosen by how far products of vectors move the logits", scale)
    return dataclasses.replace(config, vector_scale=scale)


def find_scale(config: ModelConfig, build: Build, seed: int) -> float:
    """Return the largest scale at which products of learned vectors move the logits only a little.

    The result depends on the module's initial weights, and so on the seed.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = build_head(config, seed=seed, build=build).module.eval()
        inputs = _make_inputs(module, config.columns, config.first_order_width, seed)
        found = _SCALES[0]
        for scale in _SCALES:
            change = _measure_products(module, inputs, scale)
            if not math.isfinite(change) or change > _MAX_CHANGE:
                break
            found = scale
    return found


def _make_inputs(
    module: nn.Module, columns: Columns, first_order_width: int, seed: int
) -> dict[str, torch.Tensor]:
    """Return random inputs by the argument names of ``forward``."""
    generator = torch.Generator().manual_seed(seed)

    def draw_vectors(*shape: int) -> torch.Tensor:
        values = torch.randn(_ROWS, *shape, columns.embedding_dim, generator=generator)
        values *= _LEARNED_DEVIATION
        # These coordinates are the weights of the linear term, which the module does not see.
        values[..., :first_order_width] = 0
        return values

    inputs = {
        "dense": torch.randn(_ROWS, len(columns.dense), generator=generator),
        "vectors": draw_vectors(len(columns.vectors)),
    }
    for argument, names in find_raw_columns(module).items():
        value = 1 if argument == "lengths" else 0
        inputs[argument] = torch.full((_ROWS, len(names)), value)
    given = locate_vectors(columns, find_vector_columns(module))
    if given:
        inputs["dense_vectors"] = take_inputs(draw_random_inputs(columns, _ROWS, generator), given)
    if columns.lists:
        inputs["lists"] = draw_vectors(len(columns.lists), columns.max_events)
        inputs["present"] = torch.ones(inputs["lists"].shape[:3], dtype=torch.bool)
    return inputs


def _measure_products(module: nn.Module, inputs: dict[str, torch.Tensor], scale: float) -> float:
    """Return the standard deviation, over rows, of the contribution of products to the logit.

    With several labels it is the largest one.
    """

    def compute_logits(factor: float) -> torch.Tensor:
        scaled = dict(inputs)
        for name in ("vectors", "lists"):
            if name in scaled:
                scaled[name] = scaled[name] * factor
        dense = scaled.pop("dense")
        vectors = scaled.pop("vectors")
        return module(dense, vectors, **scaled).reshape(_ROWS, -1)

    # The terms that change their sign with the vectors cancel out.
    products = (compute_logits(scale) + compute_logits(-scale)) / 2 - compute_logits(0.0)
    return float(products.std(0).max())
