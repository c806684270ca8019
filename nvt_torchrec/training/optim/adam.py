"""Adam for sharded tables on CPUs, where FBGEMM has none: the same step as its kernel on GPUs.

The tables are read by FBGEMM's fused CPU kernel with SGD at learning rate 0, which changes
nothing. Hooks record what the step needs: the ids of each lookup in its forward, and the gradient
of its output in its backward. So a step costs time for the rows of the batch, not of the tables,
and no gradient of a whole table is made.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen as Lookup,
)
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import KeyedOptimizer

#: FBGEMM's and torch.optim.Adam's defaults.
_BETAS = (0.9, 0.999)


def leave_to_table_adam(tables: torch.nn.Module) -> None:
    """Make sharding fuse SGD at learning rate 0 into the (unsharded) tables.

    Call it after planning with Adam, so that the plan has memory for its moments.
    """
    for parameter in tables.parameters():
        vars(parameter).update(
            _optimizer_classes=[torch.optim.SGD], _optimizer_kwargs=[{"lr": 0.0}]
        )


def lookups_of(model: DistributedModelParallel) -> Iterator[Lookup]:
    """Yield FBGEMM's modules that hold this rank's shards, which ``modules()`` does not show."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for part in module._lookups:
                yield from (inner for inner in part.modules() if isinstance(inner, Lookup))


class TableAdam(KeyedOptimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) on the rows that a batch holds; others do not change.

    ``m += (1 - β1)(g - m); v += (1 - β2)(g² - v)``, and in step t of the run ``w -= lr ·
    m/(1 - β1^t) / (√(v/(1 - β2^t)) + eps)``, as FBGEMM's Adam; torch.optim.SparseAdam differs in
    that its eps is not corrected. Moments are sharded like their tables. Checkpoints name them as
    TorchRec names those of FBGEMM's Adam.

    Args:
        model: The sharded model, its tables marked by :func:`leave_to_table_adam`. Sums and means
            have no weights.
        lr: The learning rate.
        eps: The number added to the root of the second moment.
    """

    def __init__(self, model: DistributedModelParallel, lr: float, eps: float) -> None:
        #: Finished steps.
        self.steps = 0
        self._gradients: list[tuple[Lookup, list[_Shard], dict[str, Any], torch.Tensor]] = []
        params: dict[str, ShardedTensor] = {}
        state: dict[ShardedTensor, dict[str, ShardedTensor]] = {}
        shards: dict[int, _Shard] = {}
        for name, weight in model.state_dict().items():
            if not isinstance(weight, ShardedTensor) or not weight.local_shards():
                continue
            table = name.split(".")[-2]
            first, second = _zeros_like(weight), _zeros_like(weight)
            params[name] = weight
            state[weight] = {f"{table}.momentum1": first, f"{table}.exp_avg_sq": second}
            for parts in zip(*(x.local_shards() for x in (weight, first, second)), strict=True):
                if parts[0].tensor.numel():  # a small row-wise sharded table has empty shards
                    shards[parts[0].tensor.data_ptr()] = tuple(part.tensor for part in parts)
        group = {"params": list(params.values()), "lr": lr, "eps": eps}
        super().__init__(params, state, [group])
        for lookup in lookups_of(model):
            local = [
                shards.pop(weight.data_ptr()) if weight.numel() else (weight, weight, weight)
                for weight in lookup.split_embedding_weights()
            ]
            lookup.register_forward_hook(
                functools.partial(self._after_forward, local), with_kwargs=True
            )
        if shards:
            raise RuntimeError(f"{len(shards)} shards of tables would not be trained")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that were not used."""
        self._gradients.clear()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update the rows of the last batch."""
        self.steps += 1
        for lookup, shards, inputs, gradient in self._gradients:
            offsets, first = inputs["offsets"], 0
            size = (len(offsets) - 1) // len(lookup.feature_table_map)
            parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
            for feature, table in enumerate(lookup.feature_table_map):
                width = shards[table][0].shape[1]
                bags = offsets[feature * size : (feature + 1) * size + 1]
                lengths, pooled = bags.diff(), gradient[:, first : first + width]
                first += width
                if lookup.pooling_mode == PoolingMode.MEAN:
                    pooled = pooled / lengths.clamp(min=1).unsqueeze(1)
                own = (
                    inputs["indices"][bags[0] : bags[-1]],
                    pooled.repeat_interleave(lengths, dim=0),
                )
                parts.setdefault(table, []).append(own)
            for table, features in parts.items():
                ids, each = map(torch.cat, zip(*features, strict=True))
                rows, place = torch.unique(ids, return_inverse=True)
                summed = each.new_zeros(len(rows), each.shape[1]).index_add_(0, place, each)
                self._update(shards[table], rows, summed)
        self._gradients.clear()

    def _update(self, shard: _Shard, rows: torch.Tensor, gradient: torch.Tensor) -> None:
        weight, first, second = shard
        group = self.param_groups[0]
        moment = first[rows].lerp_(gradient, 1 - _BETAS[0])
        square = second[rows].lerp_(gradient.square(), 1 - _BETAS[1])
        first[rows], second[rows] = moment, square
        corrections = [1 - beta**self.steps for beta in _BETAS]
        root = square.sqrt_().div_(math.sqrt(corrections[1])).add_(group["eps"])
        rate = -group["lr"] / corrections[0]
        if weight.dtype == torch.float32:
            weight.index_add_(0, rows, moment.div_(root), alpha=rate)
        else:  # added before it is rounded
            moved = weight[rows].float().add_(moment.div_(root), alpha=rate)
            weight[rows] = moved.to(weight.dtype)

    def _after_forward(
        self, shards: list[_Shard], lookup: Lookup, args: Any, inputs: Any, output: torch.Tensor
    ) -> None:
        if output.requires_grad:  # not in an evaluation

            def after_backward(gradient: torch.Tensor) -> None:
                self._gradients.append((lookup, shards, inputs, gradient))

            output.register_hook(after_backward)


#: Weights and both moments of one shard: views of the memory that the state dicts hold.
_Shard = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _zeros_like(weight: ShardedTensor) -> ShardedTensor:
    moment = copy.copy(weight)
    moment._metadata = copy.deepcopy(weight.metadata())
    moment._metadata.tensor_properties.dtype = torch.float32  # of float16 tables, too
    moment._local_shards = [
        Shard(torch.zeros_like(shard.tensor, dtype=torch.float32), shard.metadata)
        for shard in weight.local_shards()
    ]
    return moment
