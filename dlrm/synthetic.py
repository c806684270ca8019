"""Random rows in memory, for measuring training without a disk, a decoder or data.

Features and labels are independent, so nothing can be learned from them. A few batches are made
once, on the device, and repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torchrec.datasets.utils import Batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.schema import TableSchema

#: The number of different batches, as in facebookresearch/dlrm.
POOL = 10
#: The share of the rows with label 1.
_CLICKS = 0.25


class SyntheticLoader:
    """One rank's batches, with the methods of :class:`nvt_loader.KJTLoader` that training uses.

    Args:
        schema: The names of the columns and the sizes of the tables.
        rows: The rows of an epoch, over all ranks; rounded down to full steps, but at least one.
        batch_size: The rows of a batch on this rank.
        rank: This rank.
        world_size: The number of ranks.
        seed: The seed of the rows; ranks have different rows.
        limit_batches: The most steps of an epoch, if any.
        device: The device of the batches.
    """

    def __init__(
        self,
        schema: TableSchema,
        rows: int,
        batch_size: int,
        *,
        rank: int,
        world_size: int,
        seed: int,
        limit_batches: int | None,
        device: torch.device,
    ) -> None:
        self.schema = schema
        self._steps = max(1, rows // (batch_size * world_size))
        if limit_batches is not None:
            self._steps = min(self._steps, limit_batches)
        self.num_rows = self._steps * batch_size * world_size
        self._first = 0
        generator = torch.Generator().manual_seed((seed * world_size + rank) % 2**63)
        self._pool = [
            self._draw(batch_size, generator).to(device) for _ in range(min(POOL, self._steps))
        ]

    def _draw(self, size: int, generator: torch.Generator) -> Batch:
        ids = [
            torch.randint(rows, (size,), generator=generator, dtype=torch.int32)
            for rows in self.schema.table_sizes
        ]
        keys = list(self.schema.categorical)
        return Batch(
            dense_features=torch.randn(size, len(self.schema.dense), generator=generator),
            sparse_features=KeyedJaggedTensor(
                keys=keys,
                values=torch.cat(ids),
                lengths=torch.ones(size * len(keys), dtype=torch.int32),
                stride=size,
            ),
            labels=(torch.rand(size, generator=generator) < _CLICKS).float(),
        )

    def map(self, function: Callable[[Batch], Batch]) -> SyntheticLoader:
        """Apply ``function`` to the batches and return the loader."""
        self._pool = [function(batch) for batch in self._pool]
        return self

    @property
    def device_bytes(self) -> int:
        """The bytes of a GPU that the batches take; 0 on a CPU."""
        tensors = [
            tensor
            for batch in self._pool
            for tensor in (batch.dense_features, batch.labels, batch.sparse_features.values())
        ]
        return sum(tensor.nbytes for tensor in tensors if tensor.is_cuda)

    def __len__(self) -> int:
        """Return the steps of an epoch."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the next epoch, or over the rest of the one of a loaded state."""
        first, self._first = self._first, 0
        return (self._pool[i % len(self._pool)] for i in range(first, self._steps))

    def check_epoch(self) -> None:
        """Do nothing: no row is read that could be missing."""

    def state_dict(self, trained_steps: int) -> dict[str, Any]:
        """Return how far training is in an epoch."""
        return {"synthetic_rows": self.num_rows, "step": trained_steps % self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Begin the next epoch at the step of ``state``.

        Raises:
            SettingsError: The state is of other data.
        """
        if state.get("synthetic_rows") != self.num_rows:
            raise SettingsError(
                "the checkpoint was trained on other data than these synthetic rows",
                "resume with the same --dataset_type, --synthetic_dataset_num_entries and batch",
            )
        self._first = state["step"]


def synthetic_schema(dense: int, table_sizes: tuple[int, ...]) -> TableSchema:
    """Return a schema with the columns ``int_0 …`` and ``cat_0 …``, as in the Criteo logs."""
    return TableSchema(
        "label",
        tuple(f"int_{i}" for i in range(dense)),
        tuple(f"cat_{i}" for i in range(len(table_sizes))),
        table_sizes,
    )
