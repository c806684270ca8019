"""The loader: a split's parquet → one stream of TorchRec batches per rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import get_worker_info
from torchrec.datasets.utils import Batch

from clicklog.errors import SchemaError, SettingsError
from clicklog.schema import TableSchema
from nvt_loader.blocks import BatchFactory
from nvt_loader.epoch import EpochIterator, Position, produce_blocks
from nvt_loader.gpu import choose_blocks
from nvt_loader.layout import read_layout
from nvt_loader.plan import Plan, default_virtual_shards

STATE_VERSION = 1


class KJTLoader:
    """Batches for one rank from a split's parquet files.

    Every ``iter()`` gives a fresh iterator over one epoch. It yields
    :class:`torchrec.datasets.utils.Batch` on ``device``:

    - ``dense_features``: float32 [B, dense columns];
    - ``sparse_features``: KeyedJaggedTensor with the categorical columns as keys, in the schema's
      order; values int32 [columns · B], one id per key and row (lengths int32, all 1), stride B;
    - ``labels``: float32 [B], 0 or 1 (TorchRec's DLRMTrain calls ``.float()`` on them).

    Over all ranks, an epoch yields every row exactly once, in the same number of steps on each
    rank. B is ``batch_size``, but for the last step: its rows are split evenly over the ranks, so
    a rank may get an empty batch (B = 0), which is a valid batch. ``drop_last`` leaves that step
    out. The global batch of each step depends on ``batch_size * world_size`` and the data, not
    on the world size (for 1, 2, 4 and 8 ranks, or with ``virtual_shards`` given): see
    :mod:`nvt_loader.plan`. The batches of a block share memory with it and constants with each
    other: do not write into them.

    **Epochs.** The first ``iter()`` is epoch 0, each later one the next, whether or not the one
    before was finished; :meth:`set_epoch` and :meth:`load_state_dict` choose what the next
    ``iter()`` is. The order is a function of (seed, epoch). Unshuffled epochs are all alike.

    **Order.** A batch draws from ``virtual_shards`` places of the data. ``shuffle`` permutes the
    row groups, and the rows within windows of each shard. ``virtual_shards=1`` without shuffling
    is the order of the files, at the price that each rank decodes nearly everything.

    **Errors** of the background thread come out of ``next()``, and again of every later one. A
    dropped iterator ends its thread.

    Args:
        path: directory of one split, as ``OUT/criteo_binary/split/train``.
        batch_size: rows of a batch *of this rank*.
        rank: which of the ranks this is.
        world_size: number of ranks.
        shuffle: permute row groups and rows, anew in every epoch.
        seed: of the permutations; the same on all ranks.
        drop_last: leave out the last step when it is not full.
        device: where the batches go; None is the current CUDA device, or the CPU without one.
        virtual_shards: places in the data that a batch draws from; a divisor of
            ``batch_size * world_size``. By default 8 where that and the world size allow it,
            else ``world_size``. Runs that may go on with another world size, other than 1, 2, 4
            and 8, do best with a common multiple.

    Raises:
        BadInputError: a missing directory, file or schema, or a file that cannot be read.
        SchemaError: a missing or retyped column, a null, an id outside its table.
        SettingsError: settings that make no sense.
    """

    def __init__(
        self,
        path: Path | str,
        batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        device: torch.device | str | None = None,
        virtual_shards: int | None = None,
    ) -> None:
        if batch_size < 1:
            raise SettingsError(f"batch_size = {batch_size}", "a batch has at least one row")
        if not 0 <= rank < world_size:
            raise SettingsError(
                f"rank = {rank} with world_size = {world_size}", "ranks are 0 … world_size - 1"
            )
        if seed < 0:
            raise SettingsError(f"seed = {seed}", "choose a seed of 0 or more")
        self._layout = read_layout(path)
        self._fingerprint = self._layout.fingerprint()
        self._rank, self._world_size = rank, world_size
        self._shuffle, self._seed = shuffle, seed
        self._device = _choose_device(device)
        global_batch = batch_size * world_size
        self._plan = Plan(
            rows=int(self._layout.rows.sum()),
            global_batch=global_batch,
            virtual_shards=default_virtual_shards(global_batch, world_size)
            if virtual_shards is None
            else virtual_shards,
            drop_last=drop_last,
        )
        self._make_batch = BatchFactory(self._layout.schema.categorical, self._device)
        self._next = Position(0)
        self._current: Position | None = None

    @property
    def schema(self) -> TableSchema:
        """Columns and table sizes of the data."""
        return self._layout.schema

    @property
    def num_rows(self) -> int:
        """Rows of the split, over all ranks."""
        return self._plan.rows

    @property
    def device(self) -> torch.device:
        """Where the batches are."""
        return self._device

    def __len__(self) -> int:
        """Steps of a whole epoch, the same on every rank, the last smaller one included."""
        return self._plan.steps

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and step at which the next ``iter()`` starts."""
        return self._next.epoch, self._next.step

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` epoch ``epoch``, from its first step."""
        self._next, self._current = Position(epoch), None

    def __iter__(self) -> Iterator[Batch]:
        """A fresh iterator over the next epoch, or over the rest of a loaded state's epoch."""
        if get_worker_info() is not None:
            raise SettingsError(
                "KJTLoader inside a worker of torch's DataLoader: each would deliver all rows",
                "iterate the KJTLoader itself; it decodes in a thread of its own",
            )
        position = self._current = dataclasses.replace(self._next)
        self._next = Position(position.epoch + 1)
        blocks = choose_blocks(self._layout, self._device)
        produced = produce_blocks(
            self._layout,
            self._plan,
            blocks,
            position,
            rank=self._rank,
            world_size=self._world_size,
            shuffle=self._shuffle,
            seed=self._seed,
        )
        return EpochIterator(produced, blocks, self._make_batch, position)

    def state_dict(self, trained_steps: int | None = None) -> dict[str, Any]:
        """Where training is, as a few numbers; the same on all ranks.

        Args:
            trained_steps: steps *of the newest iterator's epoch* that were trained, counted from
                the epoch's beginning, those before a resume included. A training pipeline draws
                batches ahead (TrainPipelineSparseDist: two), and those must come again after a
                resume, so say what was trained. None: every batch that was drawn.

        Raises:
            SettingsError: that many steps were not drawn, or fewer than when the epoch resumed.
        """
        position = self._current or self._next
        step = position.step if trained_steps is None else trained_steps
        if not position.first <= step <= position.step:
            raise SettingsError(
                f"trained_steps = {step} in an epoch of which steps {position.first} to "
                f"{position.step} were drawn",
                "count from the epoch's beginning, those before a resume included",
            )
        finished = step == len(self) and step > 0
        return {
            **self._identity(),
            "virtual_shards": self._plan.virtual_shards,
            "epoch": position.epoch + 1 if finished else position.epoch,
            "step": 0 if finished else step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next ``iter()`` yield exactly the steps that ``state`` has not trained.

        The world size may be another, if ``batch_size * world_size`` is the same.

        Raises:
            SchemaError: the data are not those of the state.
            SettingsError: a setting is not, or the state is of another version or no state.
        """
        if state.get("version") != STATE_VERSION:
            raise SettingsError(
                f"loader state of version {state.get('version')}, not {STATE_VERSION}",
                "resume with the version of this project that wrote it",
            )
        mine = self._identity()
        then, now = state["data"], mine["data"]
        changed = [f"{key} {then[key]} → {now[key]}" for key in now if then[key] != now[key]]
        if changed:
            raise SchemaError(
                f"{self._layout.directory}: the data have changed since the loader state was "
                f"written: {', '.join(changed)}",
                "resume on the same files, or start a new run",
            )
        for key, value in mine.items():
            if state[key] != value:
                raise SettingsError(
                    f"{key} = {value}, but {state[key]} in the loader state",
                    "resume with the same settings; batch_size * world_size counts, not the "
                    "world size",
                )
        self._plan = dataclasses.replace(self._plan, virtual_shards=state["virtual_shards"])
        self._next = Position(state["epoch"], state["step"], state["step"])
        self._current = None

    def _identity(self) -> dict[str, Any]:
        """What a state must share with the loader that loads it."""
        return {
            "version": STATE_VERSION,
            "data": self._fingerprint,
            "global_batch": self._plan.global_batch,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._plan.drop_last,
        }


def _choose_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
