"""The model: TorchRec's DLRM, with initial weights that depend on the seed alone.

The same seed gives the same weights on any device, for any number of ranks and any sharding plan:
dense layers are initialized on the CPU, and tables in blocks of rows, each with a generator of its
own, so that a shard is initialized without making the whole table.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torchrec.datasets.utils import Batch
from torchrec.models import dlrm as models
from torchrec.models.dlrm import DLRM, OverArch
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.device import use_device
from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.layers import PooledVectors
from nvt_torchrec.nvt_loader.cpu.blocks import LoaderBatch

#: The rows of a table that one generator initializes. The initial weights depend on it.
BLOCK_ROWS = 65536
#: The threads that initialize blocks: this rank's share of the machine's cores.
_INIT_THREADS = max(
    1, min(16, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
)


@dataclasses.dataclass
class TrainBatch(LoaderBatch):
    """One rank's batch of a step.

    Attributes:
        rows: The number of samples in it; padding rows follow them.
        global_size: The number of samples of all ranks together.
    """

    rows: int = 0
    global_size: int = 0

    @classmethod
    def of(cls, batch: Batch, size: int, global_size: int) -> TrainBatch:
        """Pad ``batch`` to ``size`` rows, so that all ranks have equally many.

        Row-wise sharded tables scatter their sums in equal parts. A padding row has no ids, so it
        reads no table; :class:`TrainModel` leaves it out of the loss.
        """
        rows, weights = len(batch.labels), getattr(batch, "weights", None)
        counts = rows, global_size
        if rows == size:
            return cls(batch.dense_features, batch.sparse_features, batch.labels, weights, *counts)
        ids = batch.sparse_features
        more = size - rows
        pad = nn.functional.pad
        padded = KeyedJaggedTensor(
            keys=ids.keys(),
            values=ids.values(),
            weights=ids.weights_or_none(),
            lengths=pad(ids.lengths().view(len(ids.keys()), rows), (0, more)).flatten(),
            stride=size,
        )
        dense = pad(batch.dense_features, (0, 0, 0, more))
        if weights is not None:
            weights = pad(weights, (0, more))
        return cls(dense, padded, pad(batch.labels, (0, more)), weights, *counts)


@dataclasses.dataclass
class StepOutput:
    """The results of one step, detached.

    Attributes:
        loss: The scaled loss, a scalar.
        logits, labels: Those of this rank's samples [rows].
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
    """A DLRM with its loss: binary cross-entropy, mean over the global batch.

    Where samples have weights it is their weighted mean, Σ w·l / Σ w. The sum of the weights of all
    ranks is one more number that the ranks exchange in each step.

    DDP and TorchRec average gradients over the ranks, as if all had equally many samples. The sum
    of a rank's losses is therefore scaled with world size / global batch size: then that average
    is the gradient of the mean over the global batch, also when the last batch is uneven or empty
    on some ranks.
    """

    def __init__(
        self,
        dlrm: DLRM,
        world_size: int,
        amp: bool = False,
        compiled: bool = False,
        kept_negatives: float | None = None,
    ) -> None:
        """Add the loss to ``dlrm``.

        Args:
            dlrm: The model.
            world_size: The number of ranks.
            amp: Whether the dense layers compute in bfloat16; loss and weights stay float32.
            compiled: Whether they are compiled, on GPUs with CUDA graphs.
            kept_negatives: The share of the rows with label 0 that training reads; None for all.
                Their loss is that of the logits plus log(1 / share), which are those of the rows
                that are read, so that the model's own are those of the whole log.
        """
        super().__init__()
        self.dlrm = dlrm
        self.world_size = world_size
        self._amp = amp
        self._offset = -math.log(kept_negatives or 1.0)
        self._device_type = next(dlrm.over_arch.parameters()).device.type
        self._replays_graphs = compiled and self._device_type == "cuda"

    def forward(self, batch: TrainBatch) -> tuple[torch.Tensor, StepOutput]:
        """Return the loss (scalar) to run backward on, and the detached outputs."""
        if self._replays_graphs:
            torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast(self._device_type, torch.bfloat16, enabled=self._amp):
            logits = self.dlrm(batch.dense_features, batch.sparse_features)
        logits = logits.squeeze(-1)[: batch.rows].float()
        if self._replays_graphs:
            logits = logits.clone()  # the next step writes to the same memory
        labels = batch.labels[: batch.rows].float()
        weights = batch.weights
        if self.training:
            weights = _with_mean_1(weights, batch.global_size, self.world_size)
        shown = logits + self._offset if self.training and self._offset else logits
        total, weights = _sum_losses(shown, labels, weights)
        loss = total * (self.world_size / batch.global_size)
        output = StepOutput(
            loss.detach(), logits.detach(), labels.detach(), batch.global_size, weights
        )
        return loss, output


