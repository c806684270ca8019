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
        logits: The logits of this rank's samples [rows, T] for T labels, including the log-Q
            correction if it is requested.
        labels: The labels of this rank's samples, float32 [rows, T].
        global_size: The number of samples of all ranks together.
        weights: The weights of this rank's samples [rows]; in training they are scaled to a mean
            of 1 over the global batch. None if the samples have no weights.
    """

    loss: torch.Tensor
    logits: torch.Tensor
    labels: torch.Tensor
    global_size: int
    weights: torch.Tensor | None = None


class TrainModel(nn.Module):
    """A model with its loss: the mean loss of the samples of the global batch.

    If samples have weights, the loss is the weighted mean Σ w·l / Σ w; the ranks then exchange the
    sum of the weights in each step.

    DDP and TorchRec average gradients over the ranks as if all ranks had the same number of
    samples. So the sum of a rank's losses is multiplied by world size / global batch size. Then the
    averaged gradient is that of the global mean, even if the last batch has fewer samples, or none,
    on some ranks.
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
            device_type: The type of the computing device, "cuda" or "cpu".
            amp: Whether the dense layers compute in bfloat16; loss and weights stay float32.
            compiled: Whether the dense layers are compiled (on GPUs with CUDA graphs).
            kept_negatives: The share of the rows with label 0 that training reads; None for all.
                The training loss adds log(1 / share) to the logits, because clicks are more
                frequent among the rows that are read. So the logits themselves fit the whole log.
            log_q_correction: Whether to add the rows' log-Q correction, if the data have one, to
                the logits before the loss and in the results. The sum fits rows whose items were
                drawn by popularity; the logits themselves, which a bundle computes, fit items that
                are drawn evenly (docs/negatives.md).
        """
        super().__init__()
        self.model = model
        self.losses = _Losses(getattr(model.head.module, "loss", None))
        self.world_size = world_size
        step = StepRows()
        SyncedBatchNorm.replace_in(model.head.module, step)
        self.set_rows = _SetRows(step)
        self._amp = amp
        self._corrects_log_q = log_q_correction
        self._undersampling_offset = -math.log(kept_negatives or 1.0)
        self._device_type = device_type
        self._replays_graphs = compiled and device_type == "cuda"

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, StepOutput]:
        """Return the loss (a scalar) to differentiate, and the detached outputs."""
        if self._replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.set_rows(batch.labels, batch.rows, batch.global_size)
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._amp):
            logits = self.model(batch.dense_features, batch.sparse_features, batch.dense_vectors)
        logits = logits[: batch.rows].float()
        if self._replays_graphs:
            logits = logits.clone()  # the next step overwrites the graph's output
        if self._corrects_log_q:
            logits = _add_to_rows(logits, batch.log_q_correction)
        labels = batch.labels[: batch.rows].float()
        weights = batch.weights
        if self.training:
            weights = _scale_to_mean_1(weights, batch.global_size, self.world_size)
        if weights is not None:
            weights = weights[: batch.rows]
        sampled_logits = logits
        if self.training and self._undersampling_offset:
            sampled_logits = logits + self._undersampling_offset
        total = self.losses(sampled_logits, labels, weights)
        loss = total * (self.world_size / batch.global_size)
        output = StepOutput(
            loss.detach(), logits.detach(), labels.detach(), batch.global_size, weights
        )
        return loss, output


# TorchRec's pipeline traces the model once, without a batch. It must not trace the branches here.
@fx.wrap
def _add_to_rows(logits: torch.Tensor, correction: torch.Tensor | None) -> torch.Tensor:
    """Add a correction [rows + padding] to the logits [rows, T] of each row, if it is not None."""
    if correction is None:  # the items of these data were drawn evenly
        return logits
    return logits + correction[: len(logits)].unsqueeze(1)


@fx.wrap
def _scale_to_mean_1(
    weights: torch.Tensor | None, global_size: int, world_size: int
) -> torch.Tensor | None:
    """Scale weights to a mean of 1 over the samples of the global batch (collective).

    Padding rows have weight 0. If all weights of the global batch are 0, they stay 0.
    """
    if weights is None:
        return None
    total = weights.sum()
    if world_size > 1:
        dist.all_reduce(total)
    return weights * (global_size / torch.where(total > 0, total, 1.0))


class _SetRows(nn.Module):
    """Set the row counts of a step.

    It is a module, so that TorchRec's pipeline does not trace into it.
    """

    def __init__(self, step: StepRows) -> None:
        super().__init__()
        self._step = step

    def forward(self, labels: torch.Tensor, rows: int, global_size: int) -> None:
        self._step.rows = rows
        self._step.padded = len(labels)
        self._step.global_size = global_size


class _Losses(nn.Module):
    """Compute the sum of the losses of samples.

    It is a module, so that TorchRec's pipeline does not trace into it.

    Args:
        own: The ``loss`` method of the model's module (:mod:`models.contract`); None for binary
            cross-entropy.
    """

    def __init__(self, own: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self._own = own

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        if self._own is not None:
            # The contract: logits and labels are [B] with one label, [B, T] with several.
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

    It is a separate module, because TorchRec's pipeline traces modules that hold sharded tables.
    """

    def __init__(self, names: list[str], dim: int) -> None:
        super().__init__()
        self._names = names
        self._dim = dim

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        if list(pooled.keys()) == self._names:
            return pooled.values().view(-1, len(self._names), self._dim)
        # A plan may change the order, and so do tables that several features share.
        vectors = pooled.to_dict()
        return torch.stack([vectors[name] for name in self._names], dim=1)


