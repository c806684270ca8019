"""Load batches with Merlin's own loader, ``merlin.dataloader.torch.Loader``, one stream per rank.

Merlin reads the partitions and cuts them into batches. The tensors of its ``(features, labels)``
become the batches that :class:`nvt_loader.KJTLoader` delivers, and every value is checked in the
same way. Two decisions are made here before each epoch, because Merlin's own would hang or lose
rows (docs/loader.md): the partitions of each rank, and the number of batches to take from Merlin's
queue.

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

#: The name of the data in errors if the caller made the Loader, whose files are unknown.
_UNKNOWN = "the data of Merlin's Loader"
#: The number of partitions that a Loader holds at once: the one being decoded, the one in its
#: queue, and the one being cut into batches, each as a frame and as tensors.
_HELD_PARTITIONS = 6
#: The interval, in seconds, at which the Loader's thread checks whether its full queue has room
#: again. Merlin's default is a microsecond, which keeps a core busy.
_PUT_SECONDS = 0.01


class MerlinLoader:
    """The training batches of one rank, read by Merlin's Loader.

    The batches have the same content as those of :class:`nvt_loader.KJTLoader`, but without
    histories, and without vectors if the caller made the Loader. Each ``iter()`` is a new epoch. It
    delivers every row once over all ranks, in the same number of steps on each rank. Ranks get
    whole partitions, so in the last steps some ranks may get smaller batches than others, or empty
    ones. There is no state and no seed.

    Args:
        loader: The Loader, which must not be iterated at the same time. Its ``global_rank`` and
            ``global_size`` are the rank and the number of ranks, but its own division of the
            partitions is not used. An epoch is one pass over its data.
        limit_batches: The maximum number of steps of an epoch.
        device: The device of the batches; by default the device of the Loader's tensors.
        dataset: The files and columns to read, from
            :func:`nvt_loader.parquet.dataset.read_dataset`; by default the columns of the Loader's
            schema.

    Raises:
        SchemaError: The Loader's schema has no label, or a column without a table size.
        SettingsError: The Loader's rank or batch size is out of range.
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
        self._rank = loader.global_rank
        self._ranks = loader.global_size
        self._size = loader.batch_size
        self._limit = limit_batches
        options.check_arguments(
            {"rank": self._rank, "world_size": self._ranks, "batch_size": self._size}
        )
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
                "Merlin's Loader gives whole partitions to each rank, here %s rows: in some steps "
                "only some ranks have rows; write more row groups, or use KJTLoader",
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
        """Make a Loader of parquet files, with one partition per row group.

        Merlin would derive the size of partitions from the machine's memory, which may differ
        between ranks. The arguments are the same as for :class:`nvt_loader.KJTLoader`.

        Raises:
            BadInputError, SchemaError, SettingsError: As for ``KJTLoader``.
        """
        dataset = datasets.read_dataset(data, None, label, table_sizes, read_vectors=read_vectors)
        options.check_manifest(dataset)
        files = dataset.files
        assert files is not None
        target = options.choose_device(device)
        metadata = TensorflowMetadata.from_json(json.dumps(dataset.stored.to_dict()))
        source = MerlinDataset(
            [str(files.find_path(file)) for file in range(len(files.paths))],
            engine="parquet",
            row_groups_per_part=1,
            cpu=True if target.type == "cpu" else None,  # None: on the GPU if cuDF is installed
            schema=metadata.to_merlin_schema(),
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
        """The number of rows of the data over all ranks."""
        return sum(self._partition_rows)

    @property
    def device_bytes(self) -> int:
        """The approximate maximum number of bytes of GPU memory that an iterator takes.

        It is 0 on a CPU.
        """
        if self._device.type == "cpu":
            return 0
        rows = _HELD_PARTITIONS * max(self._partition_rows, default=0)
        return int(rows * self._dataset.batch_row_bytes)

    def __len__(self) -> int:
        """Return the number of steps of an epoch, the same on every rank."""
        steps = math.ceil(max(self._rank_rows) / self._size)
        return steps if self._limit is None else min(steps, self._limit)

    def step_rows(self, step: int) -> list[int]:
        """Return the number of rows that each rank gets in a step."""
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
            """Keep no state; ``check_epoch`` counts the rows."""

        return EpochIterator(
            self._build_blocks(), builder, self._make_batch, self._current, ignore, ignore
        )

    def check_epoch(self) -> None:
        """Compare the rows that the newest iterators of all ranks delivered with the plan.

        This is a collective operation.

        Raises:
            SchemaError: The total is not the planned number of rows. All ranks raise it.
        """
        planned = sum(min(rows, len(self) * self._size) for rows in self._rank_rows)
        options.check_sum(self._current.rows, planned, self._ranks)

    def _build_blocks(self) -> Iterator[tuple[slice, FlatBlock | JaggedBlock]]:
        """Yield a block for each step. The iterator's thread runs this, and so Merlin's code."""
        empty = make_empty_block(self._dataset, 1, self._device)
        if self._dataset.vectors is not None:
            inputs = count_inputs(self._dataset.schema.vectors)
            vectors = torch.empty(1, 0, inputs, device=self._device)
            empty = dataclasses.replace(empty, dense_vectors=vectors)
        with self._start() as batches:  # leaving the context ends Merlin's thread
            for step in range(len(self)):
                if self.step_rows(step)[self._rank]:
                    yield slice(0, 1), self._build_next_block(batches)
                else:
                    yield slice(0, 1), empty

    def _start(self) -> Any:
        """Start a copy of the Loader on this rank's partitions.

        A Loader cannot be started twice: it keeps its queue with partitions in the order of the
        first epoch, and ``shuffle`` permutes the array of partition indices in place.
        """
        loader = copy.copy(self._loader)
        loader._set_epochs(1)  # makes a new queue
        # Merlin refuses an empty list. A rank without partitions takes no batch, so any index does.
        loader.indices = loader.array_lib().asarray(self._partitions or [0])
        # The partitions are already only this rank's, and step_rows takes drop_last into account.
        loader.global_rank = 0
        loader.global_size = 1
        loader.drop_last = False
        loader._buff.put_wait = _PUT_SECONDS
        return iter(loader)

    def _build_next_block(self, batches: Any) -> FlatBlock | JaggedBlock:
        """Make a block from Merlin's next batch.

        Raises:
            BadInputError: Merlin cannot read the data.
            SchemaError: A value is null, infinite or NaN, or an id is outside its table.
        """
        try:
            features, labels = next(batches)
        except Exception as error:
            raise BadInputError(
                f"{self._dataset.source.name}: Merlin's Loader fails: {error!r}",
                "read the data with KJTLoader or `python -m etl check`, which name the file, row "
                "group and column",
            ) from error
        if self._source.type == "cuda":
            # Merlin, cuDF and CuPy work on the default stream.
            default = torch.cuda.default_stream(self._source)
            torch.cuda.current_stream(self._source).wait_stream(default)
        if not isinstance(labels, dict):
            labels = {self._dataset.schema.label: labels}
        # The rows are copied, and the check waits for the copies, because Merlin frees its memory.
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
        """Return the vectors of a batch, float32 [1, rows, all inputs], on the batch's device.

        Raises:
            SchemaError: The number of a vector is outside its store, or a value is not finite.
            BadInputError: A file of a store has been modified.
        """
        stores.check()
        numbers = []
        for vectors in stores.vectors:
            numbers.append(self._find_ids(columns, vectors.pointer).cpu().numpy())
        taken = take_vectors(self._dataset, np.stack(numbers))
        return torch.from_numpy(taken).unsqueeze(0).to(self._source)

    def _copy(self, columns: dict[str, torch.Tensor]) -> DeviceRows:
        """Copy the tensors of a batch into rows."""
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
                # If all lists have the same length, Merlin returns a matrix without offsets.
                values = self._find_ids(columns, name)
                offsets = torch.arange(rows + 1) * (len(values) // rows)
            else:
                values = self._find_ids(columns, f"{name}__values")
                offsets = columns[f"{name}__offsets"]
            lists.append((offsets.to(values.device, copy=True), values.clone()))
        return DeviceRows(rows, floats, ids, tuple(lists))

    def _find_ids(self, columns: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """Return the ids of a column, flat, as int32 or int64. Raises SchemaError for nulls."""
        ids = columns[name].view(-1)
        if ids.is_floating_point():  # pandas turns integers with nulls into floats
            raise SchemaError(
                f"{self._dataset.source.name}: column {name} holds nulls", FILL_REMEDY
            )
        return ids if ids.dtype == torch.int32 else ids.long()


def assign_partitions(rows: list[int], ranks: int) -> list[list[int]]:
    """Divide partitions among ranks so that all ranks have about the same number of rows.

    Partitions without rows are left out, because Merlin fails if the first one is empty.

    Args:
        rows: The number of rows of each partition.
        ranks: The number of ranks.

    Returns:
        The partitions of each rank, in ascending order.
    """
    own: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    filled = [part for part, count in enumerate(rows) if count]
    # Assign the largest partitions first, each to the rank that has the fewest rows so far.
    for part in sorted(filled, key=lambda part: -rows[part]):
        rank = sums.index(min(sums))
        own[rank].append(part)
        sums[rank] += rows[part]
    return [sorted(parts) for parts in own]


def _count_rows(dataset: MerlinDataset) -> list[int]:
    """Return the number of rows of each partition: from the footers, or by computing the rows."""
    rows = getattr(dataset, "partition_lens", None)  # missing for a dataset of frames
    if rows:
        return rows
    return dataset.to_ddf().map_partitions(len).compute(scheduler="synchronous").tolist()


def _describe(loader: Loader) -> datasets.Dataset:
    """Return the columns and table sizes of a Loader's batches, as a dataset without files."""
    schema = loader.output_schema + loader.input_schema.select_by_tag(Tags.TARGET)
    value = json.loads(TensorflowMetadata.from_merlin_schema(schema).to_json())
    stored = TableSchema.from_dict(value, _UNKNOWN)
    stored = dataclasses.replace(stored, histories=(), vectors=())
    read = datasets.select_labels(stored)
    return datasets.Dataset(ParquetFiles(_UNKNOWN, read), stored, read)
