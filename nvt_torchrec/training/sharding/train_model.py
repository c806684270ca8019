"""The model with its tables and its loss; its initial weights depend on the seed alone.

The same seed gives the same weights on any device, for any number of ranks and any sharding plan:
dense layers are initialized on the CPU, and tables in blocks of rows, each with a generator of its
own, so that a shard is initialized without making the whole table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional
from torchrec.models.dlrm import SparseArch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from nvt_torchrec.base.device import use_device
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Build, stack_raw_inputs
from nvt_torchrec.models.head import Head, build_head
from nvt_torchrec.training.data.loaders import TrainBatch
from nvt_torchrec.training.sharding.batch_norm import StepRows, SyncedBatchNorm

#: The rows of a table that one generator initializes. The initial weights depend on it.
BLOCK_ROWS = 65536
#: The threads that initialize blocks: this rank's share of the machine's cores.
_INIT_THREADS = max(1, min(16, count_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))))


@dataclasses.dataclass
class StepOutput:
    """The results of one step, detached.

    Attributes:
        loss: The scaled loss, a scalar.
        logits, labels: Those of this rank's samples, [rows, labels].
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
    of a rank's losses is therefore scaled with world size / global batch size: then that average
    is the gradient of the mean over the global batch, also when the last batch is uneven or empty
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
    ) -> None:
        """Add the loss to ``model``.

        Args:
            model: The model.
            world_size: The number of ranks.
            device_type: The kind of the device that computes.
            amp: Whether the dense layers compute in bfloat16; loss and weights stay float32.
            compiled: Whether they are compiled, on GPUs with CUDA graphs.
            kept_negatives: The share of the rows with label 0 that training reads; None for all.
                Their loss is that of the logits plus log(1 / share), which are those of the rows
                that are read, so that the model's own are those of the whole log.
        """
        super().__init__()
        self.model = model
        self.losses = _Losses(getattr(model.head.module, "loss", None))
        self.world_size = world_size
        step = StepRows()
        SyncedBatchNorm.replace_in(model.head.module, step)
        self.set_rows = _SetRows(step)
        self._amp = amp
        self._offset = -math.log(kept_negatives or 1.0)
        self._device_type = device_type
        self._replays_graphs = compiled and self._device_type == "cuda"

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, StepOutput]:
        """Return the loss (scalar) to run backward on, and the detached outputs."""
        if self._replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        self.set_rows(batch.labels, batch.rows, batch.global_size)
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._amp):
            logits = self.model(batch.dense_features, batch.sparse_features)
        logits = logits[: batch.rows].float()
        if self._replays_graphs:
            logits = logits.clone()  # the next step writes to the same memory
        labels = batch.labels[: batch.rows].float()
        weights = batch.weights
        if self.training:
            weights = _scale_to_mean_1(weights, batch.global_size, self.world_size)
        shown = logits + self._offset if self.training and self._offset else logits
        if weights is not None:
            weights = weights[: batch.rows]
        total = self.losses(shown, labels, weights)
        loss = total * (self.world_size / batch.global_size)
        output = StepOutput(
            loss.detach(), logits.detach(), labels.detach(), batch.global_size, weights
        )
        return loss, output


@fx.wrap  # TorchRec's pipeline traces the model once, without a batch
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
    """Say which rows a step has; a module, so that the pipeline does not trace into it."""

    def __init__(self, step: StepRows) -> None:
        super().__init__()
        self._step = step

    def forward(self, labels: torch.Tensor, rows: int, global_size: int) -> None:
        step = self._step
        step.rows, step.padded, step.global_size = rows, len(labels), global_size


