"""Lookups in bfloat16, with a separate float32 lookup for the weights of the linear term.

With ``--amp`` a DLRM rounds the looked-up vectors to bfloat16 before anything else. FBGEMM can
write the vectors in bfloat16 and read such gradients, which halves the largest tensors of a step.
But some coordinates of the vectors are weights of the linear term, whose sum is part of the logit:
the 8 significant bits of bfloat16 are too few for them. A second lookup reads only these
coordinates from the tables in full precision, 4 of a vector's 512 bytes. Their gradient still comes
from the rounded vectors.

This has never run on a GPU, and FBGEMM's lookups on CPUs do not support bfloat16. So a run tries a
few lookups before its first step, and continues in float32 with a warning if they fail or differ.
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

#: The number of rows that are looked up before the first step.
_TRIED_ROWS = 64
#: The sharding types whose shards hold whole rows; on one rank each table then has one shard.
_WHOLE_ROWS = {
    ShardingType.TABLE_WISE.value,
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
}


def round_lookups(
    plan: ShardingPlan, head: Head, config: ModelConfig, settings: TrainSettings, group: Group
) -> bool:
    """Let lookups return bfloat16 if the module rounds their vectors to bfloat16 anyway.

    Without a linear term the results stay the same. With one, vectors are rounded once more, before
    they are multiplied by ``vector_scale``.

    This needs ``--amp``, one GPU that holds all tables, and a model that takes its vectors in
    parts, because such a model rounds them first. It excludes:

    - histories, which are averaged before they are rounded;
    - ``--embedding_l2``, whose small penalties would be lost in gradients of 8 significant bits;
    - several ranks, which would have to exchange the weights of the linear term separately.

    Args:
        plan: The plan, which is changed in place.
        head: The head, as it will train.
        config: The model.
        settings: The settings of the run.
        group: This rank.

    Returns:
        Whether lookups return bfloat16.
    """
    if not settings.amp or group.device.type != "cuda" or group.world_size > 1:
        return False
    if head.vector_join is None or config.histories or settings.embedding_l2:
        return False
    tables = [table for module in plan.plan.values() for table in module.values()]
    for table in tables:
        # FeatureSums reads the tables' memory itself, which it cannot if FBGEMM caches rows or
        # TorchRec splits them.
        if table.compute_kernel != FUSED or table.sharding_type not in _WHOLE_ROWS:
            return False
    for table in tables:
        table.output_dtype = DataType.BF16
    return True


class FeatureSums(nn.Module):
    """Look up the weights of the linear term and sum them for each row, without a gradient.

    It is a module, so that TorchRec's pipeline does not trace into it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._config = config
        #: The storages of the tables, as flat tensors. Usually all tables share one storage.
        self._storages: list[torch.Tensor] = []
        # For each feature, int64 [F]:
        self._storage_index = torch.empty(0)  # the index of its table's storage
        self._table_offset = torch.empty(0)  # where its table begins in the storage
        self._row_stride = torch.empty(0)  # the distance between the vectors of neighboring ids
        self._coordinate = torch.empty(0)  # the coordinate of its weights in the vectors

    def set_tables(self, shards: Iterable[tuple[str, torch.Tensor, tuple[int, int]]]) -> None:
        """Set the tables to look up in.

        Without a linear term there is nothing to look up.

        Args:
            shards: The name, the weights and the offsets of each table's only shard.
        """
        if not self._config.first_order:
            return
        weights = {}
        for name, shard, _ in shards:
            weights[name] = shard
        index_by_address: dict[int, int] = {}
        locations = []
        for feature, column in self._config.features.items():
            table = weights[self._config.table_by_column[column]]
            storage = table.untyped_storage()
            index = index_by_address.setdefault(storage.data_ptr(), len(index_by_address))
            if index == len(self._storages):
                size = storage.nbytes() // table.element_size()
                self._storages.append(table.as_strided((size,), (1,), 0))
            coordinate = self._config.first_order_coordinates[feature]
            locations.append((index, table.storage_offset(), table.stride(0), coordinate))
        columns = torch.tensor(locations, device=self._storages[0].device).T
        self._storage_index = columns[0]
        self._table_offset = columns[1]
        self._row_stride = columns[2]
        self._coordinate = columns[3]

    def clear(self) -> None:
        """Forget the tables, so that nothing is looked up anymore."""
        self._storages = []

    @torch.no_grad()
    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor | None:
        """Return the sums for each label, float32 [B, T]; None if there is nothing to look up."""
        if not self._storages:
            return None
        return self.sum_coordinates(features, self._coordinate, len(self._config.labels))

    @torch.no_grad()
    def sum_coordinates(
        self, features: KeyedJaggedTensor, coordinates: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Return the sums of ``count`` coordinates over the vectors of each row.

        Args:
            features: The ids.
            coordinates: For each feature, the first coordinate to sum, int64 [F].
            count: The number of coordinates, which follow one another.

        Returns:
            The sums, float32 [B, count].
        """
        ids, offsets = features.values().long(), features.offsets().long()
        num_rows = features.stride()
        if not num_rows:
            return torch.zeros(0, count, device=ids.device)
        # The values of features follow one another: an id belongs to the first feature whose last
        # offset is greater than the id's position.
        feature_ends = offsets[num_rows::num_rows]
        positions = torch.arange(len(ids), device=ids.device)
        feature = torch.searchsorted(feature_ends.contiguous(), positions, right=True)
        row_begin = self._table_offset[feature] + ids * self._row_stride[feature]
        first = row_begin + coordinates[feature]
        index = first.unsqueeze(1) + torch.arange(count, device=ids.device)
        if len(self._storages) == 1:
            weights = self._storages[0][index].float()
        else:
            weights = torch.zeros(index.shape, device=ids.device)
            for storage_index, storage in enumerate(self._storages):
                is_here = (self._storage_index[feature] == storage_index).unsqueeze(1)
                weights += storage[index.where(is_here, 0)].float().where(is_here, 0)
        # unsafe=True skips a check of the offsets, for which the CPU would wait for the GPU.
        sums = torch.segment_reduce(weights, "sum", offsets=offsets, axis=0, initial=0, unsafe=True)
        return sums.view(-1, num_rows, count).sum(0)

    def compare(self, features: KeyedJaggedTensor, vectors: torch.Tensor) -> None:
        """Compare the last coordinates of FBGEMM's vectors with those that this module looks up.

        The weights of the linear term would show nothing, because they are all 0 at first.

        Args:
            features: The ids.
            vectors: FBGEMM's vectors, bfloat16 [B, F, D].

        Raises:
            AssertionError: They differ.
        """
        if not self._storages:
            return
        last = torch.full_like(self._coordinate, vectors.shape[2] - 1)
        expected = self.sum_coordinates(features, last, 1).squeeze(1)
        rounded = vectors[:, :, -1].float()
        # Rounding to bfloat16 may change each value by a relative 2^-8.
        tolerance = rounded.abs().sum(1) * 2**-8 + 1e-12
        difference = (rounded.sum(1) - expected).abs()
        assert bool((difference <= tolerance).all()), f"{difference.max()} off"


def try_lookups(
    sharded: DistributedModelParallel, lookup: nn.Module, sums: FeatureSums, config: ModelConfig
) -> bool:
    """Look up a few rows in bfloat16; switch lookups to float32 if that fails or is wrong.

    Args:
        sharded: The model.
        lookup: The model's lookup, which returns vectors [B, F, D].
        sums: The model's lookup of the linear term's weights.
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
        assert vectors.dtype == torch.bfloat16, f"FBGEMM returned {vectors.dtype}"
        sums.compare(features, vectors.detach())
        # Gradients of 0 change neither weights nor optimizer state, except Adam's step count,
        # which is set before the first step.
        vectors.backward(torch.zeros_like(vectors))
    except Exception as error:  # any error of FBGEMM or CUDA, or a failed assertion
        reason = " ".join(str(error).split()) or type(error).__name__
        log.warning(
            "lookups stay in float32, which is slower: bfloat16 lookups failed or returned "
            "different values (%s); please report this",
            f"{reason:.300}",
        )
        for module in iterate_lookups(sharded):
            module.output_dtype = SparseType.FP32.as_int()
        sums.clear()
        return False
    return True