class _HeadInputs(nn.Module):
    """Make the inputs of the head.

    It is a separate module for the same reason as :class:`_OrderVectors`.

    Args:
        config: The model.
        columns: The columns that the head reads as raw ids or lengths, by argument.
    """

    def __init__(self, config: ModelConfig, columns: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._columns = columns
        self._num_categorical = len(config.categorical)
        history_columns = list(config.features)[self._num_categorical :]
        # For each history column: whether the module gets its events one by one, and the number of
        # its keys in the KeyedJaggedTensor.
        self._is_list = [name in config.lists for name in history_columns]
        self._num_keys = [config.max_events if is_list else 1 for is_list in self._is_list]

    def forward(
        self, features: KeyedJaggedTensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the vectors [B, F, D], histories as their means, and additional inputs by name.

        The ids and lengths among the inputs are int64 [B, columns]. They are 0 in padding rows,
        which have no ids.
        """

        def read_ids(name: str) -> torch.Tensor:
            values = features[name].values()
            return functional.pad(values, (0, features.stride() - len(values)))

        def read_lengths(name: str) -> torch.Tensor:
            return features[name].lengths()

        more = stack_raw_inputs(self._columns, ids=read_ids, lengths=read_lengths)
        if not self._is_list:
            return vectors, more
        # The first part holds the categorical columns, and each other part one history column.
        sizes = [self._num_categorical, *self._num_keys]
        parts = list(vectors.split(sizes, 1))
        counts = features.lengths().view(vectors.shape[1], -1).T.split(sizes, 1)
        lists = [index for index, is_list in enumerate(self._is_list, start=1) if is_list]
        if lists:
            more["lists"] = torch.stack([parts[index] for index in lists], 1)
            more["present"] = torch.stack([counts[index] > 0 for index in lists], 1)
        # Lookups return sums of events. The tables cannot average themselves, because a multi-hot
        # column, which is summed, may share a history's table.
        for index in range(1, len(parts)):
            sums = parts[index].sum(1, keepdim=True)
            num_events = counts[index].sum(1).clamp(min=1)
            parts[index] = sums / num_events.view(-1, 1, 1)
        return torch.cat(parts, 1), more


class LookupL2(nn.Module):
    """L2 regularization of sharded tables, in the gradients of the looked-up vectors.

    The penalty λ/2 · w² of a table's row w has the gradient λ w. Adding it in each step would touch
    all rows, so it is added only when a row is looked up. If a sample looks up the row p times on
    average, a step of B samples looks it up B p times, and each lookup adds λ w / (B p). The
    average per step is then λ w. Multi-hot columns and histories add no penalty.

    It is a module, so that TorchRec's pipeline does not trace into it.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        super().__init__()
        self._columns = columns
        self._factors: dict[int, torch.Tensor] = {}

    def set_factors(self, factors: dict[str, torch.Tensor]) -> None:
        """Set the factor λ / (B p) of each id, float32 [rows], by column name."""
        self._factors = {self._columns.index(name): value for name, value in factors.items()}

    def forward(self, features: KeyedJaggedTensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return ``vectors`` [B, F, D], with the penalty added to their gradient."""
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
    """The lookups in TorchRec's tables, and the head on top of them."""

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
        """Return the logits [B, T] of a batch.

        The first two arguments are named as in TorchRec's DLRM.

        Args:
            dense_features: The dense columns, float32 [B, columns].
            sparse_features: The ids; its keys are ``ModelConfig.lookups``.
            dense_vectors: The vectors of the data, [B, ``ModelConfig.vector_inputs``]; None if the
                model takes none.
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
    table_precision: str = "fp32",
    build: Build | None = None,
) -> ModelWithTables:
    """Build a model with initialized dense layers, and tables on the meta device.

    Sharding allocates the tables, and :func:`.initial_weights.fill_table` initializes them.

    Args:
        config: The model.
        seed: The seed of the initial weights.
        device: The device of the dense layers; with "meta" nothing is allocated.
        table_precision: The precision of the tables, "fp32" or "fp16".
        build: The ``build`` function of a custom model.
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
                data_type=DataType(table_precision.upper()),
            )
        )
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    head = build_head(config, seed=seed, device=device, build=build)
    return ModelWithTables(collection, head, config)
