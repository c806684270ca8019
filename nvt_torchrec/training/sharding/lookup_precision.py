"""Lookups in bfloat16, with the weights of the linear term apart.

With ``--amp`` a DLRM rounds the looked-up vectors to bfloat16 before anything else. FBGEMM can
write them so, and read their gradients: half the bytes of the largest tensors of a step. But
coordinates of these vectors are weights of the linear term, whose sum is part of the logit: 8 bits
of them are too few. A second lookup, of these coordinates alone, reads them from the tables as they
are, four bytes of a vector's 512. Their gradient is that of the rounded vectors.

This has never run on a GPU, and FBGEMM's lookups on CPUs give no bfloat16. So a run tries some
lookups before its first step, and goes on in float32 with a warning if they fail or differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import Head
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.optim.combined import iterate_lookups
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.planning import FUSED

log = logging.getLogger(__name__)

#: The rows that are looked up before the first step.
_TRIED_ROWS = 64
#: The kinds of sharding whose shards hold whole rows; on one rank there is one for each table.
_WHOLE_ROWS = {
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
}


def round_lookups(
    plan: ShardingPlan, head: Head, config: ModelConfig, settings: TrainSettings, group: Group
) -> bool:
    """Write into ``plan`` that lookups give bfloat16, where the module rounds them to it anyway.

    Without a linear term that changes nothing. With one, vectors are rounded once more, before they
    are multiplied by ``vector_scale``.

    That is with ``--amp`` on one GPU that holds all tables, for a model that takes its vectors in
    parts and so rounds them first. Histories are averaged before. The small penalties of
    ``--embedding_l2`` would be lost in gradients of 8 bits. Several ranks would have to exchange
    the weights of the linear term in a message of their own.

    Args:
        plan: The plan.
        head: The head, as it will train.
        config: The model.
        settings: The settings of the run.
        group: This rank.

    Returns:
        Whether they do.
    """
    if not settings.amp or group.device.type != "cuda" or group.world_size > 1:
        return False
    if head.vector_join is None or config.histories or settings.embedding_l2:
        return False
    tables = [table for module in plan.plan.values() for table in module.values()]
    for table in tables:
        # Vectors that are cached, or kept by TorchRec in parts, cannot be read beside FBGEMM.
        if table.compute_kernel != FUSED or table.sharding_type not in _WHOLE_ROWS:
            return False
    for table in tables:
        table.output_dtype = DataType.BF16
    return True


class FeatureSums(nn.Module):
    """Looks up the weights of the linear term, and sums them for each row, without a gradient.

    It is a module, so that TorchRec's pipeline does not trace into it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        #: The memory of the tables, as vectors of all their values; usually one.
        self._memories: list[torch.Tensor] = []
        #: For each feature the index of its memory, where its table begins there, the distance
        #: between the vectors of neighbouring ids, and the coordinate of its weights: int64 [F].
        self._memory = self._begin = self._distance = self._coordinate = torch.empty(0)

    def set_tables(self, shards: Iterable[tuple[str, torch.Tensor, tuple[int, int]]]) -> None:
        """Look up in tables from now on: their names and weights, each whole.

        Without a linear term there is nothing to look up.
        """
        if not self._config.first_order:
            return
        weights = {}
        for name, shard, _ in shards:
            weights[name] = shard
        memory_by_address: dict[int, int] = {}
        located = []
        for feature, column in self._config.features.items():
            table = weights[self._config.table_by_column[column]]
            storage = table.untyped_storage()
            memory = memory_by_address.setdefault(storage.data_ptr(), len(memory_by_address))
            if memory == len(self._memories):
                size = storage.nbytes() // table.element_size()
                self._memories.append(table.as_strided((size,), (1,), 0))
            coordinate = self._config.first_order_coordinates[feature]
            located.append((memory, table.storage_offset(), table.stride(0), coordinate))
        columns = torch.tensor(located, device=self._memories[0].device).T
        self._memory, self._begin, self._distance, self._coordinate = columns

    def clear(self) -> None:
        """Look up nothing any more."""
        self._memories = []

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        """Return the sums, float32 [B, T]; None if there is nothing to look up."""
        if not self._memories:
            return None
        return self.sum_coordinates(features, self._coordinate, len(self._config.labels))

    @torch.no_grad()
    def sum_coordinates(
        self, features: KeyedJaggedTensor, coordinates: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Return sums of ``count`` coordinates of the vectors of each row, float32 [B, count].

        Args:
            features: The ids.
            coordinates: The first of these coordinates for each feature, int64 [F].
            count: How many they are.
        """
        ids, offsets = features.values().long(), features.offsets().long()
        num_rows = features.stride()
        if not num_rows:
            return torch.zeros(0, count, device=ids.device)
        # The last offset of each feature; an id belongs to the first feature that ends behind it.
        ends = offsets[num_rows::num_rows]
        order = torch.arange(len(ids), device=ids.device)
        feature = torch.searchsorted(ends.contiguous(), order, right=True)
        index = self._begin[feature] + ids * self._distance[feature] + coordinates[feature]
        index = index.unsqueeze(1) + torch.arange(count, device=ids.device)
        if len(self._memories) == 1:
            weights = self._memories[0][index].float()
        else:
            weights = torch.zeros(index.shape, device=ids.device)
            for number, memory in enumerate(self._memories):
                is_here = (self._memory[feature] == number).unsqueeze(1)
                weights += memory[index.where(is_here, 0)].float().where(is_here, 0)
        # unsafe: without checks of the offsets, for which the CPU would wait for the GPU
        sums = torch.segment_reduce(weights, "sum", offsets=offsets, axis=0, initial=0, unsafe=True)
        return sums.view(-1, num_rows, count).sum(0)

    def compare(self, features: KeyedJaggedTensor, vectors: torch.Tensor) -> None:
        """Compare the last coordinates of vectors with those that are looked up here.

        At first all weights of the linear term are 0, the last coordinates are not.

        Raises:
            AssertionError: They differ.
        """
        if not self._memories:
            return
        last = torch.full_like(self._coordinate, vectors.shape[2] - 1)
        found = self.sum_coordinates(features, last, 1).squeeze(1)
        rounded = vectors[:, :, -1].float()
        # Each vector may be rounded by a part of 2^-8.
        tolerance = rounded.abs().sum(1) * 2**-8 + 1e-12
        difference = (rounded.sum(1) - found).abs()
        assert bool((difference <= tolerance).all()), f"{difference.max()} off"


def try_lookups(
    sharded: DistributedModelParallel, lookup: nn.Module, sums: FeatureSums, config: ModelConfig
) -> bool:
    """Look up some rows in bfloat16, and let FBGEMM give float32 if that fails or is wrong.

    Args:
        sharded: The model.
        lookup: Its lookup, whose results are vectors [B, F, D].
        sums: Its lookup of the linear term's weights.
        config: The model's shape.

    Returns:
        Whether lookups stay in bfloat16.
    """
    try:
        device = next(sharded.parameters()).device
        ids = []
        for column in config.lookups.values():
            rows = config.tables[config.table_by_column[column]]
            ids.append(torch.linspace(0, rows - 1, _TRIED_ROWS, device=device).long() % rows)
        ones = torch.ones(len(ids) * _TRIED_ROWS, dtype=torch.int32, device=device)
        features = KeyedJaggedTensor([*config.lookups], torch.cat(ids).int(), lengths=ones)
        vectors = lookup(features)
        assert vectors.dtype == torch.bfloat16, f"FBGEMM gave {vectors.dtype}"
        sums.compare(features, vectors.detach())
        # Gradients of 0 change no weight, and no state of an optimizer but Adam's count of steps,
        # which is set before the first one.
        vectors.backward(torch.zeros_like(vectors))
    except Exception as error:  # of FBGEMM or CUDA, or a difference
        reason = " ".join(str(error).split()) or type(error).__name__
        log.warning(
            "lookups stay in float32, which takes longer, because those in bfloat16 failed or "
            "differ: %s; report this",
            f"{reason:.300}",
        )
        for module in iterate_lookups(sharded):
            module.output_dtype = SparseType.FP32.as_int()
        sums.clear()
        return False
    return True
