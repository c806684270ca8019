"""Lookups in bfloat16, with the weights of the linear term apart.

With ``--amp`` a DLRM rounds the looked-up vectors to bfloat16 before anything else. FBGEMM can
write them so, and read their gradients: half the bytes of the largest tensors of a step. But
coordinates of these vectors are weights of the linear term, whose sum is part of the logit: 8 bits
of them are too few. A second lookup, of these coordinates alone, reads them from the tables as they
are, four bytes of a vector's 512. Their gradient is that of the rounded vectors.

This has never run on a GPU, and FBGEMM's lookups on CPUs give no bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import Head
from nvt_torchrec.training.launch.distributed import Group
from nvt_torchrec.training.settings.train_settings import TrainSettings
from nvt_torchrec.training.sharding.planning import FUSED

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
        #: For each feature the index of its memory, the first weight in it, and the distance
        #: between the weights of neighbouring ids: int64 [F].
        self._memory = self._first = self._distance = torch.empty(0)

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
            located.append((memory, table.storage_offset() + coordinate, table.stride(0)))
        device = self._memories[0].device
        self._memory, self._first, self._distance = torch.tensor(located, device=device).T

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        """Return the sums, float32 [B, T]; None if there is nothing to look up."""
        if not self._memories:
            return None
        ids, offsets = features.values().long(), features.offsets().long()
        num_rows, num_labels = features.stride(), len(self._config.labels)
        if not num_rows:
            return torch.zeros(0, num_labels, device=ids.device)
        # The last offset of each feature; an id belongs to the first feature that ends behind it.
        ends = offsets[num_rows::num_rows]
        order = torch.arange(len(ids), device=ids.device)
        feature = torch.searchsorted(ends.contiguous(), order, right=True)
        index = self._first[feature] + ids * self._distance[feature]
        index = index.unsqueeze(1) + torch.arange(num_labels, device=ids.device)
        if len(self._memories) == 1:
            weights = self._memories[0][index].float()
        else:
            weights = torch.zeros(index.shape, device=ids.device)
            for number, memory in enumerate(self._memories):
                is_here = (self._memory[feature] == number).unsqueeze(1)
                weights += memory[index.where(is_here, 0)].float().where(is_here, 0)
        # unsafe: without checks of the offsets, for which the CPU would wait for the GPU
        sums = torch.segment_reduce(weights, "sum", offsets=offsets, axis=0, initial=0, unsafe=True)
        return sums.view(-1, num_rows, num_labels).sum(0)
