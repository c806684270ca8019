"""The loader: parquet files of a split → one stream of TorchRec batches per rank.

It has Merlin's loader interface where the two agree: ``batch_size``, ``shuffle``, ``drop_last``,
``device``, ``global_rank``/``global_size`` as ``rank``/``world_size``; ``len()``, ``map``,
``transforms``, ``input_schema``, ``output_schema``; and it reads the ``.merlin/schema.json`` that
Merlin writes. It does not inherit from merlin.dataloader's Loader, because each part of that was
measured to be slower or found to be wrong: docs/loader.md compares them, defect by defect.

Functions given to ``map`` and ``transforms`` take and return TorchRec batches, not frames.
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
    """Batches for one rank from parquet files, a table, or a source of your own.

    Every ``iter()`` returns a new iterator over one epoch. It yields
    :class:`nvt_loader.cpu.blocks.LoaderBatch`, a :class:`torchrec.datasets.utils.Batch`, on
    ``device``:

    - ``dense_features``: float32 [B, dense columns];
    - ``sparse_features``: KeyedJaggedTensor with the categorical columns as keys, in the schema's
      order; values, lengths and offsets int32, stride B. Without multi-hot columns there is one id
      per key and row. A multi-hot column has as many ids in a row as its list holds. After them
      comes each column of each history, as ``NAME.COLUMN``: the ids of the newest ``max_events``
      events before the row, oldest first;
    - ``labels``: float32 [B], from 0 to 1, or [B, labels] if several are read; numbers outside are
      refused;
    - ``weights``: float32 [B], the weights of the rows; None if the data have no such column;
    - ``dense_vectors``: float32 [B, all inputs], see :mod:`nvt_torchrec.formats.vectors`, or None;
    - ``log_q_correction``: float32 [B], see docs/negatives.md; None if the data have none.

    Over all ranks, an epoch yields every row exactly once, in the same number of steps on each
    rank. B is ``batch_size`` except in the last step: its rows are split evenly over the ranks, so
    a rank may get an empty batch (B = 0), which is a valid batch. ``drop_last`` leaves that step
    out, and with it other rows in each epoch. The global batch of each step depends on
    ``batch_size * world_size`` and the data, not on the world size: see :mod:`nvt_loader.plan`.
    The batches of a block share its memory and constants with each other: do not write into them.

    **Epochs.** The first ``iter()`` is epoch 0, and each later one is the next epoch, whether or
    not the previous one was finished. An iterator from which no batch was drawn does not count.
    :meth:`set_epoch` and :meth:`load_state_dict` choose the epoch and step of the next ``iter()``.
    The order depends on the seed and the epoch. Unshuffled epochs are all equal.

    **Order.** A batch takes rows from ``virtual_shards`` parts of the data.
    ``shuffle="row_groups"`` permutes the row groups; ``"rows"`` (or True) also the rows within
    windows of ``shuffle_window`` rows. ``virtual_shards=1`` without shuffling is the order of the
    files, but then each rank decodes nearly everything.

    **Errors** of the background thread are raised by ``next()``, and again by every later one. The
    threads of a dropped iterator end. An epoch that delivers fewer or more rows than planned is an
    error, and so is a split with another number of rows than the ETL's manifest says.

    Args:
        data: Parquet files: a directory, as ``OUT/criteo_binary/split/train``, a file, a glob, a
            URL that fsspec opens, or a list of these; an Arrow table, or what becomes one without
            a copy, such as a frame of pandas or Polars; or a
            :class:`nvt_loader.parquet.sources.Source`.
        batch_size: Rows of a batch *of this rank*.
        rank: The number of this rank, from 0.
        world_size: The number of ranks.
        shuffle: "none" (False), "row_groups" or "rows" (True); another order in every epoch.
        seed: Seed of the permutations; the same on all ranks.
        drop_last: Leave out the last step if it is not full.
        device: Device of the batches; None is the current CUDA device, or the CPU without one.
        virtual_shards: The number of parts of the data that a batch takes rows from, at most
            ``batch_size * world_size``; by default 8. Batches depend on it and not on the world
            size. Ranks read no rows in common if it is a multiple of ``world_size``; otherwise they
            share virtual shards, which costs time and, where rows are shuffled, memory.
        shuffle_window: Rows of a window, over all virtual shards.
        schema: The columns; by default ``.merlin/schema.json`` beside the files. With a schema, the
            data may be any: numbers of other types are converted.
        table_sizes: Rows of the embedding tables, instead of the schema's.
        undersampling_rate: Share of the negative rows to keep, the same ones in each epoch. If a
            model trained on them predicts p, the probability is ``p / (p + (1 - p) / rate)``.
        limit_batches: End each epoch after this many steps.
        loader_memory: The largest number of bytes for blocks, decoded columns and shuffling
            windows; by default 256 MiB, or 1 GiB where libcudf decodes, and up to four times that
            if large batches or rows of many columns take more. Row groups in use are not counted.
        decode_threads: Threads that decode; by default two where there are two processors.
        transforms: Functions of a batch, applied in order before those of :meth:`map`.
        label: The label that ``labels`` holds, if the data have several; by default the main one.
            Several names give [B, names].
        strict_gpu: Where libcudf decodes, the first block of each epoch is compared with the CPU's.
            If they differ, raise an error, instead of a warning and decoding on the CPU.
        cpu_decoding: Decode on the CPU and copy blocks to the device, also where libcudf could.
        max_events: The largest number of events of a history in a row; 0 leaves histories out.
            Their memory comes on top of ``loader_memory``: four blocks of up to 10 MiB, or four
            batches if these are larger.
        histories: The directory that ``_histories`` is in (:mod:`nvt_torchrec.formats.histories`);
            by default the one above that of the files.
        vectors: The directory that ``_vectors`` is in (:mod:`nvt_torchrec.formats.vectors`); by
            default the one above that of the files.
        read_vectors: Whether batches get the data's vectors. Their memory comes on top of
            ``loader_memory`` as that of events does.

    Raises:
        BadInputError: A missing directory, file or schema, or a file that cannot be read.
        SchemaError: A missing column or one of another type, a null, an id outside its table, or a
            split with another number of rows than the manifest says.
        SettingsError: A setting of another type or out of its range, or too little
            ``loader_memory``.
        DeviceError: From ``next()``: the device fails, or the first block differs, with
            ``strict_gpu``.
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
        # All arguments by name, to check them and to make a copy of the loader by pickle.
        arguments = dict(locals())
        del arguments["self"]
        options.check_arguments(arguments)
        if table_sizes is not None:
            table_sizes = tuple(table_sizes)  # an iterator could be read only once
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
        self._budget()  # refuses too little memory now, not at the first batch
        self._make_batch = BatchFactory(tuple(self._dataset.schema.features), self._device)
        self._functions = list(transforms)
        self._next = Position(0)
        self._current: Position | None = None

    @property
    def schema(self) -> TableSchema:
        """Columns and table sizes of the data."""
        return self._dataset.stored

    input_schema = output_schema = schema

    @property
    def num_rows(self) -> int:
        """Rows of the split, over all ranks (after undersampling)."""
        return self._plan.rows

    @property
    def device(self) -> torch.device:
        """Device of the batches."""
        return self._device

    def map(self, function: Callable[[Any], Any]) -> KJTLoader:
        """Apply ``function`` to each batch, after the functions given before; return the loader."""
        self._functions.append(function)
        return self

    def __len__(self) -> int:
        """Steps of an epoch, the same on every rank, including the last, smaller one."""
        return self._plan.steps

    def step_rows(self, step: int) -> list[int]:
        """Return the rows that each rank gets in a step."""
        size = self._order.world_size
        return [self._plan.count_rank_rows(rank, size, step, step + 1) for rank in range(size)]

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` epoch ``epoch``, from its first step."""
        self._next, self._current = Position(epoch), None

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
            self._budget(),
            self._fall_back,
        )
        batches: Iterator[LoaderBatch] = EpochIterator(
            produced, builder, self._make_batch, position, self._begin, self._finish
        )
        for function in self._functions:
            batches = map(function, batches)
        return batches

    def _make_builder(self) -> CpuBuilder:
        """Make the builder of an epoch's blocks: the CPU's if the device's cannot be made."""
        try:
            return self._builder(self._dataset, self._device, self._threads)
        except Exception as error:
            if not self._builder.on_device:
                raise
            self._fall_back(f"{type(error).__name__}: {error}")
            return self._builder(self._dataset, self._device, self._threads)

    def _fall_back(self, why: str) -> None:
        """Let the CPU decode from now on. Raises :class:`DeviceError` with ``strict_gpu``."""
        instead = "the CPU decodes, and blocks are copied from pinned memory"
        fall_back("decoding by libcudf", why, instead, strict=self._strict_gpu)
        self._builder = self._builder.host_kind

    def state_dict(self, trained_steps: int | None = None) -> dict[str, Any]:
        """Return how far training has got, as a few numbers that are the same on all ranks.

        Args:
            trained_steps: Steps *of the newest iterator's epoch* that were trained, counted from
                the epoch's beginning, including those before a resume. A training pipeline draws
                batches ahead (TrainPipelineSparseDist: two), which must come again after a resume.
                None counts every batch that was drawn as trained.

        Raises:
            SettingsError: Fewer steps were drawn, or more before the epoch was resumed.
        """
        position = self._current or self._next
        epoch, step = loader_state.find_next_step(position, trained_steps, len(self))
        return loader_state.describe_state(self._dataset, self._plan, self._order, epoch, step)

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments and state of a copy, which opens the files again.

        The next ``iter()`` of the copy yields what that of this loader yields.
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
        """Make the next ``iter()`` yield exactly the steps that were not trained before ``state``.

        The world size may differ if ``batch_size * world_size`` is the same.

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
        """Return the error of a file that was removed or rewritten since, or None."""
        if self._dataset.files is None:
            return None
        try:
            self._dataset.files.check_unchanged()
        except BadInputError as error:
            return error
        return None

    def check_epoch(self) -> None:
        """Compare the rows that all ranks' newest iterators delivered with the plan (collective).

        It needs torch.distributed if there are several ranks. Each iterator also checks its own
        rows at the end of its epoch.

        Raises:
            SchemaError: On every rank, if the sum is not that of an epoch (without the rows that
                were trained before a resume).
        """
        plan, current = self._plan, self._current or self._next
        expected = plan.epoch_rows - min(current.first, plan.full_steps) * plan.global_batch
        options.check_sum(current.rows, expected, self._order.world_size)

    def _begin(self, position: Position) -> None:
        """Let the next ``iter()`` be the epoch after the one that is drawn from now on."""
        # Unless another iterator or set_epoch has chosen the next epoch meanwhile.
        if self._next == position:
            self._next = Position(position.epoch + 1)
        self._current = position

    def _finish(self, position: Position) -> None:
        plan, rank, size = self._plan, self._order.rank, self._order.world_size
        expected = plan.count_rank_rows(rank, size, position.first, plan.steps)
        options.check_rank_rows(position.rows, expected, rank, position.epoch)

    @property
    def device_bytes(self) -> int:
        """The largest number of bytes of a GPU that an iterator takes; 0 on a CPU."""
        if self._device.type == "cpu":
            return 0
        demand, budget, on_device = self._demand(), self._budget(), self._builder.on_device
        blocks = estimate_device_bytes(self._dataset, demand, budget, on_device=on_device)
        return self._builder.library_bytes + blocks

    def _demand(self) -> Demand:
        """Return how many rows this rank has to hold."""
        order = self._order
        return Demand.measure_rank(
            self._plan,
            order.rank,
            order.world_size,
            shuffled=order.shuffle == "rows",
            threads=self._threads,
        )

    def _budget(self) -> Budget:
        on_device = self._builder.on_device
        return divide_memory(self._dataset, self._memory, self._demand(), on_device=on_device)
