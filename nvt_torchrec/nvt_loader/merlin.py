"""Batches from Merlin's own loader, ``merlin.dataloader.torch.Loader``, one stream per rank.

Merlin reads the partitions and cuts them into batches; the tensors of its ``(features, labels)``
become the batch that :class:`nvt_loader.KJTLoader` delivers, with the same checks of each value.
Two decisions are made here, before an epoch, because Merlin's would hang or lose rows: which rank
gets which partitions, and, from their rows, how many batches to ask its queue for. See
docs/loader.md.

This module has not been run on a GPU yet.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import torch
from merlin.dataloader.torch import Loader
from merlin.io import Dataset as MerlinDataset
from merlin.schema import Tags
from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import VectorStores, count_inputs
from nvt_torchrec.nvt_loader import options
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cpu.blocks import (
    BatchFactory,
    FlatBlock,
    JaggedBlock,
    make_empty_block,
)
from nvt_torchrec.nvt_loader.cpu.vector_blocks import take_vectors
from nvt_torchrec.nvt_loader.cuda.builders import PinnedBuilder
from nvt_torchrec.nvt_loader.cuda.device_rows import DeviceChecker, DeviceRows, arrange_rows
from nvt_torchrec.nvt_loader.epoch import EpochIterator, Position
from nvt_torchrec.nvt_loader.parquet import dataset as datasets
from nvt_torchrec.nvt_loader.parquet.checks import FILL_REMEDY
from nvt_torchrec.nvt_loader.parquet.files import ParquetFiles

log = logging.getLogger(__name__)

#: The name of the data in errors if the caller has made the Loader, whose files are not known.
_UNKNOWN = "the data of Merlin's Loader"
#: Partitions that a Loader holds at once: one that is decoded, one in its queue, and the one that
#: batches are cut from, each as a frame and as tensors.
_HELD_PARTITIONS = 6
#: How often, in seconds, the Loader's thread checks whether its full queue has room again. Merlin's
#: own setting is a microsecond, which keeps a core busy.
_PUT_SECONDS = 0.01


class MerlinLoader:
    """The batches of one rank, read by Merlin's Loader.

    They are those of :class:`nvt_loader.KJTLoader`, without histories, and without vectors if the
    caller has made the Loader. Each ``iter()`` is an epoch
    of its own, which delivers every row once over all ranks, in the same number of steps on each.
    Ranks get whole partitions, so that some may get smaller batches than others in the last steps,
    or empty ones. There is no state and no seed.

    Args:
        loader: The Loader, which must not be iterated meanwhile. Its ``global_rank`` and
            ``global_size`` are the rank and the number of ranks; partitions are divided anew. An
            epoch is one pass over its data.
        limit_batches: End each epoch after so many steps.
        device: Device of the batches; by default that of the Loader's tensors.
        dataset: The files that it reads and how, from
            :func:`nvt_loader.parquet.dataset.read_dataset`; by default as the Loader's schema says.

    Raises:
        SchemaError: The Loader's schema has no label, or a column without a table size.
        SettingsError: The Loader's rank or batch size is out of its range.
    """

    def __init__(
        self,
        loader: Loader,
        *,
        limit_batches: int | None = None,
        device: torch.device | str | None = None,
        dataset: datasets.Dataset | None = None,
    ) -> None:
        self._loader = loader
        self._rank, self._ranks = loader.global_rank, loader.global_size
        self._size, self._limit = loader.batch_size, limit_batches
        given = {"rank": self._rank, "world_size": self._ranks, "batch_size": self._size}
        options.check_arguments(given)
        self._dataset = _describe(loader) if dataset is None else dataset
        self._source = torch.device("cpu" if loader.device == "cpu" else f"cuda:{loader.device}")
        self._device = options.choose_device(device or self._source)
        self._checker = DeviceChecker(self._dataset, self._source)
        self._make_batch = BatchFactory(self._dataset.schema.categorical, self._device)
        self._partition_rows = _count_rows(loader.dataset)
        partitions = assign_partitions(self._partition_rows, self._ranks)
        self._partitions = partitions[self._rank]
        self._rank_rows = []
        for own in partitions:
            rows = sum(self._partition_rows[part] for part in own)
            if loader.drop_last:
                rows -= rows % self._size
            self._rank_rows.append(rows)
        self._current = Position(0)
        if self._rank == 0 and max(self._rank_rows) > 2 * min(self._rank_rows):
            log.warning(
                "Merlin's Loader gives ranks whole partitions, here of %s rows: some steps have "
                "rows on some ranks only; write more row groups, or read by KJTLoader",
                " and ".join(f"{rows:,}" for rows in sorted(set(self._rank_rows))),
            )

    @classmethod
    def from_split(
        cls,
        data: Any,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        table_sizes: Iterable[int] | None = None,
        limit_batches: int | None = None,
        label: str | Sequence[str] | None = None,
        read_vectors: bool = True,
    ) -> MerlinLoader:
        """Make a Loader of parquet files, with a partition for each row group.

        By default Merlin chooses the size of partitions by the machine's memory, which may differ
        between ranks. The arguments are those of :class:`nvt_loader.KJTLoader`.

        Raises:
            BadInputError, SchemaError, SettingsError: As ``KJTLoader``.
        """
        dataset = datasets.read_dataset(data, None, label, table_sizes, read_vectors=read_vectors)
        options.check_manifest(dataset)
        files = dataset.files
        assert files is not None
        target = options.choose_device(device)
        described = TensorflowMetadata.from_json(json.dumps(dataset.stored.to_dict()))
        source = MerlinDataset(
            [str(files.find_path(file)) for file in range(len(files.paths))],
            engine="parquet",
            row_groups_per_part=1,
            cpu=True if target.type == "cpu" else None,  # None: on the CPU only without cuDF
            schema=described.to_merlin_schema(),
        )
        loader = Loader(
            source,
            batch_size,
            drop_last=drop_last,
            device=target.index,
            global_size=world_size,
            global_rank=rank,
        )
        return cls(loader, limit_batches=limit_batches, device=target, dataset=dataset)

    @property
    def num_rows(self) -> int:
        """Rows of the data, over all ranks."""
        return sum(self._partition_rows)

    @property
    def device_bytes(self) -> int:
        """About the largest number of bytes of a GPU that an iterator takes; 0 on a CPU."""
        if self._device.type == "cpu":
            return 0
        rows = _HELD_PARTITIONS * max(self._partition_rows, default=0)
        return int(rows * self._dataset.batch_row_bytes)

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        steps = math.ceil(max(self._rank_rows) / self._size)
        return steps if self._limit is None else min(steps, self._limit)

    def step_rows(self, step: int) -> list[int]:
        """Return the rows that each rank gets in a step."""
        left = [max(rows - step * self._size, 0) for rows in self._rank_rows]
        return [min(rows, self._size) for rows in left]

    def __iter__(self) -> EpochIterator:
        """Return an iterator over the next epoch."""
        options.refuse_workers(self)
        if self._dataset.files is not None:
            self._dataset.files.check_unchanged()
        self._current = Position(self._current.epoch + 1)
        kind = CpuBuilder if self._device.type == "cpu" else PinnedBuilder
        builder = kind(self._dataset, self._device)

        def ignore(_position: Position) -> None:
            """There is no state to keep, and check_epoch counts the rows."""

        return EpochIterator(
            self._blocks(), builder, self._make_batch, self._current, ignore, ignore
        )

    def check_epoch(self) -> None:
        """Compare the rows that all ranks' newest iterators delivered with the plan (collective).

        Raises:
            SchemaError: On every rank, if the sum is another.
        """
        planned = sum(min(rows, len(self) * self._size) for rows in self._rank_rows)
        options.check_sum(self._current.rows, planned, self._ranks)

    def _blocks(self) -> Iterator[tuple[slice, FlatBlock | JaggedBlock]]:
        """Yield a block for each step: the iterator's thread calls Merlin's conversions."""
        empty = make_empty_block(self._dataset, 1, self._device)
        if self._dataset.vectors is not None:
            inputs = count_inputs(self._dataset.schema.vectors)
            vectors = torch.empty(1, 0, inputs, device=self._device)
            empty = dataclasses.replace(empty, dense_vectors=vectors)
        with self._start() as batches:  # leaving it ends Merlin's thread
            for step in range(len(self)):
                if self.step_rows(step)[self._rank]:
                    yield slice(0, 1), self._next_block(batches)
                else:
                    yield slice(0, 1), empty

    def _start(self) -> Any:
        """Start a copy of the Loader on this rank's partitions.

        A Loader cannot be started twice: it keeps its queue, and so partitions in the order of its
        first epoch, and with ``shuffle`` it reorders the array of their numbers in place.
        """
        loader = copy.copy(self._loader)
        loader._set_epochs(1)  # makes a new queue
        # Merlin refuses an empty list. A rank without partitions asks for no batch, so any will do.
        loader.indices = loader.array_lib().asarray(self._partitions or [0])
        # The partitions are this rank's already, and drop_last is part of step_rows.
        loader.global_rank, loader.global_size, loader.drop_last = 0, 1, False
        loader._buff.put_wait = _PUT_SECONDS
        return iter(loader)

    def _next_block(self, batches: Any) -> FlatBlock | JaggedBlock:
        """Make a block of Merlin's next batch.

        Raises:
            BadInputError: Merlin cannot read the data.
            SchemaError: A value is refused.
        """
        try:
            features, labels = next(batches)
        except Exception as error:
            raise BadInputError(
                f"{self._dataset.source.name}: Merlin's Loader fails: {error!r}",
                "KJTLoader names file, column and row group, and so does `python -m etl check`",
            ) from error
        if self._source.type == "cuda":
            # Merlin, cuDF and CuPy work on the default stream.
            default = torch.cuda.default_stream(self._source)
            torch.cuda.current_stream(self._source).wait_stream(default)
        if not isinstance(labels, dict):
            labels = {self._dataset.schema.label: labels}
        # After the copies, and a check that waits for them, Merlin's memory may be freed.
        rows = self._checker.check(self._copy({**features, **labels}), self._dataset.source.name)
        order = torch.arange(rows.rows, device=rows.ids.device).view(1, -1)
        block = arrange_rows(self._dataset, [rows], order)
        if self._dataset.vectors is None:
            return block
        vectors = self._gather_vectors(self._dataset.vectors, features)
        return dataclasses.replace(block, dense_vectors=vectors)

    def _gather_vectors(
        self, stores: VectorStores, columns: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Return the vectors of a batch, float32 [1, rows, all inputs], on its device.

        Raises:
            SchemaError: A number leads outside its store, or a value is not finite.
            BadInputError: A file of a store was written to.
        """
        stores.check()
        numbers = []
        for vectors in stores.vectors:
            numbers.append(self._find_ids(columns, vectors.pointer).cpu().numpy())
        taken = take_vectors(self._dataset, np.stack(numbers))
        return torch.from_numpy(taken).unsqueeze(0).to(self._source)

    def _copy(self, columns: dict[str, torch.Tensor]) -> DeviceRows:
        """Copy the tensors of a batch."""
        schema = self._dataset.schema
        floats = torch.stack([columns[name].view(-1).float() for name in schema.floats], 1)
        rows = len(floats)
        single = [name for name in schema.categorical if name not in schema.multi_hot]
        if single:
            ids = torch.stack([self._find_ids(columns, name) for name in single], 1)
        else:
            ids = floats[:, :0].int()
        lists = []
        for name in schema.multi_hot:
            if name in columns:
                # Merlin hands out lists of one length as a matrix, without offsets.
                values = self._find_ids(columns, name)
                offsets = torch.arange(rows + 1) * (len(values) // rows)
            else:
                values = self._find_ids(columns, f"{name}__values")
                offsets = columns[f"{name}__offsets"]
            lists.append((offsets.to(values.device, copy=True), values.clone()))
        return DeviceRows(rows, floats, ids, tuple(lists))

    def _find_ids(self, columns: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return the ids of a column, flat, as int32 or int64."""
        ids = columns[name].view(-1)
        if ids.is_floating_point():  # pandas turns integers with nulls into floats
            raise SchemaError(
                f"{self._dataset.source.name}: column {name} holds nulls", FILL_REMEDY
            )
        return ids if ids.dtype == torch.int32 else ids.long()


def assign_partitions(rows: list[int], ranks: int) -> list[list[int]]:
    """Divide partitions among ranks so that all have about as many rows.

    Partitions without rows are left out: Merlin fails if its first one is empty.

    Args:
        rows: The number of rows of each partition.
        ranks: The number of ranks.

    Returns:
        The partitions of each rank, in ascending order.
    """
    own: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    filled = [part for part, count in enumerate(rows) if count]
    # The largest first, each to the rank that has the fewest rows so far.
    for part in sorted(filled, key=lambda part: -rows[part]):
        rank = sums.index(min(sums))
        own[rank].append(part)
        sums[rank] += rows[part]
    return [sorted(parts) for parts in own]


def _count_rows(dataset: MerlinDataset) -> list[int]:
    """Return the number of rows of each partition: from the footers, or by making each."""
    rows = getattr(dataset, "partition_lens", None)  # a dataset of frames does not know them
    if rows:
        return rows
    return dataset.to_ddf().map_partitions(len).compute(scheduler="synchronous").tolist()


def _describe(loader: Loader) -> datasets.Dataset:
    """Return the columns and table sizes of a Loader's batches; its files are not known."""
    schema = loader.output_schema + loader.input_schema.select_by_tag(Tags.TARGET)
    value = json.loads(TensorflowMetadata.from_merlin_schema(schema).to_json())
    stored = TableSchema.from_dict(value, _UNKNOWN)
    stored = dataclasses.replace(stored, histories=(), vectors=())
    read = datasets.select_labels(stored)
    return datasets.Dataset(ParquetFiles(_UNKNOWN, read), stored, read)
