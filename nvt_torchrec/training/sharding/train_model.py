"""The model with its tables and its loss.

Dense layers are initialized on the CPU, so that the same seed gives the same weights on any device;
:mod:`.initial_weights` initializes the tables.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional
from torchrec.models.dlrm import SparseArch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build, stack_raw_inputs
from nvt_torchrec.models.head import Head, build_head
from nvt_torchrec.training.data.loaders import TrainBatch
from nvt_torchrec.training.sharding.batch_norm import StepRows, SyncedBatchNorm
from nvt_torchrec.training.sharding.lookup_precision import FeatureSums


@dataclasses.dataclass
class StepOutput:
    """The results of one step, detached.

    Attributes:
        loss: The scaled loss, a scalar.
        logits, labels: The logits, with the log-Q correction if it is asked for, and the labels of
            this rank's samples, [rows, labels].
        global_size: The number of samples of all ranks together.
        weights: The weights of this rank's samples [rows], in training scaled so that those of the
            global batch have a mean of 1; None if samples have none.
    """

    loss: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor
    global_size: int
    weights: torch.Tensor | None = None


class TrainModel(nn.Module):
    """A model with its loss: the mean over the global batch of the losses of samples.

    Where samples have weights it is their weighted mean, Σ w·l / Σ w. The sum of the weights of all
    ranks is one more number that the ranks exchange in each step.

    DDP and TorchRec average gradients over the ranks, as if all had equally many samples. The sum
    of a rank's losses is therefore multiplied by world size / global batch size. So the average is
    the gradient of the mean over the global batch, also if the last batch is uneven or empty on
    some ranks.
    """

    def __init__(
        self,
        model: ModelWithTables,
        world_size: int,
        device_type: str = "cpu",
        amp: bool = False,
        compiled: bool = False,
        kept_negatives: float | None = None,
        log_q_correction: bool = False,
    ) -> None:
        """Add the loss to ``model``.

        Args:
            model: The model.
            world_size: The number of ranks.
            device_type: The kind of the device that computes.
            amp: Whether the dense layers compute in bfloat16; loss and weights stay float32.
            compiled: Whether the dense layers are compiled, on GPUs with CUDA graphs.
            kept_negatives: The share of the rows with label 0 that training reads; None for all.
                In training the loss is that of the logits plus log(1 / share), which hold for the
                rows that are read. So the logits themselves hold for the whole log.
            log_q_correction: Whether the loss and all results are those of the logits plus the
                rows' log-Q correction, where there is one. These hold for rows whose items were
                drawn by popularity; the logits themselves, as a bundle computes them, for items
                that are drawn evenly (docs/negatives.md).
        """
        super().__init__()
        self.model = model
        self.losses = _Losses(getattr(model.head.module, "loss", None))
        self.world_size = world_size
        step = StepRows()
        SyncedBatchNorm.replace_in(model.head.module, step)
        self.set_rows = _SetRows(step)
        self._amp = amp
        self._corrects = log_q_correction
        self._offset = -math.log(kept_negatives or 1.0)
        self._device_type = device_type
        self._replays_graphs = compiled and self._device_type == "cuda"

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, StepOutput]:
        """Return the loss (scalar) to run backward on, and the detached outputs."""
        if self._replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.set_rows(batch.labels, batch.rows, batch.global_size)
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._amp):
            inputs = batch.dense_features, batch.sparse_features, batch.dense_vectors
            logits = self.model(*inputs)
        logits = logits[: batch.rows].float()
        if self._replays_graphs:
            logits = logits.clone()  # the next step writes to the same memory
        if self._corrects:
            logits = _add_to_rows(logits, batch.log_q_correction)
        labels = batch.labels[: batch.rows].float()
        weights = batch.weights
        if self.training:
            weights = _scale_to_mean_1(weights, batch.global_size, self.world_size)
        if weights is not None:
            weights = weights[: batch.rows]
        sampled_logits = logits
        if self.training and self._offset:
            sampled_logits = logits + self._offset
        total = self.losses(sampled_logits, labels, weights)
        loss = total * (self.world_size / batch.global_size)
        output = StepOutput(
            loss.detach(), logits.detach(), labels.detach(), batch.global_size, weights
        )
        return loss, output


# TorchRec's pipeline traces the model once, without a batch. It must not trace the branches here.
@fx.wrap
def _add_to_rows(logits: torch.Tensor, correction: torch.Tensor | None) -> torch.Tensor:
    """Return logits [rows, T] plus a correction of each row, [rows and padding]; None for none."""
    if correction is None:  # data whose items were drawn evenly
        return logits
    return logits + correction[: len(logits)].unsqueeze(1)


@fx.wrap
def _scale_to_mean_1(
    weights: torch.Tensor | None, global_size: int, world_size: int
) -> torch.Tensor | None:
    """Scale weights so that those of the global batch have a mean of 1 (collective).

    Padding rows have weight 0. If all weights of the global batch are 0, they stay 0.
    """
    if weights is None:
        return None
    total = weights.sum()
    if world_size > 1:
        dist.all_reduce(total)
    return weights * (global_size / torch.where(total > 0, total, 1.0))


class _SetRows(nn.Module):
    """Set the rows of a step; a module, so that the pipeline does not trace into it."""

    def __init__(self, step: StepRows) -> None:
        super().__init__()
        self._step = step

    def forward(self, labels: torch.Tensor, rows: int, global_size: int) -> None:
        step = self._step
        step.rows, step.padded, step.global_size = rows, len(labels), global_size


class _Losses(nn.Module):
    """The sum of the losses of samples; a module, so that the pipeline does not trace into it.

    Args:
        own: The method ``loss`` of the model's module (:mod:`models.contract`); without it the loss
            is binary cross-entropy.
    """

    def __init__(self, own: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self._own = own

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        if self._own is not None:
            # By the contract, logits and labels are [B] if there is one label.
            return self._own(logits.squeeze(-1), labels.squeeze(-1), weights).sum()
        if weights is not None:
            weights = weights.unsqueeze(1)
        return functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")


class PooledVectors(SparseArch):
    """TorchRec's ``SparseArch``, except that it does not copy the lookup's output twice.

    Args:
        embedding_bag_collection: The tables, all of one width D.
        features: The features in the order of their vectors.
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, features: list[str]
    ) -> None:
        super().__init__(embedding_bag_collection)
        self.order_vectors = _OrderVectors(features, self.D)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the features' vectors [B, F, D]."""
        return self.order_vectors(self.embedding_bag_collection(features))


