"""Make several ids per row out of one, for benchmarks of multi-hot lookups on one-hot data.

facebookresearch/dlrm draws the additional ids once for every row of every table and keeps them in
memory. Here they are a hash of column and id, computed when a batch is used, so nothing is kept,
and every rank, epoch, evaluation and loaded model gets the same ids.
"""

from __future__ import annotations

import dataclasses

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.dlrm.config import ModelConfig

#: The shape of dlrm_main's Pareto distribution (type II, scale 1) of the additional ids.
_ALPHA = 0.25
_GOLDEN = -7046029254386353131  # 2**64 / golden ratio, as SplitMix64 adds it (Steele et al. 2014)
_MIX = ((30, -4658895280553007687), (27, -7723592293110705685))


class MultiHot:
    """Make ``multi_hot_sizes[f]`` ids out of the one id that feature f has in each row.

    The first is the id itself. The others follow from a hash of (f, id, number) and are uniform
    over the rows of the table, or ``floor(x) mod rows`` with x from the Pareto distribution.
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
        """Return the batch with all ids; it must have one id per feature and row."""
        return dataclasses.replace(batch, sparse_features=self.ids(batch.sparse_features))

    def ids(self, one_hot: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return all ids of all features, on the device and in the dtype of ``one_hot``."""
        values = one_hot.values()
        keys, rows = one_hot.keys(), one_hot.stride()
        self._to(values.device)
        ids = values.view(len(keys), rows).long()[self._feature]
        additional = self._hashes(ids) % self._rows
        ids = torch.where((self._number == 0).unsqueeze(1), ids, additional).to(values.dtype)
        parts = torch.split(ids, list(self._sizes))
        lengths = torch.tensor(self._sizes, dtype=torch.int32, device=values.device)
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([part.t().reshape(-1) for part in parts]),
            lengths=lengths.repeat_interleave(rows),
            stride=rows,
        )

    def _hashes(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a number ≥ 0 per slot and row, int64 [slots, rows]."""
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
    """Apply SplitMix64's finalizer; int64 overflows as uint64 does."""
    for shift, factor in _MIX:
        values = (values ^ _shifted(values, shift)) * factor
    return values ^ _shifted(values, 31)


def _shifted(values: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right by ``by`` bits, filling with zeros."""
    return (values >> by) & ((1 << (64 - by)) - 1)
