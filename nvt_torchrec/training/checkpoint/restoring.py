"""Restore a run's state from a checkpoint of any world size and sharding plan.

The tables may have grown since the checkpoint. Values keep their ids from one generation of a
workflow to the next, so their rows stay. A value with a new id was out of vocabulary before: its
new row starts as a copy of its out-of-vocabulary row, so that the model's predictions stay the
same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from nvt_torchrec.base.errors import (
    BadInputError,
    ClickLogError,
    OutputError,
    SchemaError,
    SettingsError,
)
from nvt_torchrec.base.finite import find_not_finite, flatten
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.vocabularies import Generation
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.models.checkpoint.reading import (
    check_contents,
    explain_errors,
    is_transient,
    make_read_error,
)
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.checkpoint.tensor_files import Window, read_tensors, read_windows
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.launch.distributed import Group, gather_objects
from nvt_torchrec.training.launch.run_state import RunState, copy_state

T = TypeVar("T")

#: The number of rows to copy at a time from the out-of-vocabulary rows.
_COPIED_ROWS = 65536


@dataclasses.dataclass(frozen=True)
class GrownTable:
    """A run's table and its relation to the smaller table of a checkpoint.

    Attributes:
        old_rows: The number of rows of the checkpoint's table.
        rows: The number of rows of the run's table.
        kept: The number of first rows that keep their values; the rows after them are new.
        origins: Int64, for each new row that belongs to a value, the row of the checkpoint's table
            to copy. Rows beyond these copy the first out-of-vocabulary row.
        oov_ids: The number of out-of-vocabulary rows.
    """

    old_rows: int
    rows: int
    kept: int
    origins: np.ndarray
    oov_ids: int = 1

    def list_new_rows(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the new rows among [begin, end), and the rows of the checkpoint that they copy.

        Returns:
            Two int64 arrays of the same length.
        """
        rows = np.arange(max(begin, self.kept), max(end, self.kept))
        padded = np.append(self.origins, FIRST_OOV_ID)
        return rows, padded[np.minimum(rows - self.kept, len(self.origins))]


def grow_tables(
    old_model: ModelConfig,
    new_model: ModelConfig,
    generation: Generation,
    workflow: WorkflowDescription,
) -> dict[str, GrownTable]:
    """Return how each table of a run grows from a checkpoint's table, by table name.

    Args:
        old_model: The checkpoint's model.
        new_model: The run's model, which differs only in the sizes of tables.
        generation: The generation of the checkpoint's data.
        workflow: The workflow of the run's data, of the same generation or a later one.

    Raises:
        SettingsError: Ids share rows (``--hash_indices``), and would share other rows than before.
        SchemaError: The workflow does not have the columns of the data.
        BadInputError: A file of the workflow is damaged.
    """
    columns = {column.name: column for column in workflow.spec.categorical}
    tables = {}
    for (name, table), old_rows, rows in zip(
        new_model.table_by_column.items(),
        old_model.num_embeddings,
        new_model.num_embeddings,
        strict=True,
    ):
        if name not in columns:
            raise SchemaError(
                f"{workflow.path}: no categorical column {name}, which the data have",
                "restore the workflow that made the data",
            )
        column = columns[name]
        vocabulary = column.vocabulary_name
        kept = column.reserved_ids + generation.values[vocabulary]
        needed = column.reserved_ids + workflow.lineage[-1].values[vocabulary]
        if new_model.hash_indices:
            if rows != old_rows and (old_rows < kept or rows < kept):
                raise SettingsError(
                    f"--continue_from: column {name} had {kept} ids, which shared {old_rows} rows; "
                    f"in a table of {rows} rows they would share other ones",
                    "give the table sizes of the checkpoint (--max_table_size, "
                    "--num_embeddings_per_feature), or train from scratch without --continue_from",
                )
            kept = min(kept, rows)
            needed = min(needed, rows)
        origins = workflow.oov_ids(column, np.arange(kept, needed))
        tables[table] = GrownTable(old_rows, rows, kept, origins, column.oov_ids)
    return tables


def load_state(
    path: Path, run: RunState, tables: dict[str, GrownTable] | None = None
) -> dict[str, Any]:
    """Load weights and optimizer state, possibly of another world size and plan (collective).

    Random number generators are loaded only if the tables and the world size are the same.

    Args:
        path: The checkpoint.
        run: The run. If tables have grown, it must not have been trained yet.
        tables: How tables have grown since the checkpoint; None if all are the same.

    Returns:
        The additional tensors of a run to resume, on this rank, if the checkpoint has them:
        ``best``, weights and optimizer state of the best evaluation (:mod:`training.loop.stopping`)
        and ``average``, the average of the weights (:mod:`training.loop.averaging`).

    Raises:
        BadInputError: The checkpoint is damaged, or holds values that are not finite.
        SchemaError: Its tensors do not fit the run, for example row-wise Adagrad's moments of
            column shards under another plan.
    """
    state = run.tensors()
    group = run.group
    record = call_on_all_ranks(group, path, CheckpointRecord.read, path)
    if tables is not None or record.world_size != group.world_size:
        state.pop("random", None)
    more: dict[str, Any] = {}
    if not run.alone and tables is None:
        if record.training.get("best"):
            more["best"] = copy_state({name: state[name] for name in ("model", "optimizer")})
        if record.training.get("averaged"):
            more["average"] = copy_state(state["model"])
    state |= more
    # Each rank checks the digests of its share of the files.
    share = group.rank, group.world_size
    call_on_all_ranks(group, path, check_contents, path, record.files, *share)
    call_on_all_ranks(group, path, _read_state, path, state, tables or {})
    for diverged in gather_objects(group, find_not_finite(state)):
        if diverged:
            raise BadInputError(
                f"{path}: {diverged} holds values that are not finite: training had diverged",
                "use an earlier checkpoint",
            )
    call_on_all_ranks(group, path, run.load, state)
    return more


