"""What the vectors of an own model are multiplied by, found from the module itself.

Tables learn by steps of one size, whatever is computed from them, and begin small. A module that
multiplies vectors at once, as a factorization machine, learns from such steps, and diverges if they
are four times as large; layers that begin as ``torch.nn.Linear`` does hardly change the logit by
them. So the module is asked, with its initial weights: how far do products of vectors, of the size
that learned ones have, move its logits?

Their part of a logit is what stays when all vectors change their signs. The linear part does no
harm: its gradient stays the same while vectors grow, that of products grows with them.
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
#: products of these may make at most: DeepFM on the demo's log is best with 1.0, and diverges with
#: 60; on ``crossed`` of ``benchmarks.regression`` it is best with 0.4, and loses .002 of AUROC with
#: 1.5 and .009 with 6. Cross networks and others gain up to there.
_LEARNED, _MAX_CHANGE = 0.2, 1.25
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
        log.info("--vector_scale %g, found from how far products of vectors move the logits", scale)
    return dataclasses.replace(config, vector_scale=scale)


def find_scale(config: ModelConfig, build: Build, seed: int) -> float:
    """Return the largest scale at which products of learned vectors move the logits by little.

    It is a function of the module's initial weights, and so of the seed.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = build_head(config, seed=seed, build=build).module.eval()
        inputs = _make_inputs(module, config.columns, config.first_order_width, seed)
        found = _SCALES[0]
        for scale in _SCALES:
            if not _measure_products(module, inputs, scale) <= _MAX_CHANGE:  # nor if not finite
                break
            found = scale
    return found


def _make_inputs(
    module: nn.Module, columns: Columns, first_order_width: int, seed: int
) -> dict[str, torch.Tensor]:
    """Return random rows, by the names of the arguments of ``forward``."""
    generator = torch.Generator().manual_seed(seed)

    def draw_vectors(*shape: int) -> torch.Tensor:
        values = _LEARNED * torch.randn(_ROWS, *shape, columns.embedding_dim, generator=generator)
        values[..., :first_order_width] = 0  # the module does not see them
        return values

    inputs = {
        "dense": torch.randn(_ROWS, len(columns.dense), generator=generator),
        "vectors": draw_vectors(len(columns.vectors)),
    }
    for argument, names in find_raw_columns(module).items():
        inputs[argument] = torch.full((_ROWS, len(names)), int(argument == "lengths"))
    if columns.lists:
        inputs["lists"] = draw_vectors(len(columns.lists), columns.max_events)
        inputs["present"] = torch.ones(inputs["lists"].shape[:3], dtype=torch.bool)
    return inputs


def _measure_products(module: nn.Module, inputs: dict[str, torch.Tensor], scale: float) -> float:
    """Return the standard deviation over rows of what products of vectors add to the logit.

    Of several labels it is that of the one for which it is largest.
    """

    def logits(factor: float) -> torch.Tensor:
        scaled = dict(inputs)
        for name in scaled.keys() & {"vectors", "lists"}:
            scaled[name] = scaled[name] * factor
        dense, vectors = scaled.pop("dense"), scaled.pop("vectors")
        return module(dense, vectors, **scaled).reshape(_ROWS, -1)

    products = (logits(scale) + logits(-scale)) / 2 - logits(0.0)
    return float(products.std(0).max())
