"""Batches from Merlin's own loader, ``merlin.dataloader.torch.Loader``, one stream per rank.

Merlin reads the partitions and cuts them into batches; the tensors of its ``(features, labels)``
become the batch that :class:`nvt_loader.KJTLoader` delivers, with the same checks of each value.
What would end in a hang or lose rows is decided here: which rank gets which partitions, and from
their rows, before an epoch, how many batches to ask Merlin's queue for. See docs/loader.md.

Nothing of this has run on a card.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import nvt_torchrec.nvt_compat  # noqa: F401

import torch
from merlin.dataloader.torch import Loader
from merlin.io import Dataset as MerlinDataset
from merlin.schema import Tags
from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import options
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cpu.blocks import BatchFactory, FlatBlock, JaggedBlock, empty_block
from nvt_torchrec.nvt_loader.cuda.builders import PinnedBuilder
from nvt_torchrec.nvt_loader.cuda.device_rows import DeviceChecker, DeviceRows, arrange_rows
from nvt_torchrec.nvt_loader.epoch import EpochIterator, Position
from nvt_torchrec.nvt_loader.parquet import dataset as datasets
from nvt_torchrec.nvt_loader.parquet.checks import FILL_REMEDY
from nvt_torchrec.nvt_loader.parquet.files import ParquetFiles

log = logging.getLogger(__name__)

#: What errors name instead of a directory where the caller has made the Loader.
_UNKNOWN = "the data of Merlin's Loader"
#: Partitions that a Loader holds: one that is decoded, one in its queue, and the one that batches
#: are cut from, each as a frame and as tensors.
_HELD_PARTITIONS = 6
#: Seconds after which its thread looks whether it has been stopped while its queue is full.
_PUT_SECONDS = 0.01


class MerlinLoader:
    """The batches of one rank, read by Merlin's Loader.

    They are those of :class:`nvt_loader.KJTLoader`, without histories. Each ``iter()`` is an epoch
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
        self._rank, self._ranks = loader.global_rank, loader.global_size
        self._loader, self._size, self._limit = loader, loader.batch_size, limit_batches
        given = {"rank": self._rank, "world_size": self._ranks, "batch_size": self._size}
        options.check_arguments(given)
        self._dataset = dataset = dataset or _describe(loader)
        self._source = torch.device("cpu" if loader.device == "cpu" else f"cuda:{loader.device}")
        self._device = options.choose_device(device or self._source)
        self._checker = DeviceChecker(dataset, self._source)
        self._make_batch = BatchFactory(dataset.schema.categorical, self._device)
        self._partition_rows = _count_rows(loader.dataset)
        partitions = assign_partitions(self._partition_rows, self._ranks)
        self._partitions = partitions[self._rank]
        rows = [sum(self._partition_rows[part] for part in own) for own in partitions]
        minimum = self._size if loader.drop_last else 1  # of a batch
        self._rank_rows = [count - count % minimum for count in rows]
        self._current = Position(0)
        if self._rank == 0 and max(self._rank_rows) > 2 * min(self._rank_rows):
            log.warning(
                "Merlin's Loader gives ranks whole partitions, here of %s rows: some steps have "
                "rows on some ranks only; write more row groups, or read by KJTLoader",
                " and ".join(f"{count:,}" for count in sorted({*self._rank_rows})),
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
    ) -> MerlinLoader:
        """Make a Loader of parquet files, with a partition for each row group.

        The number of partitions is otherwise a share of the machine's memory, which may differ
        between ranks. The arguments are those of :class:`nvt_loader.KJTLoader`.

        Raises:
            BadInputError, SchemaError, SettingsError: As ``KJTLoader``.
        """
        dataset = datasets.read_dataset(data, None, label, table_sizes)
        options.check_manifest(dataset)
        files = dataset.files
        assert files is not None
        target = options.choose_device(device)
        described = TensorflowMetadata.from_json(json.dumps(dataset.stored.to_dict()))
        source = MerlinDataset(
            [str(files.path(file)) for file in range(len(files.paths))],
            engine="parquet",
            row_groups_per_part=1,
            cpu=True if target.type == "cpu" else None,  # None: unless there is no cuDF
            schema=described.to_merlin_schema(),
        )
        ranks = {"global_size": world_size, "global_rank": rank}
        loader = Loader(source, batch_size, drop_last=drop_last, device=target.index, **ranks)
        return cls(loader, limit_batches=limit_batches, device=target, dataset=dataset)

    @property
    def num_rows(self) -> int:
        """Rows of the data, over all ranks."""
        return sum(self._partition_rows)

    @property
    def device_bytes(self) -> int:
        """About the most bytes of a GPU that an iterator takes; 0 on a CPU."""
        rows = _HELD_PARTITIONS * max(self._partition_rows, default=0)
        return 0 if self._device.type == "cpu" else int(rows * self._dataset.batch_row_bytes)

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank."""
        steps = -(-max(self._rank_rows) // self._size)
        return steps if self._limit is None else min(steps, self._limit)

    def step_rows(self, step: int) -> list[int]:
        """Return the rows that each rank gets in a step."""
        return [min(max(rows - step * self._size, 0), self._size) for rows in self._rank_rows]

    def __iter__(self) -> EpochIterator:
        """Return an iterator over the next epoch."""
        options.refuse_workers(self)
        if self._dataset.files is not None:
            self._dataset.files.check()
        self._current = Position(self._current.epoch + 1)
        kind = CpuBuilder if self._device.type == "cpu" else PinnedBuilder
        made = self._blocks(), kind(self._dataset, self._device), self._make_batch
        return EpochIterator(*made, self._current, lambda _: None, lambda _: None)

    def check_epoch(self) -> None:
        """Compare the rows that all ranks' newest iterators delivered with the plan (collective).

        Raises:
            SchemaError: On every rank, if the sum is another.
        """
        planned = sum(min(rows, len(self) * self._size) for rows in self._rank_rows)
        options.check_sum(self._current.rows, planned, self._ranks)

    def _blocks(self) -> Iterator[tuple[slice, FlatBlock | JaggedBlock]]:
        """Yield a block for each step: the iterator's thread calls Merlin's conversions."""
        empty = empty_block(self._dataset, 1, self._device)
        with self._start() as batches:  # ends its thread at the end
            for step in range(len(self)):
                rows = self.step_rows(step)[self._rank]
                yield slice(0, 1), self._next_block(batches) if rows else empty

    def _start(self) -> Any:
        """Start a copy of the Loader on this rank's partitions.

        A copy, because a Loader keeps its queue, and so partitions in the order of its first epoch;
        with ``shuffle`` it reorders the array of their numbers in place.
        """
        loader = copy.copy(self._loader)
        loader._set_epochs(1)  # it makes a new queue
        # Merlin refuses to read none; a rank without any asks for no batch
        loader.indices = loader.array_lib().asarray(self._partitions or [0])
        loader.global_rank, loader.global_size, loader.drop_last = 0, 1, False
        # by default a microsecond: its thread keeps a core busy while the queue is full
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
            # Merlin, cuDF and CuPy work on the default stream
            default = torch.cuda.default_stream(self._source)
            torch.cuda.current_stream(self._source).wait_stream(default)
        labels = labels if isinstance(labels, dict) else {self._dataset.schema.label: labels}
        # copies of all values, and a check that waits for them: then Merlin's memory may go
        rows = self._checker.checked(self._copy({**features, **labels}), self._dataset.source.name)
        where = torch.arange(rows.rows, device=rows.ids.device).view(1, -1)
        return arrange_rows(self._dataset, [rows], where)

    def _copy(self, columns: dict[str, torch.Tensor]) -> DeviceRows:
        """Copy the tensors of a batch."""
        schema = self._dataset.schema
        parts = [columns[name].view(-1).float() for name in schema.floats]
        floats, rows = torch.stack(parts, 1), len(parts[0])
        single = [name for name in schema.categorical if name not in schema.multi_hot]
        ids = [self._ids(columns, name) for name in single]
        lists = []
        for name in schema.multi_hot:
            values = self._ids(columns, name if name in columns else f"{name}__values")
            even = torch.arange(rows + 1) * (len(values) // rows)  # of lists of one length
            offsets = columns.get(f"{name}__offsets", even)
            lists.append((offsets.to(values.device, copy=True), values.clone()))
        stacked = torch.stack(ids, 1) if ids else floats[:, :0].int()
        return DeviceRows(rows, floats, stacked, tuple(lists))

    def _ids(self, columns: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        ids = columns[name].view(-1)
        if ids.is_floating_point():  # pandas' nulls
            raise SchemaError(
                f"{self._dataset.source.name}: column {name} holds nulls", FILL_REMEDY
            )
        return ids if ids.dtype == torch.int32 else ids.long()


def assign_partitions(rows: list[int], ranks: int) -> list[list[int]]:
    """Divide partitions among ranks so that they have about as many rows, ascending in each rank.

    Partitions without rows are left out: Merlin fails on a first one without.
    """
    own: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0] * ranks
    for part in sorted(filter(rows.__getitem__, range(len(rows))), key=lambda part: -rows[part]):
        rank = sums.index(min(sums))
        own[rank].append(part)
        sums[rank] += rows[part]
    return [sorted(parts) for parts in own]


def _count_rows(dataset: MerlinDataset) -> list[int]:
    """Return the rows of each partition: from the footers, or by making each."""
    rows = getattr(dataset, "partition_lens", None)  # frames have none
    return rows or dataset.to_ddf().map_partitions(len).compute(scheduler="synchronous").tolist()


def _describe(loader: Loader) -> datasets.Dataset:
    """Return the columns and table sizes of a Loader's batches; its files are not known."""
    schema = loader.output_schema + loader.input_schema.select_by_tag(Tags.TARGET)
    value = json.loads(TensorflowMetadata.from_merlin_schema(schema).to_json())
    stored = dataclasses.replace(TableSchema.from_dict(value, _UNKNOWN), histories=())
    read = datasets.columns_to_read(stored)
    return datasets.Dataset(ParquetFiles(_UNKNOWN, read), stored, read)