def call_on_all_ranks(group: Group, path: Path, function: Callable[..., T], *args: Any) -> T:
    """Call a function on every rank, and raise an error of any rank on all of them (collective).

    Args:
        group: This rank.
        path: The checkpoint that the function reads.
        function: A function that is not collective: if one rank failed in a collective function,
            the others would wait forever.
        args: The function's arguments.

    Returns:
        The function's result on this rank.

    Raises:
        ClickLogError: The function's error. BadInputError means that the checkpoint is damaged, and
            makes a run use an older one; momentary errors, such as a lost connection or too little
            memory, are therefore raised as another ClickLogError.
        RuntimeError: Any other error of the function.
    """
    value: Any = None
    error = cause = None
    try:
        value = function(*args)
    except Exception as raised:
        error = cause = raised
        is_final = isinstance(raised, OutputError) or type(raised) is ClickLogError
        if is_transient(raised) and not is_final:
            error = make_read_error(path, raised)
        elif not isinstance(raised, ClickLogError):
            error = RuntimeError(f"{path}: {type(raised).__name__}: {raised}")
    errors = [other for other in gather_objects(group, error) if other is not None]
    # The checkpoint only counts as damaged if no rank has another kind of error.
    for other in errors:
        if not isinstance(other, BadInputError):
            raise other from cause
    if errors:
        raise errors[0] from cause
    return value


def _read_state(path: Path, state: dict[str, Any], tables: dict[str, GrownTable]) -> None:
    """Fill this rank's tensors from a checkpoint.

    Args:
        path: The checkpoint.
        state: Weights and optimizer state; those of grown tables hold their initial values.
        tables: How tables have grown since the checkpoint; empty if all are the same.

    Raises:
        BadInputError: The checkpoint is damaged.
        SchemaError: Its tensors do not fit the run.
        ClickLogError: It cannot be read at the moment.
    """
    with explain_errors(path):
        stored = read_tensors(path)
        windows: list[Window] = []
        # Functions to call once all windows are read.
        finishing: list[Callable[[], object]] = []
        for name, tensor in flatten(state):
            if name not in stored:
                raise SchemaError(
                    f"{path}: has no tensor {name!r}, which this run needs",
                    "give the same optimizer and model",
                )
            size = tuple(tensor.shape)
            table = _find_table(name, tables)
            if table and size:
                # Row-wise Adagrad's moments of column shards are concatenated, each as long as the
                # table.
                num_shards = size[0] // table.rows
                size = (num_shards * table.old_rows, *size[1:])
            if stored[name].size != size:
                raise SchemaError(
                    f"{path}: {name} has the shape {list(stored[name].size)}, but this run needs "
                    f"{list(size)}",
                    "give the same optimizer and model; row-wise Adagrad keeps a moment per column "
                    "shard, so it also needs the same world size and --sharding",
                )
            for offsets, part in _list_parts(tensor):
                if table and size:
                    finishing += _grow(name, offsets, part, table, windows)
                else:
                    windows.append(Window(name, offsets, part))
        read_windows(path, stored, windows)
        for finish in finishing:
            finish()


def _find_table(name: str, tables: dict[str, GrownTable]) -> GrownTable | None:
    """Return the grown table whose weights or optimizer state a tensor holds, if any."""
    for table, grown in tables.items():
        if name.endswith(f".{table}.weight") or f".{table}.weight." in name:
            return grown
    return None


def _list_parts(tensor: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return this rank's parts of a tensor, each with its offsets in the tensor."""
    if not hasattr(tensor, "local_shards"):
        return [((0,) * tensor.dim(), tensor.detach())]
    parts = []
    for shard in tensor.local_shards():
        parts.append((tuple(shard.metadata.shard_offsets), shard.tensor.detach()))
    return parts


def _grow(
    name: str,
    offsets: tuple[int, ...],
    part: torch.Tensor,
    table: GrownTable,
    windows: list[Window],
) -> list[Callable[[], object]]:
    """Append the windows to read for a part of a grown table.

    New rows get copies of out-of-vocabulary rows as weights; their moments keep their initial
    values.

    Args:
        name: The name of the tensor.
        offsets: The first index of the part in each dimension.
        part: The part.
        table: How the table has grown.
        windows: The list to append to.

    Returns:
        Functions to call once the windows are read.
    """
    # Moments of column shards are concatenated: find the shard, and the part's first row in it.
    shard, first = divmod(offsets[0], table.rows)
    num_kept = min(first + len(part), table.kept) - first
    if num_kept > 0:
        begin = shard * table.old_rows + first, *offsets[1:]
        windows.append(Window(name, begin, part[:num_kept]))
    rows, origins = table.list_new_rows(first, first + len(part))
    if not name.endswith(".weight") or not len(rows):
        return []
    sources = part.new_empty(table.oov_ids, part.shape[1])
    windows.append(Window(name, (FIRST_OOV_ID, offsets[1]), sources))
    return [functools.partial(_copy_rows, part, rows - first, sources, origins - FIRST_OOV_ID)]


def _copy_rows(
    part: torch.Tensor, rows: np.ndarray, sources: torch.Tensor, origins: np.ndarray
) -> None:
    """Set ``part[rows]`` to ``sources[origins]`` in blocks, to bound the memory for the copies."""
    for begin in range(0, len(rows), _COPIED_ROWS):
        block = slice(begin, begin + _COPIED_ROWS)
        target_rows = torch.from_numpy(rows[block]).to(part.device)
        source_rows = torch.from_numpy(origins[block]).to(part.device)
        part.index_copy_(0, target_rows, sources[source_rows])
