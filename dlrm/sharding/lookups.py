"""How FBGEMM reads the tables: the types of ids, tables and sums, and whether it checks the ids.

TorchRec takes these as ``fused_params`` of a sharder and as constraints of a table.
"""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption, Storage
from torchrec.distributed.types import BoundsCheckMode
from torchrec.modules.embedding_configs import DataType

from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.optimizers import Optimizer
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
    ids = torch.int32 if few else torch.int64
    params: dict[str, Any] = {
        "embedding_table_index_type": ids,
        "embedding_table_offset_type": ids,
        "bounds_check_mode": BoundsCheckMode.NONE,  # the loader has checked the ids
    }
    if settings.table_precision == "fp16":
        params["stochastic_rounding"] = True
    return params


def output_type(
    settings: TrainSettings, config: ModelConfig, device: str, world_size: int
) -> DataType | None:
    """Return the type of the lookups' output; None: TorchRec's default, float32.

    It is bfloat16 where nothing changes by that: the dot products would round single precision to
    it first of all, and between ranks no sums are made of rounded parts.
    """
    unchanged = world_size == 1 and config.interaction.ROUNDS_VECTORS
    if settings.amp and unchanged and device in HALF_LOOKUPS:
        return HALF_LOOKUPS[device]
    return DataType.FP32 if settings.table_precision == "fp16" else None


class StorageEstimator(EmbeddingStorageEstimator):
    """TorchRec's estimate, with float32 optimizer state of float16 tables.

    It takes the state to be of the tables' type; FBGEMM keeps it in float32.

    Args:
        optimizer: The optimizer of the tables.
        arguments: Those of TorchRec's estimator.
    """

    def __init__(self, optimizer: Optimizer, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._optimizer = optimizer

    def estimate(self, sharding_options: list[ShardingOption], *args: Any, **kwargs: Any) -> None:
        """Set the memory that each shard takes; the planner calls this."""
        super().estimate(sharding_options, *args, **kwargs)
        for option in sharding_options:
            weight = option.tensor
            moments = self._optimizer.moments(weight.shape[1])
            share = moments * (4 - weight.element_size())
            on_gpu = self._topology.compute_device == "cuda" and option.compute_kernel == "fused"
            for shard in option.shards:
                more = int(share * shard.size[0] * shard.size[1])
                shard.storage += Storage(more, 0) if on_gpu else Storage(0, more)