class _Losses(nn.Module):
    """The sum of the losses of samples; a module, so that the pipeline does not trace into it.

    Args:
        own: The method ``loss`` of the model's module (:mod:`models.contract`); None: the loss
            is binary cross-entropy.
    """

    def __init__(self, own: Callable[..., torch.Tensor] | None) -> None:
        super().__init__()
        self._own = own

    def forward(
        self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        if self._own is not None:
            # the contract has [B] of one label
            return self._own(logits.squeeze(-1), labels.squeeze(-1), weights).sum()
        if weights is not None:
            weights = weights.unsqueeze(1)
        return functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")


class PooledVectors(SparseArch):
    """TorchRec's ``SparseArch``, which returns the lookup's output instead of copying it twice.

    Args:
        embedding_bag_collection: The tables, all of one width D.
        features: The features in the order of their vectors.
    """

    def __init__(
        self, embedding_bag_collection: EmbeddingBagCollection, features: list[str]
    ) -> None:
        super().__init__(embedding_bag_collection)
        self.in_order = _InOrder(features, self.D)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Return the features' vectors [B, F, D]."""
        return self.in_order(self.embedding_bag_collection(features))


class _InOrder(nn.Module):
    """A module of its own, because TorchRec's pipeline traces modules that hold sharded tables."""

    def __init__(self, names: list[str], dim: int) -> None:
        super().__init__()
        self._names, self._dim = names, dim

    def forward(self, pooled: KeyedTensor) -> torch.Tensor:
        if list(pooled.keys()) == self._names:
            return pooled.values().view(-1, len(self._names), self._dim)
        vectors = pooled.to_dict()  # a plan, and tables of several features, have another order
        return torch.stack([vectors[name] for name in self._names], dim=1)


class _HeadInputs(nn.Module):
    """What the head takes; a module of its own, as :class:`_InOrder`."""

    def __init__(self, config: ModelConfig, columns: dict[str, tuple[str, ...]]) -> None:
        super().__init__()
        self._columns = columns
        #: How many keys each feature has, from the first history on, and whether it is a list.
        self._singles, names = len(config.categorical), [*config.features]
        self._lists = [name in config.lists for name in names[self._singles :]]
        self._sizes = [config.max_events if is_list else 1 for is_list in self._lists]

    def forward(
        self, features: KeyedJaggedTensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return vectors of the features, histories as means, and what else a module takes.

        Tables sum: a column of lists, which is summed, may have that of a history. Ids and lengths
        are int64 [B, columns]; padding rows, which have no ids, have 0.
        """

        def ids(name: str) -> torch.Tensor:
            values = features[name].values()
            return functional.pad(values, (0, features.stride() - len(values)))

        lengths = {name: features[name].lengths() for name in self._columns.get("lengths", ())}
        more = stack_raw_inputs(self._columns, ids=ids, lengths=lengths.__getitem__)
        if not self._lists:
            return vectors, more
        sizes = [self._singles, *self._sizes]
        parts = list(vectors.split(sizes, 1))
        counts = features.lengths().view(vectors.shape[1], -1).T.split(sizes, 1)
        # the first part has the features of one id; each of the others is a history
        lists = [index for index, is_list in enumerate(self._lists, start=1) if is_list]
        if lists:
            more["lists"] = torch.stack([parts[index] for index in lists], 1)
            more["present"] = torch.stack([counts[index] > 0 for index in lists], 1)
        for index in range(1, len(parts)):
            sums = parts[index].sum(1, keepdim=True)
            num_events = counts[index].sum(1).clamp(min=1)
            parts[index] = sums / num_events.view(-1, 1, 1)
        return torch.cat(parts, 1), more


class LookupL2(nn.Module):
    """L2 regularization of sharded tables, in the gradients of what is looked up.

    A row that is looked up p times by a row of the log in the mean, and so B p times in a step of B
    rows, gets the gradient of λ/2 times its square, λ w, divided by B p at each lookup: in the mean
    of the steps that is the regularization of whole tables. Lists and histories add none.

    It is a module, so that TorchRec's pipeline does not trace into it.
    """

    def __init__(self, columns: tuple[str, ...]) -> None:
        super().__init__()
        self._columns = columns
        self._factors: dict[int, torch.Tensor] = {}

    def set_factors(self, factors: dict[str, torch.Tensor]) -> None:
        """Set by how much of its weights each lookup of an id raises their gradients, by column."""
        self._factors = {self._columns.index(name): each for name, each in factors.items()}

    def forward(self, features: KeyedJaggedTensor, vectors: torch.Tensor) -> torch.Tensor:
        """Return the vectors [B, F, D]; their gradient has that of the regularization as well."""
        if not (self._factors and self.training and vectors.requires_grad):
            return vectors
        penalty = torch.zeros_like(vectors)
        for index, factors in self._factors.items():
            ids = features[self._columns[index]].values().long()
            padding = 0, 0, 0, len(vectors) - len(ids)
            of_ids = functional.pad(factors[ids].unsqueeze(1), padding)
            penalty[:, index] = vectors.detach()[:, index] * of_ids
        vectors.register_hook(lambda gradient: gradient + penalty)
        return vectors


class ModelWithTables(nn.Module):
    """The lookup of TorchRec's tables, and what follows it."""

    def __init__(self, collection: EmbeddingBagCollection, head: Head, config: ModelConfig) -> None:
        super().__init__()
        self.sparse_arch = PooledVectors(collection, [*config.lookups])
        self.head = head
        more = head.raw_columns or config.histories
        self.inputs = _HeadInputs(config, head.raw_columns) if more else None
        self.lookup_l2 = LookupL2(config.categorical)

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor:
        """Return the logits [B, T] of a batch; the arguments are those of TorchRec's DLRM.

        The keys of ``sparse_features`` are ``ModelConfig.lookups``.
        """
        vectors, more = self.sparse_arch(sparse_features), None
        vectors = self.lookup_l2(sparse_features, vectors)
        if self.inputs is not None:
            vectors, more = self.inputs(sparse_features, vectors)
        return self.head(dense_features, vectors, more)


def build_model(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    tables: str = "fp32",
    build: Build | None = None,
) -> ModelWithTables:
    """Build a model whose dense layers are initialized, on ``device``, and whose tables are not.

    The tables are on the meta device: sharding allocates them. With ``device="meta"`` nothing is
    allocated. ``tables`` is their precision, "fp32" or "fp16".
    ``build`` is that of an own model, to train it.
    """
    features = config.features_of_tables
    configs = [
        EmbeddingBagConfig(
            name=table,
            embedding_dim=config.embedding_dim,
            num_embeddings=rows,
            feature_names=features[table],
            data_type=DataType(tables.upper()),
        )
        for table, rows in config.tables.items()
    ]
    collection = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    head = build_head(config, seed=seed, device=device, build=build)
    return ModelWithTables(collection, head, config)


def fill_table(
    shard: torch.Tensor, table: str, rows: int, dim: int, seed: int, offsets: tuple[int, int]
) -> None:
    """Write the initial weights of a table, or of a shard of it, in threads.

    They are uniform in ±1/sqrt(rows), as DLRM's (Naumov et al. 2019, and its published code).

    Args:
        shard: The shard [m, n], filled in place.
        table: The table's name, which selects its random numbers.
        rows: The rows of the whole table.
        dim: The width of the whole table.
        seed: The seed of the run.
        offsets: The first row and the first column of the shard in the table.
    """
    first, column = offsets
    bound = 1 / math.sqrt(rows)
    end = first + shard.shape[0]
    stream = torch.cuda.current_stream(shard.device) if shard.is_cuda else None

    def fill(block: int) -> None:
        begin = block * BLOCK_ROWS
        height = min(BLOCK_ROWS, rows - begin)
        key = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
        values = torch.empty(height, dim).uniform_(-bound, bound, generator=generator)
        low, high = max(first, begin), min(end, begin + height)
        # NumPy copies in this thread; torch would start further threads in each
        mine = np.ascontiguousarray(
            values.numpy()[low - begin : high - begin, column : column + shard.shape[1]]
        )
        part = shard.detach()[low - first : high - first]
        if stream is None:
            np.copyto(part.numpy(), mine)
            return
        with torch.cuda.stream(stream):  # the caller's, not that of this thread
            part.copy_(torch.from_numpy(mine))

    with ThreadPoolExecutor(_INIT_THREADS, "init", use_device, (shard.device,)) as pool:
        for _ in pool.map(fill, range(first // BLOCK_ROWS, -(-end // BLOCK_ROWS))):
            pass