@fx.wrap  # TorchRec's pipeline traces the model once, without a batch
def _with_mean_1(
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


@fx.wrap
def _sum_losses(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the sum of the (weighted) losses, and the weights without those of padding rows."""
    if weights is not None:
        weights = weights[: len(logits)]
    total = nn.functional.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum")
    return total, weights


class Scorer(nn.Module):
    """An unsharded DLRM for scoring in one process, in the column order of its configuration.

    Attributes:
        dlrm: The model.
        tables: The weights of all tables, float32 [rows of all tables, D]; each table's weight is
            a slice of it.
    """

    def __init__(self, dlrm: DLRM, config: ModelConfig, device: torch.device | str) -> None:
        """Allocate the tables of ``dlrm`` on ``device``, as one tensor, not initialized."""
        super().__init__()
        self.dlrm = dlrm
        self.tables = torch.empty(sum(config.num_embeddings), config.embedding_dim, device=device)
        bags = dlrm.sparse_arch.embedding_bag_collection.embedding_bags
        parts = self.tables.split(config.num_embeddings)
        for name, part in zip(config.table_names, parts, strict=True):
            bags[name].weight = nn.Parameter(part)

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor:
        """Compute the logits.

        Args:
            dense_features: The dense features, float32 [B, number of dense features].
            sparse_features: The ids as the loader yields them, with the keys of
                ``ModelConfig.categorical``.

        Returns:
            The logits, float32 [B].
        """
        return self.dlrm(dense_features, sparse_features).squeeze(-1)


def build_dlrm(
    config: ModelConfig,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    tables: str = "fp32",
) -> DLRM:
    """Build a DLRM whose dense layers are initialized, on ``device``, and whose tables are not.

    The tables are on the meta device: sharding or :class:`Scorer` allocates them. With
    ``device="meta"`` nothing is allocated. ``tables`` is their precision, "fp32" or "fp16".
    """
    meta = torch.device("meta")
    configs = [
        EmbeddingBagConfig(
            name=table,
            embedding_dim=config.embedding_dim,
            num_embeddings=rows,
            feature_names=[feature],
            data_type=DataType(tables.upper()),
        )
        for table, feature, rows in zip(
            config.table_names, config.categorical, config.num_embeddings, strict=True
        )
    ]
    collection = EmbeddingBagCollection(tables=configs, device=meta)
    initial_device = meta if torch.device(device) == meta else torch.device("cpu")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if config.dense:
            model = ClickModel(_torchrec_dlrm(collection, config, initial_device), config)
        else:
            with initial_device:
                model = ClickModel(None, config)
        for part in (model.dense_arch, model.inter_arch, model.over_arch):
            _initialize_layers(part)
            part.to(device)
        if model.first_order is not None:
            model.first_order.to(device)
    model.sparse_arch = PooledVectors(collection)
    return model


def _torchrec_dlrm(
    collection: EmbeddingBagCollection, config: ModelConfig, device: torch.device
) -> DLRM:
    sizes = vars(config.interaction)
    model = getattr(models, config.interaction.TORCHREC)(
        embedding_bag_collection=collection,
        dense_in_features=len(config.dense),
        dense_arch_layer_sizes=list(config.dense_arch_layer_sizes),
        over_arch_layer_sizes=list(config.over_arch_layer_sizes),
        dense_device=device,
        **{name: list(x) if isinstance(x, tuple) else x for name, x in sizes.items()},
    )
    replacement = config.interaction.replacement(len(config.categorical))
    if replacement is not None:
        model.inter_arch = replacement
    return model


class FirstOrder(nn.Module):
    """Logistic regression beside the layers: the first-order term of the logit.

    It is the wide part of Wide & Deep (Cheng et al. 2016, arXiv:1606.07792) and the linear one of
    DeepFM (Guo et al. 2017, arXiv:1703.04247). The weights of the ids have no tables of their own:
    each is the first coordinate of the id's embedding, times a factor, and the interaction does not
    see that coordinate.

    Attributes:
        weight: The weights of the dense features, [1, their number]; None without any.
        bias: The bias, [1].

    Args:
        factor: ``ModelConfig.first_order``. It scales the steps of the ids' weights.
        dense: The number of dense features.
        dim: The width of the embeddings, D.
    """

    others: torch.Tensor

    def __init__(self, factor: float, dense: int, dim: int) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.zeros(1, dense)) if dense else None
        self.bias = nn.Parameter(torch.zeros(1))
        others = torch.ones(dim)
        others[0] = 0
        self.register_buffer("others", others, persistent=False)

    def forward(
        self, dense_features: torch.Tensor, vectors: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the term [B, 1], and the embeddings [B, F, D] with 0 as first coordinate."""
        term = self.factor * vectors[:, :, 0].float().sum(1, keepdim=True) + self.bias
        if self.weight is not None:  # not a matrix product, which autocast rounds to bfloat16
            term = term + (dense_features * self.weight).sum(1, keepdim=True)
        return term, vectors * self.others.to(vectors.dtype)

    def as_layer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight [1, 1 + dense] and bias of the term, whose first input is the ids' sum."""
        weight = self.bias.new_full((1, 1), self.factor)
        if self.weight is not None:
            weight = torch.cat([weight, self.weight], 1)
        return weight.detach(), self.bias.detach()


class ClickModel(DLRM):
    """A DLRM (Naumov et al. 2019), to whose logit a first-order term may be added.

    Without dense features there are no layers below the interaction and no dense vector in it;
    ``dense_features`` are [B, 0].

    Attributes:
        first_order: The first-order term; None for TorchRec's DLRM.
    """

    def __init__(self, dlrm: DLRM | None, config: ModelConfig) -> None:
        """Take the layers of TorchRec's ``dlrm``, or make those for data without dense features."""
        nn.Module.__init__(self)  # DLRM's makes layers for dense features
        self.first_order = None
        if config.first_order:
            sizes = len(config.dense), config.embedding_dim
            self.first_order = FirstOrder(config.first_order, *sizes)
        if dlrm is not None:
            self.dense_arch, self.inter_arch = dlrm.dense_arch, dlrm.inter_arch
            self.over_arch = dlrm.over_arch
            return
        self.dense_arch = nn.Identity()
        self.inter_arch, width = config.interaction.of_embeddings(
            len(config.categorical), config.embedding_dim
        )
        self.over_arch = OverArch(width, list(config.over_arch_layer_sizes))

    def forward(
        self, dense_features: torch.Tensor, sparse_features: KeyedJaggedTensor
    ) -> torch.Tensor:
        """Return the logits [B, 1] of a batch; the arguments are those of TorchRec's DLRM."""
        vectors, term = self.sparse_arch(sparse_features), None
        if self.first_order is not None:
            term, vectors = self.first_order(dense_features, vectors)
        combined = self.inter_arch(
            dense_features=self.dense_arch(dense_features), sparse_features=vectors
        )
        logits = self.over_arch(combined)
        return logits if term is None else logits + term


def _initialize_layers(part: nn.Module) -> None:
    """Initialize the linear layers of ``part``: normal weights, biases of 0.

    Their variance is 2/(inputs + outputs) (Glorot & Bengio 2010, equation 12), as in DLRM's
    published code. The default of torch.nn.Linear, which TorchRec's DLRM keeps, has a third of
    that or less: after several layers the logits hardly depend on the sample, and the first tens
    of steps on large batches teach the model nothing.
    """
    for layer in part.modules():
        if isinstance(layer, nn.Linear):
            nn.init.xavier_normal_(layer.weight)
            nn.init.zeros_(layer.bias)


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
