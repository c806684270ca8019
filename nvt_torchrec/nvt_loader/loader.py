"""The loader: parquet files of a split → one stream of TorchRec batches per rank.

Its interface follows Merlin's loader: ``batch_size``, ``shuffle``, ``drop_last``, ``device``,
``rank`` and ``world_size`` for ``global_rank`` and ``global_size``; ``len()``, ``map``,
``transforms``, ``input_schema``, ``output_schema``; and it reads the ``.merlin/schema.json`` that
Merlin writes. It does not inherit from merlin.dataloader's Loader, because every part of that was
measured to be slower or found to be wrong; docs/loader.md lists the defects.

The functions given to ``map`` and ``transforms`` take and return TorchRec batches, not frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from nvt_torchrec.base.device import fall_back
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.nvt_loader import loader_state, options
from nvt_torchrec.nvt_loader.cpu.block_builder import CpuBuilder
from nvt_torchrec.nvt_loader.cpu.blocks import BatchFactory, LoaderBatch
from nvt_torchrec.nvt_loader.cuda.builders import choose_builder
from nvt_torchrec.nvt_loader.epoch import EpochIterator, Order, Position, produce_blocks
from nvt_torchrec.nvt_loader.memory import Budget, Demand, divide_memory, estimate_device_bytes
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.nvt_loader.parquet.decoder import undersample_dataset
from nvt_torchrec.nvt_loader.plan import WINDOW_ROWS, Plan, choose_virtual_shards


class KJTLoader:
    """The training batches of one rank, from parquet files, a table or a custom source.

    Every ``iter()`` returns a new iterator over one epoch. It yields
    :class:`nvt_loader.cpu.blocks.LoaderBatch`, a :class:`torchrec.datasets.utils.Batch`, on
    ``device``:

    - ``dense_features``: float32 [B, dense columns];
    - ``sparse_features``: a KeyedJaggedTensor of stride B with int32 values, lengths and offsets.
      Its keys are the categorical columns in the order of the schema: multi-hot columns have any
      number of ids per row, all others one. They are followed by the columns of the histories, with
      keys ``NAME.COLUMN``: the ids of the newest ``max_events`` events before the row, oldest
      first;
    - ``labels``: float32 [B], or [B, labels] if several are read, from 0 to 1 (other values are
      refused);
    - ``weights``: float32 [B], the weights of the rows; None if the data have no weight column;
    - ``dense_vectors``: float32 [B, all inputs], the vectors of the rows
      (:mod:`nvt_torchrec.formats.vectors`); None if the data have none;
    - ``log_q_correction``: float32 [B] (docs/negatives.md); None if the data have none.

    Over all ranks, an epoch yields every row exactly once, in the same number of steps on each
    rank. B is ``batch_size`` except in the last step, whose rows are split evenly over the ranks;
    a rank may get an empty batch in it (B = 0), which is valid. ``drop_last`` leaves that step out,
    which affects different rows in each epoch. The global batch of each step depends on the data
    and on ``batch_size * world_size``, but not on the world size itself (:mod:`nvt_loader.plan`).
    Batches share memory with each other, so do not modify them in place.

    **Epochs.** The first ``iter()`` is epoch 0, and each later one is the next epoch, whether or
    not the previous epoch was finished. An iterator from which no batch was drawn does not count.
    :meth:`set_epoch` and :meth:`load_state_dict` choose the epoch and step of the next ``iter()``.
    The order depends on the seed and the epoch. Without shuffling, all epochs are equal, except for
    the rows that ``drop_last`` leaves out.

    **Order.** A batch takes rows from ``virtual_shards`` parts of the data.
    ``shuffle="row_groups"`` permutes the row groups; ``"rows"`` (or True) also permutes the rows
    within windows of ``shuffle_window`` rows. ``virtual_shards=1`` without shuffling keeps the
    order of the files, but then each rank decodes nearly all rows.

    **Errors** of the background thread are raised by ``next()``, and again by every later call. The
    threads of an iterator end when it is deleted. It is an error if an epoch delivers more or fewer
    rows than planned, or if a split does not have the number of rows in the ETL's manifest.

    Args:
        data: Parquet files: a directory such as ``OUT/criteo_binary/split/train``, a file, a glob,
            a URL that fsspec can open, or a list of these. Or an Arrow table, or an object that
            converts to one without a copy, such as a pandas or Polars frame. Or a
            :class:`nvt_loader.parquet.sources.Source`.
        batch_size: The number of rows of a batch *of this rank*.
        rank: The index of this rank, from 0.
        world_size: The number of ranks.
        shuffle: "none" (or False), "row_groups" or "rows" (or True). The order differs in every
            epoch.
        seed: The seed of the permutations, which must be the same on all ranks.
        drop_last: Whether to leave out the last step if it is not full.
        device: The device of the batches. None means the current CUDA device, or the CPU without
            one.
        virtual_shards: The number of parts of the data that a batch takes rows from, at most
            ``batch_size * world_size``; by default 8. Batches depend on it, but not on the world
            size. If it is a multiple of ``world_size``, no row is read by two ranks; otherwise
            ranks share virtual shards, which costs time and, if rows are shuffled, memory.
        shuffle_window: The number of rows of a shuffling window, over all virtual shards.
        schema: The columns; by default those of ``.merlin/schema.json`` next to the files. A schema
            allows data that the ETL did not write; other numeric types are converted.
        table_sizes: The number of rows of each embedding table, which replaces the schema's.
        undersampling_rate: The share of negative rows to keep; the same rows are kept in each
            epoch. If a model trained on them predicts p, the probability is
            ``p / (p + (1 - p) / rate)``.
        limit_batches: The maximum number of steps of an epoch.
        loader_memory: The maximum number of bytes for blocks, decoded columns and shuffling
            windows. By default 256 MiB, or 1 GiB if libcudf decodes, and up to four times that for
            large batches or rows of many columns. Row groups in use are not included.
        decode_threads: The number of decoding threads; by default two, or one on a single
            processor.
        transforms: Functions of a batch, applied in order before those of :meth:`map`.
        label: The label that ``labels`` holds, if the data have several; by default the main label.
            A list of names gives ``labels`` [B, names].
        strict_gpu: If libcudf decodes, the first block of each epoch is compared with the CPU's. If
            they differ, raise an error instead of a warning followed by decoding on the CPU.
        cpu_decoding: Decode on the CPU and copy blocks to the device, even if libcudf could decode.
        max_events: The maximum number of events per history and row; 0 leaves the histories out.
            Events take memory in addition to ``loader_memory``: four blocks of up to 10 MiB, or
            four batches if these are larger.
        histories: The directory that contains ``_histories``
            (:mod:`nvt_torchrec.formats.histories`); by default the parent of the files' directory.
        vectors: The directory that contains ``_vectors`` (:mod:`nvt_torchrec.formats.vectors`); by
            default the parent of the files' directory.
        read_vectors: Whether batches include the vectors of the data. Vectors take as much memory
            in addition to ``loader_memory`` as events do.

    Raises:
        BadInputError: A directory, file or schema is missing, or a file cannot be read.
        SchemaError: A column is missing or has a wrong type, a value is null, an id is outside its
            table, or a split does not have the number of rows in the manifest.
        SettingsError: An argument has a wrong type or is out of range, or ``loader_memory`` is too
            small.
        DeviceError: Raised by ``next()``: the device failed or, with ``strict_gpu``, its first
            block differs from the CPU's.
    """

    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool | str = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        virtual_shards: int | None = None,
        shuffle_window: int = WINDOW_ROWS,
        schema: TableSchema | None = None,
        table_sizes: Iterable[int] | None = None,
        undersampling_rate: float | None = None,
        limit_batches: int | None = None,
        loader_memory: int | None = None,
        decode_threads: int | None = None,
        transforms: Iterable[Callable[[Any], Any]] = (),
        label: str | Sequence[str] | None = None,
        strict_gpu: bool = False,
        cpu_decoding: bool = False,
        max_events: int = 50,
        histories: Path | str | None = None,
        vectors: Path | str | None = None,
        read_vectors: bool = True,
    ) -> None:
        # All arguments by name, for checking, and for pickling the loader.
        arguments = dict(locals())
        del arguments["self"]
        options.check_arguments(arguments)
        if table_sizes is not None:
            table_sizes = tuple(table_sizes)  # an iterator can be read only once
        arguments["table_sizes"] = table_sizes
        self._arguments = arguments
        if isinstance(shuffle, bool):
            shuffle = "rows" if shuffle else "none"
        dataset = read_dataset(
            data,
            schema,
            label,
            table_sizes,
            max_events,
            histories,
            vectors,
            read_vectors=read_vectors,
        )
        options.check_manifest(dataset)
        if undersampling_rate is not None:
            dataset = undersample_dataset(dataset, undersampling_rate, seed)
        self._dataset = dataset
        self._order = Order(shuffle, seed, rank, world_size)
        self._device = options.choose_device(device)
        self._memory = loader_memory
        self._threads = decode_threads or min(2, count_cores())
        global_batch = batch_size * world_size
        if virtual_shards is None:
            virtual_shards = choose_virtual_shards(global_batch)
        self._plan = Plan(
            rows=int(self._dataset.rows.sum()),
            global_batch=global_batch,
            virtual_shards=virtual_shards,
            drop_last=drop_last,
            limit=limit_batches,
            window_rows=shuffle_window,
        )
        self._strict_gpu = strict_gpu
        self._builder = choose_builder(self._dataset, self._device)
        if cpu_decoding and self._builder.on_device:
            self._builder = self._builder.host_kind
        self._divide_memory()  # raises an error about too little memory now, not at the first batch
        self._make_batch = BatchFactory(tuple(self._dataset.schema.features), self._device)
        self._functions = list(transforms)
        self._next = Position(0)
        self._current: Position | None = None

    @property
    def schema(self) -> TableSchema:
        """The columns and table sizes of the data."""
        return self._dataset.stored

    input_schema = output_schema = schema

    @property
    def num_rows(self) -> int:
        """The number of rows of the split over all ranks, after undersampling."""
        return self._plan.rows

    @property
    def device(self) -> torch.device:
        """The device of the batches."""
        return self._device

    def map(self, function: Callable[[Any], Any]) -> KJTLoader:
        """Apply ``function`` to each batch, after the functions given before; return the loader."""
        self._functions.append(function)
        return self

    def __len__(self) -> int:
        """Return the number of steps of an epoch, including a last, smaller one.

        It is the same on every rank.
        """
        return self._plan.steps

    def step_rows(self, step: int) -> list[int]:
        """Return the number of rows that each rank gets in a step."""
        size = self._order.world_size
        return [self._plan.count_rank_rows(rank, size, step, step + 1) for rank in range(size)]

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` begin epoch ``epoch`` at its first step."""
        self._next = Position(epoch)
        self._current = None

    def __iter__(self) -> Iterator[LoaderBatch]:
        """Return an iterator over the next epoch, or over the rest of a loaded state's epoch."""
        options.refuse_workers(self)
        position = dataclasses.replace(self._next)
        builder = self._make_builder()
        produced = produce_blocks(
            self._dataset,
            self._plan,
            builder,
            position,
            self._order,
            self._divide_memory(),
            self._fall_back,
        )
        batches: Iterator[LoaderBatch] = EpochIterator(
            produced, builder, self._make_batch, position, self._begin, self._finish
        )
        for function in self._functions:
            batches = map(function, batches)
        return batches

    def _make_builder(self) -> CpuBuilder:
        """Make the builder of an epoch's blocks; fall back to the CPU if the device's fails."""
        try:
            return self._builder(self._dataset, self._device, self._threads)
        except Exception as error:
            if not self._builder.on_device:
                raise
            self._fall_back(f"{type(error).__name__}: {error}")
            return self._builder(self._dataset, self._device, self._threads)

    def _fall_back(self, reason: str) -> None:
        """Decode on the CPU from now on. Raises :class:`DeviceError` with ``strict_gpu``."""
        instead = "the CPU decodes, and blocks are copied from pinned memory"
        fall_back("decoding by libcudf", reason, instead, strict=self._strict_gpu)
        self._builder = self._builder.host_kind

    def state_dict(self, trained_steps: int | None = None) -> dict[str, Any]:
        """Return the state to resume from: a few numbers, which are the same on all ranks.

        Args:
            trained_steps: The number of trained steps *of the newest iterator's epoch*, counted
                from the beginning of the epoch, including the steps before a resume. It is needed
                if a training pipeline draws batches ahead (TrainPipelineSparseDist draws two),
                which must be delivered again after a resume. None counts all drawn batches as
                trained.

        Raises:
            SettingsError: ``trained_steps`` is more than the steps drawn, or less than the steps
                before the resume.
        """
        position = self._current or self._next
        epoch, step = loader_state.find_next_step(position, trained_steps, len(self))
        return loader_state.describe_state(self._dataset, self._plan, self._order, epoch, step)

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and the state, from which a copy opens the files again.

        The next ``iter()`` of the copy yields the same batches as that of this loader.
        """
        parts = self._dataset, self._plan, self._order
        return {
            "arguments": {**self._arguments, "transforms": tuple(self._functions)},
            "state": loader_state.describe_state(*parts, self._next.epoch, self._next.step),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state["arguments"])  # type: ignore[misc]
        self.load_state_dict(state["state"])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` yield exactly the steps that were not trained before ``state``.

        The world size may have changed if ``batch_size * world_size`` is the same.

        Raises:
            SchemaError: The data have changed since the state was written.
            SettingsError: A setting has changed, or the state has another version.
        """
        identity = loader_state.identify(self._dataset, self._plan, self._order)
        loader_state.check_state(state, identity, self._dataset.source.name)
        self._plan = dataclasses.replace(self._plan, virtual_shards=state["virtual_shards"])
        step = state["step"]
        self._next = Position(state["epoch"], step, step)
        self._current = None

    def changed_file(self) -> BadInputError | None:
        """Return an error if a file was removed or rewritten since it was opened, else None."""
        if self._dataset.files is None:
            return None
        try:
            self._dataset.files.check_unchanged()
        except BadInputError as error:
            return error
        return None

    def check_epoch(self) -> None:
        """Compare the rows that the newest iterators of all ranks delivered with the plan.

        This is a collective operation, which needs torch.distributed if there are several ranks.
        Each iterator also checks its own rows at the end of its epoch.

        Raises:
            SchemaError: The total is not the number of rows of an epoch (without the rows trained
                before a resume). All ranks raise it.
        """
        plan = self._plan
        current = self._current or self._next
        expected = plan.epoch_rows - min(current.first, plan.full_steps) * plan.global_batch
        options.check_sum(current.rows, expected, self._order.world_size)

    def _begin(self, position: Position) -> None:
        """Let the next ``iter()`` be the epoch after ``position``, whose first batch is drawn now.

        If another iterator or ``set_epoch`` has chosen the next epoch in the meantime, it stays.
        """
        if self._next == position:
            self._next = Position(position.epoch + 1)
        self._current = position

    def _finish(self, position: Position) -> None:
        """Check the number of rows of a finished epoch. Raises SchemaError."""
        plan = self._plan
        rank = self._order.rank
        world_size = self._order.world_size
        expected = plan.count_rank_rows(rank, world_size, position.first, plan.steps)
        options.check_rank_rows(position.rows, expected, rank, position.epoch)

    @property
    def device_bytes(self) -> int:
        """The maximum number of bytes of GPU memory that an iterator takes; 0 on a CPU."""
        if self._device.type == "cpu":
            return 0
        block_bytes = estimate_device_bytes(
            self._dataset,
            self._measure_demand(),
            self._divide_memory(),
            on_device=self._builder.on_device,
        )
        return self._builder.library_bytes + block_bytes

    def _measure_demand(self) -> Demand:
        """Return the numbers of rows that this rank has to hold."""
        order = self._order
        return Demand.measure_rank(
            self._plan,
            order.rank,
            order.world_size,
            shuffled=order.shuffle == "rows",
            threads=self._threads,
        )

    def _divide_memory(self) -> Budget:
        """Return the sizes of blocks and chunks. Raises SettingsError if memory is too small."""
        on_device = self._builder.on_device
        return divide_memory(
            self._dataset, self._memory, self._measure_demand(), on_device=on_device
        )
