"""The tensors of a run, read back from a checkpoint of any world size and sharding plan.

The tables may have grown since: then rows are read where they lie, and new ones are copies of
others (:mod:`training.checkpoint.growth`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from nvt_torchrec.base.errors import BadInputError, ClickLogError, OutputError, SchemaError
from nvt_torchrec.base.finite import flat, not_finite
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID
from nvt_torchrec.models.checkpoint.reading import check_contents, errors_of, is_momentary, not_read
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.checkpoint.tensor_files import Tensors, Window, read_tensors, read_windows
from nvt_torchrec.training.checkpoint.growth import GrownTable
from nvt_torchrec.training.checkpoint.periodic import copied
from nvt_torchrec.training.launch.distributed import Group, gathered

#: The rows that are copied at a time from the rows of out of vocabulary.
_COPIED_ROWS = 65536


def training_state(
    model: DistributedModelParallel, optimizer: CombinedOptimizer | None, group: Group
) -> dict[str, Any]:
    """Return all tensors of a run, to save them or to load into them: they share its memory.

    Without an optimizer they are the weights alone.
    """
    if optimizer is None:
        return {"model": model.state_dict()}
    dense = dict(optimizer.optimizers)["dense"]
    if not dense.state:
        dense.init_state()  # Adam's, which torch makes in the first step, and counts as one
        dense.zero_grad()
        for values in dense.state.values():
            values["step"].zero_()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "random": {f"rank_{group.rank}": torch.get_rng_state()},
    }


def load_state(
    path: Path,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer | None,
    group: Group,
    tables: dict[str, GrownTable] | None = None,
) -> dict[str, Any] | None:
    """Load weights and optimizer state, also from another world size and plan (collective).

    Random number generators follow if nothing else changes: tables or the world size.

    Args:
        path: The checkpoint.
        model: The sharded model; as it is initialized, if tables have grown.
        optimizer: Its optimizer; None to load the weights alone.
        group: This rank.
        tables: How each table follows from that of the checkpoint; None: it is the same.

    Returns:
        Weights and optimizer state of the run's best evaluation, if it is to be resumed and has
        kept them (:mod:`training.loop.stopping`).

    Raises:
        BadInputError: The checkpoint is damaged, or holds values that are not finite.
        SchemaError: Its tensors are not those of the run, for example row-wise Adagrad's moments
            of column shards under another plan.
    """
    state = training_state(model, optimizer, group)
    record = call_on_all_ranks(group, path, CheckpointRecord.read, path)
    if tables is not None or record.world_size != group.world_size:
        state.pop("random", None)
    best = None
    if optimizer and tables is None and record.training.get("best"):
        best = state["best"] = copied({name: state[name] for name in ("model", "optimizer")})
    shares = group.rank, group.world_size
    call_on_all_ranks(group, path, check_contents, path, record.files, *shares)
    call_on_all_ranks(group, path, _read_state, path, state, tables or {})
    diverged = next(filter(None, gathered(group, not_finite(state))), None)
    if diverged:
        raise BadInputError(
            f"{path}: {diverged} holds values that are not finite: training had diverged",
            "use an earlier one",
        )
    call_on_all_ranks(group, path, fill_state, state, model, optimizer, group)
    return best


def call_on_all_ranks(group: Group, path: Path, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function on every rank, and raise an error of any rank on all of them (collective).

    Args:
        group: This rank.
        path: The checkpoint that the function looks at.
        function: It must not be collective: a rank that fails would leave the others waiting in it.
        args: Its arguments.

    Returns:
        What the function returned on this rank.

    Raises:
        ClickLogError: The function's error. One that says nothing against the checkpoint is no
            BadInputError, so that no other checkpoint is taken in its place.
        RuntimeError: Any other error of the function.
    """
    value = error = cause = None
    try:
        value = function(*args)
    except Exception as raised:
        error = cause = raised
        is_final = isinstance(raised, OutputError) or type(raised) is ClickLogError
        if is_momentary(raised) and not is_final:
            error = not_read(path, raised)
        elif not isinstance(raised, ClickLogError):
            error = RuntimeError(f"{path}: {type(raised).__name__}: {raised}")
    errors = list(filter(None, gathered(group, error)))
    if errors:  # damage is certain only if no rank has another error
        raise min(errors, key=lambda error: isinstance(error, BadInputError)) from cause
    return value


def fill_state(
    state: dict[str, Any],
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer | None,
    group: Group,
) -> None:
    """Load weights and, with an optimizer, its state; random number generators if there are any."""
    model.load_state_dict(state["model"])
    if optimizer is None:
        return
    loaded = optimizer.state_dict()
    loaded["state"] = state["optimizer"]
    optimizer.load_state_dict(loaded)
    if "random" in state:
        torch.set_rng_state(state["random"][f"rank_{group.rank}"])


def _read_state(path: Path, state: dict[str, Any], tables: dict[str, GrownTable]) -> None:
    """Fill this rank's tensors from a checkpoint.

    Args:
        path: The checkpoint.
        state: Weights and optimizer state, as the run begins with them where tables have grown.
        tables: How tables that have grown follow from those of the checkpoint.

    Raises:
        BadInputError: The checkpoint is damaged.
        SchemaError: Its tensors are not those of the run.
        ClickLogError: It cannot be read now.
    """
    with errors_of(path):
        tensors = read_tensors(path)
        filling = _Filling(path, tensors)
        weights: dict[str, tuple[str, Any]] = {}  # of the model, which comes first
        for name, tensor in flat(state):
            if name not in tensors:
                raise SchemaError(
                    f"{path}: holds no {name!r}, which this run needs",
                    "give the same optimizer and model",
                )
            table = next((table for table in tables if _belongs_to(name, table)), None)
            if table is None:
                filling.whole(name, tensor)
            elif name.endswith(f".{table}.weight"):
                weights[table] = name, tensor
                filling.weights(name, tensor, tables[table])
            elif len(tensor.shape) == 1:
                filling.row_moments(name, tensor, tables[table], *weights[table])
            else:
                filling.moments(name, tensor, tables[table])
        read_windows(path, tensors, filling.windows)
        for finish in filling.finishing:
            finish()