class _OrderVectors(nn.Module):
    """Put the vectors of features in order.

    It is a module of its own, because TorchRec's pipeline traces modules that hold sharded tables.
    """

    def __init__(self, names: list[str], dim: int) -> None:
        super().__init__()
        self._names, self._dim = names, dim

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        if list(pooled.keys()) == self._names:
            return pooled.values().view(-1, len(self._names), self._dim)
        # A plan may change the order, and so do tables of several features.
        vectors = pooled.to_dict()
        return torch.stack([vectors[name] for name in self._names], dim=1)


class _HeadInputs(nn.Module):
    """Makes the inputs of the head; a module of its own, as :class:`_OrderVectors`."""

    def __init__(self, config: ModelConfig, columns: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._columns = columns
        self._num_categorical = len(config.categorical)
        history_columns = list(config.features)[self._num_categorical :]
        #: For each column of the histories whether the module gets its events one by one, and the
        #: number of its keys.
        self._is_list = [name in config.lists for name in history_columns]
        self._num_keys = [config.max_events if is_list else 1 for is_list in self._is_list]

    def forward(
        self, features: KeyedJaggedTensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the vectors of the features, with histories as means, and further inputs.

        Ids and lengths are int64 [B, columns]; padding rows, which have no ids, have 0.
        """

        def read_ids(name: str) -> torch.Tensor:
            values = features[name].values()
            return functional.pad(values, (0, features.stride() - len(values)))

        def read_lengths(name: str) -> torch.Tensor:
            return features[name].lengths()

        more = stack_raw_inputs(self._columns, ids=read_ids, lengths=read_lengths)
        if not self._is_list:
            return vectors, more
        # The first part are the categorical columns; each of the others is a column of a history.
        sizes = [self._num_categorical, *self._num_keys]
        parts = list(vectors.split(sizes, 1))
        counts = features.lengths().view(vectors.shape[1], -1).T.split(sizes, 1)
        lists = [index for index, is_list in enumerate(self._is_list, start=1) if is_list]
        if lists:
            more["lists"] = torch.stack([parts[index] for index in lists], 1)
            more["present"] = torch.stack([counts[index] > 0 for index in lists], 1)
        # Tables sum, because a multi-hot column, which is summed, may share the table of a history.
        for index in range(1, len(parts)):
            sums = parts[index].sum(1, keepdim=True)
            num_events = counts[index].sum(1).clamp(min=1)
            parts[index] = sums / num_events.view(-1, 1, 1)
        return torch.cat(parts, 1), more


class LookupL2(nn.Module):
    """L2 regularization of sharded tables, in the gradients of the looked-up vectors.

    The penalty λ/2 · w² of a table's row w has the gradient λ w. Adding it in each step would touch
    all rows; here it is added where a row is looked up. A row of the table that is looked up p
    times by a row of the log on average, and so B p times in a step of B rows, gets λ w / (B p) at
    each lookup: on average that is λ w in a step. Lists and histories add no penalty.

    It is a module, so that TorchRec's pipeline does not trace into it.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        super().__init__()
        self._columns = columns
        self._factors: dict[int, torch.Tensor] = {}

    def set_factors(self, factors: dict[str, torch.Tensor]) -> None:
        """Set the factor λ / (B p) of each id, float32 [rows], by the name of the column."""
        self._factors = {self._columns.index(name): value for name, value in factors.items()}

    def forward(self, features: KeyedJaggedTensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the vectors [B, F, D], with the penalty added to their gradient."""
        if not (self._factors and self.training and vectors.requires_grad):
            return vectors
        penalty = torch.zeros_like(vectors)
        for index, factors in self._factors.items():
            ids = features[self._columns[index]].values().long()
            # Padding rows have no id.
            padding = 0, 0, 0, len(vectors) - len(ids)
            row_factors = functional.pad(factors[ids].unsqueeze(1), padding)
            penalty[:, index] = vectors.detach()[:, index] * row_factors
        vectors.register_hook(lambda gradient: gradient + penalty)
        return vectors


class ModelWithTables(nn.Module):
    """The lookup of TorchRec's tables, and the head that follows it."""

    def __init__(self, collection: EmbeddingBagCollection, head: Head, config: ModelConfig) -> None:
        super().__init__()
        self.sparse_arch = PooledVectors(collection, [*config.lookups])
        self.head = head
        self.inputs = None
        if head.raw_columns or config.histories:
            self.inputs = _HeadInputs(config, head.raw_columns)
        self.lookup_l2 = LookupL2(config.categorical)
        self.feature_sums = FeatureSums(config)

    def forward(
        self,
        dense_features: torch.Tensor,
        sparse_features: KeyedJaggedTensor,
        dense_vectors: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits [B, T] of a batch; the first arguments are those of TorchRec's DLRM.

        The keys of ``sparse_features`` are ``ModelConfig.lookups``. ``dense_vectors`` are the
        vectors of the data, [B, ``ModelConfig.vector_inputs``]; None if the model takes none.
        """
        vectors = self.sparse_arch(sparse_features)
        vectors = self.lookup_l2(sparse_features, vectors)
        more = None
        if self.inputs is not None:
            vectors, more = self.inputs(sparse_features, vectors)
        feature_sums = self.feature_sums(sparse_features)
        return self.head(dense_features, vectors, more, dense_vectors, feature_sums)


def build_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    tables: str = "fp32",
    build: Build | None = None,
) -> ModelWithTables:
    """Build a model with initialized dense layers, and tables on the meta device.

    Sharding allocates the tables, and :func:`.initial_weights.fill_table` initializes them.

    Args:
        config: The model.
        seed: The seed of the initial weights.
        device: The device of the dense layers; with "meta" nothing is allocated.
        tables: The precision of the tables, "fp32" or "fp16".
        build: The function ``build`` of an own model.
    """
    features = config.features_of_tables
    configs = []
    for table, rows in config.tables.items():
        configs.append(
            EmbeddingBagConfig(
                name=table,
                embedding_dim=config.embedding_dim,
                num_embeddings=rows,
                feature_names=features[table],
                data_type=DataType(tables.upper()),
            )
        )
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    head = build_head(config, seed=seed, device=device, build=build)
    return ModelWithTables(collection, head, config)
