"""A DLRM in plain PyTorch, in one process, trained step by step: what the trainer must equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import build_head
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.baselines.baselines import compute_baselines
from nvt_torchrec.training.baselines.regression import Regression
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.model_config import model_config
from tests.training.runs import MODEL


class Reference(nn.Module):
    """Naumov et al. 2019 with nn.Embedding; initial weights as the trainer's for this seed.

    Columns of one vocabulary, and their histories, share a table; each feature has linear
    weights of its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        regressions: dict[str, Regression],
        seed: int,
        sparse: bool = False,
    ) -> None:
        super().__init__()
        module = build_head(config, seed=seed).module
        layers = ("dense_arch_layer_sizes", "over_arch_layer_sizes")
        bottom, top = (config.settings[name] for name in layers)
        self.dense = nn.Sequential(*_layers(len(config.dense), bottom))
        self.dense.append(nn.ReLU())
        self.places = config.first_order_coordinates.values()
        scale = config.max_events**0.5
        self.factors = [1.0 if name == own else scale for name, own in config.features.items()]
        tables = [*config.tables]
        self.table_indices = [
            tables.index(config.table_by_column[own]) for own in config.features.values()
        ]
        pairs = len(self.table_indices) * (len(self.table_indices) + 1) // 2
        self.over = nn.Sequential(*_layers(config.embedding_dim + pairs, top))
        for mine, theirs in ((self.dense, module.bottom), (self.over, module.top)):
            for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
                a.data.copy_(b.data)
        self.first_order = config.first_order
        if self.first_order:
            self.linear = nn.Linear(len(config.dense), len(config.labels))
            for number, regression in enumerate(regressions.values()):
                self.linear.weight.data[number] = torch.from_numpy(regression.dense)
                self.linear.bias.data[number] = regression.bias
        self.tables, self.labels = nn.ModuleList(), len(config.labels)
        self.sparse, self.width = sparse, config.first_order_width
        for number, (name, rows) in enumerate(config.tables.items()):
            self.tables.append(nn.Embedding(rows, config.embedding_dim, sparse=sparse))
            weight = self.tables[-1].weight.data
            fill_table(weight, name, rows, config.embedding_dim, seed, (0, 0))
            if self.first_order:
                weight[:, : self.width] = 0
                for feature, (own, place) in enumerate(
                    zip(self.table_indices, self.places, strict=True)
                ):
                    for label, regression in enumerate(regressions.values()):
                        ids, values = regression.ids[feature], regression.weights[feature]
                        if own == number:
                            ids, values = torch.from_numpy(ids), torch.from_numpy(values).float()
                            weight[ids, place + label] = values
                weight[:, : self.width] /= self.first_order

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        embedded = [
            nn.functional.embedding_bag(
                lists.values().long(), self.tables[table].weight, lists.offsets()[:-1].long(),
                mode="sum" if factor == 1 else "mean", sparse=self.sparse,
            )
            for table, factor, lists in zip(
                self.table_indices, self.factors, features.to_dict().values(), strict=True
            )
        ]  # fmt: skip
        term = 0.0
        if self.first_order:
            terms = zip(embedded, self.places, strict=True)
            of_ids = sum(vector[:, place : place + self.labels] for vector, place in terms)
            term = self.first_order * of_ids + self.linear(dense)
            left = self.width
            embedded = [nn.functional.pad(vector[:, left:], (left, 0)) for vector in embedded]
        embedded = [v * k for v, k in zip(embedded, self.factors, strict=True)]
        dense = self.dense(dense)
        vectors = torch.stack([dense, *embedded], 1)
        products = vectors @ vectors.transpose(1, 2)
        upper = torch.triu_indices(*products.shape[1:], offset=1)
        logits = self.over(torch.cat([dense, products[:, upper[0], upper[1]]], 1))
        return (logits + term).squeeze(1)


def _layers(width: int, sizes: tuple[int, ...]) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return layers[:-1]


class RowWiseAdagrad:
    """One moment per row: m += mean(g²) over the row, w -= lr · g / (√m + eps), eps = 1e-8."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.moments = [(weight, torch.zeros(len(weight), 1)) for weight in weights]

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for weight, moment in self.moments:
            moment += weight.grad.square().mean(1, keepdim=True)
            weight -= rate * weight.grad / (moment.sqrt() + 1e-8)
            weight.grad = None


class LazyAdam:
    """Adam on the rows of a batch (sparse gradients), bias corrected by the steps over all rows.

    torch.optim.SparseAdam with the eps of torch.optim.Adam, which it adds before the correction.
    """

    def __init__(self, weights: list[nn.Parameter]) -> None:
        self.weights = weights
        self.moments = [(torch.zeros_like(w.data), torch.zeros_like(w.data)) for w in weights]
        self.steps = 0

    @torch.no_grad()
    def step(self, rate: float) -> None:
        self.steps += 1
        for weight, (first, second) in zip(self.weights, self.moments, strict=True):
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            first[rows] = 0.9 * first[rows] + 0.1 * values
            second[rows] = 0.999 * second[rows] + 0.001 * values**2
            mean = first[rows] / (1 - 0.9**self.steps)
            root = (second[rows] / (1 - 0.999**self.steps)).sqrt()
            weight[rows] -= rate * mean / (root + 1e-8)
            weight.grad = None


def reference_losses(
    data: Path, *flags: str, rate: Callable[[int], float] | None = None
) -> list[float]:
    """Return the loss of every step that a run with these flags trains in batches of 32 rows.

    Args:
        data: The splits.
        flags: Those of the trainer; its batch size is not looked at.
        rate: A function that returns a step's learning rate, where ``--learning_rate`` is not it.
    """
    settings = parse_settings([*MODEL, *flags])
    optimizer = settings.table_optimizer
    config = model_config(settings, TableSchema.read(data))
    settings = dataclasses.replace(settings, binary_path=str(data))
    with process_group():
        start, _ = compute_baselines(settings, config, None)
    model = Reference(config, start.regressions, settings.seed, sparse=optimizer == "adam")
    dense = [*model.dense.parameters(), *model.over.parameters()]
    dense += model.linear.parameters() if model.first_order else []
    tables = [table.weight for table in model.tables]
    eps = {"lr": 1.0, "eps": 1e-8}
    by_hand: RowWiseAdagrad | LazyAdam | None = None
    if optimizer == "sgd":
        step = torch.optim.SGD(dense + tables, lr=1.0)
    elif optimizer == "adagrad":
        step = torch.optim.Adagrad(dense + tables, **eps)
    elif optimizer == "rowwise_adagrad":
        step, by_hand = torch.optim.Adagrad(dense, **eps), RowWiseAdagrad(tables)
    else:
        step, by_hand = torch.optim.Adam(dense, **eps), LazyAdam(tables)
    options = {"label": config.labels, "max_events": config.max_events}
    loader = KJTLoader(data / "train", 32, device="cpu", **options)
    losses = []
    for _ in range(settings.epochs):
        for batch in loader:
            lr = rate(len(losses)) if rate else settings.learning_rate
            each = nn.functional.binary_cross_entropy_with_logits(
                model(batch.dense_features, batch.sparse_features).view_as(batch.labels),
                batch.labels,
                reduction="none",
            ).sum(1)
            loss = each.mean()
            if batch.weights is not None:
                loss = (batch.weights * each).sum() / batch.weights.sum().clamp(min=1e-30)
            losses.append(loss.item())
            loss.backward()
            step.param_groups[0]["lr"] = lr
            step.step()
            step.zero_grad()
            if by_hand:
                by_hand.step(lr)
    return losses
