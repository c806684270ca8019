"""Scores the long way: ``Workflow.transform``, a KeyedJaggedTensor, TorchRec's DLRM."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import torch

from benchmarks.inference import to_tensors
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.inference.model.scoring import JoinedTable, ServingModel
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.interactions import DotProducts, LowRankCross
from nvt_torchrec.models.registry import DEFAULT_MODEL, MODELS
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.train_model import ModelWithTables
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.store import load
from nvt_torchrec.workflows.workflow_frames import to_frame
from tests.training.runs import with_tables
from tests.training.shapes import dlrm

INTERACTIONS = (DotProducts(), LowRankCross(dcn_num_layers=2, dcn_low_rank_dim=3))
#: The settings of models besides those of their layers.
SETTINGS = {"dcn_v2": {"dcn_num_layers": 2, "dcn_low_rank_dim": 3}}
#: The other models of the registry. Those that attend to events need a spec with histories, which
#: the random ones lack: tests/inference/test_histories.py serves and exports them.
OTHERS = [name for name, known in MODELS.items() if name != DEFAULT_MODEL and not known.attends]


def make_scorer(schema, seed: int) -> tuple[ModelWithTables, ModelConfig]:
    """A model with random weights for a workflow's output; the seed also picks its kind.

    Half of the seeds give a DLRM, the others one of ``OTHERS`` each, in turn.
    """
    columns = schema.dense, schema.categorical, schema.table_sizes
    bottom = (8, 4) if schema.dense else ()
    if len(schema.categorical) + len(bottom) < 2:
        seed = 1  # of a single vector there are no products
    first_order = (0.0, 0.7)[seed % 2]
    config = dlrm(*columns, 4, bottom, (8, 4, 1), first_order, INTERACTIONS[seed % 3 % 2])
    if seed % 6 > 2:
        name = OTHERS[seed // 6 % len(OTHERS)]
        settings = {"over_arch_layer_sizes": [8, 4, 1], **SETTINGS.get(name, {})}
        config = dataclasses.replace(config, model=name, settings=settings)
    config = dataclasses.replace(
        config,
        labels=schema.labels[:1],
        dense_bins=5 * (seed % 2),
        vocabularies=schema.vocabularies,
    )
    model = with_tables(config, seed)
    if model.head.piecewise is not None:
        edges = torch.linspace(-1, 2, 6).expand_as(model.head.piecewise.edges)
        model.head.piecewise.edges.copy_(edges)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, rows in config.tables.items():
        fill_table(bags[name].weight.detach(), name, rows, 4, seed, (0, 0))
    if model.head.first_order is not None:
        for parameter in model.head.first_order.parameters():
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(seed))
    return model, config


def to_serve(model: ModelWithTables, config: ModelConfig) -> ServingModel:
    """The same weights, arranged for scoring."""
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    rows = torch.cat([bags[name].weight for name in config.tables])
    return ServingModel.make(JoinedTable(rows), config, model.head)


def scores(scorer: ModelWithTables, workflow: Path, rows: RawRows) -> np.ndarray:
    """Probabilities float32 [n, labels]."""
    description = inspect(workflow)
    schema = description.table_schema
    genuine = load(workflow, label=False, raw=False)
    rows.labels = rows.labels[:0]
    frame = genuine.transform(to_frame(rows, description.spec))
    dense, sparse = to_tensors(frame, schema)
    return torch.sigmoid(scorer(dense, sparse)).numpy()