def _belongs_to(name: str, table: str) -> bool:
    """Return whether a tensor holds the weights or the optimizer state of a table."""
    return name.endswith(f".{table}.weight") or f".{table}.weight.{table}." in name


class _Filling:
    """What has to be read for one rank, and what has to be done afterwards.

    Attributes:
        windows: What has to be read.
        finishing: The functions to call then, in order.
    """

    def __init__(self, path: Path, tensors: Tensors) -> None:
        self.windows: list[Window] = []
        self.finishing: list[Callable[[], object]] = []
        self._path, self._tensors = path, tensors

    def whole(self, name: str, tensor: Any) -> None:
        """Read a tensor that is as large as in the checkpoint."""
        self._check_size(name, tuple(tensor.shape))
        if not hasattr(tensor, "local_shards"):
            self.windows.append(Window(name, (0,) * tensor.dim(), tensor.detach()))
            return
        for shard in tensor.local_shards():
            offsets = tuple(shard.metadata.shard_offsets)
            self.windows.append(Window(name, offsets, shard.tensor.detach()))

    def weights(self, name: str, tensor: Any, table: GrownTable) -> None:
        """Read the weights of a table; rows that start anew are copies of its other rows."""
        self._check_size(name, (table.rows_then, *tensor.shape[1:]))
        for shard in tensor.local_shards():
            (first, column), (height, width) = (
                shard.metadata.shard_offsets,
                shard.metadata.shard_sizes,
            )
            part = shard.tensor.detach()
            self._kept_rows(name, (first, column), part, table)
            rows, origins = table.anew(first, first + height)
            if len(rows):
                sources = torch.empty(table.oov_ids, width, device=part.device, dtype=part.dtype)
                self.windows.append(Window(name, (FIRST_OOV_ID, column), sources))
                self.finishing.append(
                    functools.partial(
                        _copy_rows, part, rows - first, sources, origins - FIRST_OOV_ID
                    )
                )

    def moments(self, name: str, tensor: Any, table: GrownTable) -> None:
        """Read a moment per weight; those of rows that start anew stay as they are."""
        self._check_size(name, (table.rows_then, *tensor.shape[1:]))
        for shard in tensor.local_shards():
            first, column = shard.metadata.shard_offsets
            part = shard.tensor.detach()
            self._kept_rows(name, (first, column), part, table)
            self._restore(part, first, table)

    def row_moments(
        self, name: str, tensor: Any, table: GrownTable, weight_name: str, weight: Any
    ) -> None:
        """Read a moment per row and column shard, as row-wise Adagrad keeps it."""
        then = _column_shards(
            (chunk.offsets[1], chunk.sizes[1]) for chunk in self._tensors[weight_name].chunks
        )
        now = _column_shards(
            (shard.shard_offsets[1], shard.shard_sizes[1])
            for shard in weight.metadata().shards_metadata
        )
        if then != now:
            raise SchemaError(
                f"{self._path}: {name}: a moment for each of {len(then)} column shards of the "
                f"table, and there are {len(now)}",
                "row-wise Adagrad keeps a moment per column shard: give the --sharding and the "
                "number of ranks of then",
            )
        self._check_size(name, (len(then) * table.rows_then,))
        for shard in tensor.local_shards():
            (offset,), (height,) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            number, first = divmod(offset, table.rows)
            kept = min(first + height, table.kept) - first
            if kept > 0:
                part = shard.tensor.detach()
                self.windows.append(Window(name, (number * table.rows_then + first,), part[:kept]))
                self._restore(part, first, table)

    def _kept_rows(
        self, name: str, offsets: tuple[int, int], part: torch.Tensor, table: GrownTable
    ) -> None:
        kept = min(offsets[0] + len(part), table.kept) - offsets[0]
        if kept > 0:
            self.windows.append(Window(name, offsets, part[:kept]))

    def _restore(self, part: torch.Tensor, first: int, table: GrownTable) -> None:
        """Give the reused rows of a shard, after it has been read, what they have now."""
        rows = table.reused[slice(*np.searchsorted(table.reused, [first, first + len(part)]))]
        if len(rows):
            places = torch.from_numpy(rows - first).to(part.device)
            self.finishing.append(functools.partial(part.index_copy_, 0, places, part[places]))

    def _check_size(self, name: str, size: tuple[int, ...]) -> None:
        stored = self._tensors[name].size
        if stored != size:
            raise SchemaError(
                f"{self._path}: {name} is {list(stored)}, in this run {list(size)}",
                "give the same optimizer and model; row-wise Adagrad keeps a moment per column "
                "shard, so --resume needs the same world size and --sharding then",
            )


def _copy_rows(
    part: torch.Tensor, rows: np.ndarray, sources: torch.Tensor, origins: np.ndarray
) -> None:
    for begin in range(0, len(rows), _COPIED_ROWS):
        block = slice(begin, begin + _COPIED_ROWS)
        places, rows_of_sources = (
            torch.from_numpy(numbers[block]).to(part.device) for numbers in (rows, origins)
        )
        part.index_copy_(0, places, sources[rows_of_sources])


def _column_shards(shards: Any) -> list[tuple[int, int]]:
    """Return the first column and the width of each column shard of a table, in order."""
    return sorted(set(map(tuple, shards)))
