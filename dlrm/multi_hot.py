"""Several ids per row, made of one: heavier lookups for benchmarks, from any one-hot data.

facebookresearch/dlrm draws, for every row of every table, the further ids once and keeps them: as
much memory as the ids of all tables times their sizes. Here they are a function of column and id,
computed when a batch is used, so nothing is kept, every rank, epoch and evaluation sees the same
ids, and so does a model that is loaded to score.
"""

from __future__ import annotations

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.config import ModelConfig

#: Of the Pareto distribution of the further ids (type II, scale 1), as dlrm_main has it.
_ALPHA = 0.25
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as SplitMix64 adds it (Steele et al. 2014)
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685))


class MultiHot:
    """Makes ``multi_hot_sizes[f]`` ids of the one id that feature f has in each row.

    The first is the id itself; the others are drawn, by a hash of (f, id, number), from all rows
    of the table: evenly, or as ``floor(x) mod rows`` with x from the Pareto distribution.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._sizes = config.multi_hot_sizes
        self._pareto = config.multi_hot_distribution_type == "pareto"
        sizes = torch.tensor(self._sizes)
        self._feature = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        first = torch.cumsum(sizes, 0) - sizes
        self._number = torch.arange(len(self._feature)) - first[self._feature]
        self._rows = torch.tensor(config.num_embeddings)[self._feature].unsqueeze(1)

    def batch(self, batch: Batch) -> Batch:
        """The same rows with all their ids. The batch must have one id per feature and row."""
        return Batch(batch.dense_features, self.ids(batch.sparse_features), batch.labels)

    def ids(self, one: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The ids of all features, on the device and in the dtype of ``one``."""
        values = one.values()
        keys, rows = one.keys(), one.stride()
        self._to(values.device)
        ids = values.view(len(keys), rows).long()[self._feature]
        further = self._drawn(ids) % self._rows
        ids = torch.where((self._number == 0).unsqueeze(1), ids, further).to(values.dtype)
        parts = torch.split(ids, list(self._sizes))
        lengths = torch.tensor(self._sizes, dtype=torch.int32, device=values.device)
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([part.t().reshape(-1) for part in parts]),
            lengths=lengths.repeat_interleave(rows),
            stride=rows,
        )

    def _drawn(self, ids: torch.Tensor) -> torch.Tensor:
        """One number ≥ 0 per slot and row, int64 [slots, rows]."""
        slot = (self._feature * 1_000_003 + self._number).unsqueeze(1)
        mixed = _mix(_mix(ids) + slot * _GOLDEN)
        if not self._pareto:
            return mixed & 0x7FFF_FFFF_FFFF_FFFF
        share = ((mixed >> 11) & ((1 << 53) - 1)).double().add(1).mul(2.0**-53)  # in (0, 1]
        return (share.pow(-1 / _ALPHA) - 1).clamp(max=2.0**62).long()

    def _to(self, device: torch.device) -> None:
        if self._feature.device != device:
            self._feature = self._feature.to(device)
            self._number, self._rows = self._number.to(device), self._rows.to(device)


def _mix(values: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer; int64 wraps around as uint64 does."""
    for shift, factor in _MIX:
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Right by ``by`` bits, with zeros from the left."""
    return (values >> by) & ((1 << (64 - by)) - 1)
