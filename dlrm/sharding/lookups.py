"""How FBGEMM reads the tables: the types of ids, tables and sums, and whether it checks the ids.

TorchRec takes these as ``fused_params`` of a sharder and as constraints of a table.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType, data_type_to_dtype
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings

#: The type of a lookup's output in 16 bits. FBGEMM's kernels for CPUs have no bfloat16.
HALF_LOOKUPS = {"cuda": DataType.BF16}
#: FBGEMM's backward on GPUs numbers the rows of all tables of a rank in the type of the ids.
_MOST_INT32_ROWS = 2**31 - 1


def fused_params(settings: TrainSettings, config: ModelConfig, *, cached: bool) -> dict[str, Any]:
    """Return what a sharder passes on to FBGEMM's lookups.

    Args:
        settings: The settings of the run.
        config: The model's shape.
        cached: Whether a table is cached on a GPU, and not held there.
    """
    few = sum(config.num_embeddings) <= _MOST_INT32_ROWS and not cached
    narrow = settings.index_type == "int32" or (settings.index_type == "auto" and few)
    ids = torch.int32 if narrow else torch.int64
    found: dict[str, Any] = {
        "embedding_table_index_type": ids,
        "embedding_table_offset_type": ids,
    }
    if not settings.bounds_check:  # every loader of dlrm.data hands out ids within their tables
        found["bounds_check_mode"] = BoundsCheckMode.NONE
    if settings.table_precision == "fp16":
        found["stochastic_rounding"] = True
    return found


def output_type(
    settings: TrainSettings, config: ModelConfig, device: str, world_size: int
) -> DataType | None:
    """Return the type of the lookups' output; None: TorchRec's default, float32.

    By default it is bfloat16 where nothing changes by that: the dot products would round single
    precision to it first of all, and between ranks no sums are made of rounded parts.
    """
    alone = world_size == 1 and config.interaction_type == "original"
    wanted = settings.lookup_precision
    if settings.amp and (wanted == "bf16" or (wanted == "auto" and alone)):
        half = HALF_LOOKUPS.get(device)
        if half is not None:
            return half
    return DataType.FP32 if settings.table_precision == "fp16" else None


def asked_output_type(settings: TrainSettings, device: str) -> torch.dtype:
    """Return the type of the lookups' output where layers with weights read it.

    That is in other interactions than dot products, where it is float32 by default.
    """
    half = HALF_LOOKUPS.get(device)
    if half is None or not settings.amp or settings.lookup_precision != "bf16":
        return torch.float32
    return data_type_to_dtype(half)


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate, with float32 optimizer state of float16 tables.

    It takes the state to be of the tables' type; FBGEMM keeps it in float32.
    """

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Set the memory that each shard takes; the planner calls this."""
        super().estimate(sharding_options, *args, **kwargs)
        for option in sharding_options:
            share = _moments(option.tensor) * (4 - option.tensor.element_size())
            on_gpu = self._topology.compute_device == "cuda" and option.compute_kernel == "fused"
            for shard in option.shards:
                more = int(share * shard.size[0] * shard.size[1])
                shard.storage += Storage(more, 0) if on_gpu else Storage(0, more)


def _moments(weight: torch.Tensor) -> float:
    """Return the numbers that the optimizer of a table keeps for each weight."""
    (optimizer,) = weight._optimizer_classes
    per_row = 1 / weight.shape[1]
    moments = {torch.optim.Adagrad: 1.0, torch.optim.Adam: 2.0, RowWiseAdagrad: per_row}
    return moments.get(optimizer, 0.0)
