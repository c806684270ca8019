"""The trained DLRM, arranged for scoring: one table of all embeddings, plain matrix products.

The model is the one of :mod:`dlrm.model`, with the same weights and the same arithmetic (but for
what float16 or int8 tables round). TorchRec
looks tables up one by one, through a KeyedJaggedTensor with a key for each; for one row that costs
more than everything else together. Here all tables lie one after the other in one tensor, and one
lookup serves all columns. Nothing of TorchRec is imported.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from torch.nn import functional

from clicklog.rows import Ragged
from inference.tables import Table
from workflows.compiled.workflow import Ids

#: Weight [out, in] and bias [out] of a linear layer.
Layer = tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class ServingModel:
    """A DLRM (Naumov et al. 2019, arXiv:1906.00091) whose tables are one.

    Attributes:
        table: the rows of all tables.
        first: int64 [categorical columns], where each column's rows begin in ``table``.
        bottom: layers for the dense columns, each followed by a ReLU.
        top: layers above the interaction, all but the last followed by a ReLU.
        pairs: int64, which products of two vectors are kept: i < j, as i · (columns + 1) + j.
    """

    table: Table
    first: torch.Tensor
    bottom: list[Layer]
    top: list[Layer]
    pairs: torch.Tensor

    @classmethod
    def make(
        cls, table: Table, sizes: tuple[int, ...], bottom: list[Layer], top: list[Layer]
    ) -> ServingModel:
        """Of the weights; ``sizes`` are the rows of each column's table."""
        vectors = len(sizes) + 1
        low, high = torch.triu_indices(vectors, vectors, offset=1)
        first = torch.tensor([0, *sizes[:-1]], dtype=torch.int64).cumsum(0)
        device = table.device
        return cls(table, first.to(device), bottom, top, (low * vectors + high).to(device))

    def to(self, device: torch.device) -> ServingModel:
        """On another device; tensors that are there already are shared."""

        def moved(layers: list[Layer]) -> list[Layer]:
            return [(weight.to(device), bias.to(device)) for weight, bias in layers]

        return ServingModel(
            self.table.to(device),
            self.first.to(device),
            moved(self.bottom),
            moved(self.top),
            self.pairs.to(device),
        )

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.table.device

    def lookup(self, ids: np.ndarray | list[Ids]) -> torch.Tensor:
        """Embeddings, float32 [n, categorical columns, embedding dim].

        Args:
            ids: as in :class:`workflows.compiled.EncodedRows`: int32 [categorical columns, n], or
                by column int32 [n] or lists. A list's embeddings are summed, as in training.
        """
        if isinstance(ids, np.ndarray):
            rows = torch.from_numpy(ids).to(self.device).T + self.first
            return self.table.rows(rows)
        bags, begins, n = [], [], len(ids[0])
        at = 0
        for values, first in zip(ids, self.first.tolist(), strict=True):
            offsets = np.arange(n) if not isinstance(values, Ragged) else values.offsets[:-1]
            flat = values.values if isinstance(values, Ragged) else values
            begins.append(offsets + at)
            bags.append(flat + np.int64(first))
            at += len(flat)
        rows = torch.from_numpy(np.concatenate(bags)).to(self.device)
        offsets = torch.from_numpy(np.concatenate(begins, dtype=np.int64)).to(self.device)
        sums = self.table.sums(rows, offsets)
        return sums.view(len(ids), n, -1).transpose(0, 1)

    def logits(self, dense: np.ndarray, embedded: torch.Tensor) -> torch.Tensor:
        """Logits, float32 [n], of dense columns float32 [dense columns, n] and embeddings."""
        return self.interact(torch.from_numpy(dense).to(self.device).T, embedded)

    def interact(self, x: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """As :meth:`logits`, of dense features float32 [n, dense columns]."""
        for weight, bias in self.bottom:
            x = functional.linear(x, weight, bias).relu_()
        vectors = torch.cat([x.unsqueeze(1), embedded], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        y = torch.cat([x, products.index_select(1, self.pairs)], 1)
        for weight, bias in self.top[:-1]:
            y = functional.linear(y, weight, bias).relu_()
        weight, bias = self.top[-1]
        return functional.linear(y, weight, bias).squeeze(-1)
