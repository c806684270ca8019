"""Read the state of a run back from a checkpoint of any world size and sharding plan.

The tables may have grown since. A value keeps its id from one generation of a workflow to the next,
so its row stays. A value that has got an id since was encoded as out of vocabulary before. Its row
starts as a copy of that row, so that the model predicts for it what it predicted before.
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

#: How many rows are copied at a time from the rows of out of vocabulary.
_COPIED_ROWS = 65536


@dataclasses.dataclass(frozen=True)
class GrownTable:
    """How the rows of a table follow from those of a checkpoint's.

    Attributes:
        rows_then: The rows of the checkpoint's table.
        rows: The rows of the table.
        kept: How many of the first rows of the checkpoint's table stay. Rows after them start anew.
        origins: Int64, for each row from ``kept`` on that belongs to a value, the row of the
            checkpoint's table that it starts as. Later rows start as the first row of out of
            vocabulary.
        oov_ids: The number of rows of out of vocabulary.
    """

    rows_then: int
    rows: int
    kept: int
    origins: np.ndarray
    oov_ids: int = 1

    def anew(self, begin: int, end: int) -> tuple[np.ndarray, np.ndarray]:
        """Return which of the rows [begin, end) start anew, and as which rows of the checkpoint.

        Returns:
            Two arrays int64 of the same length.
        """
        rows = np.arange(max(begin, self.kept), max(end, self.kept))
        padded = np.append(self.origins, FIRST_OOV_ID)
        return rows, padded[np.minimum(rows - self.kept, len(self.origins))]


def grow_tables(
    then: ModelConfig, now: ModelConfig, generation: Generation, workflow: WorkflowDescription
) -> dict[str, GrownTable]:
    """Return how each table follows from that of a checkpoint, by the name of the table.

    Args:
        then: The model of the checkpoint.
        now: The model of the run, which differs in the sizes of tables only.
        generation: The generation of the checkpoint's data.
        workflow: The workflow of the run's data, of a later generation or the same one.

    Raises:
        SettingsError: Ids share rows, and would share other rows than before.
        SchemaError: The columns are not those of the workflow.
        BadInputError: A file of the workflow is damaged.
    """
    columns = {column.name: column for column in workflow.spec.categorical}
    tables = {}
    for (name, table), rows_then, rows in zip(
        now.table_by_column.items(), then.num_embeddings, now.num_embeddings, strict=True
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
        if now.hash_indices:
            if rows != rows_then and (rows_then < kept or rows < kept):
                raise _make_sharing_error(name, kept, rows_then, rows)
            kept, needed = min(kept, rows), min(needed, rows)
        origins = workflow.oov_ids(column, np.arange(kept, needed))
        tables[table] = GrownTable(rows_then, rows, kept, origins, column.oov_ids)
    return tables


def _make_sharing_error(name: str, ids: int, rows_then: int, rows: int) -> SettingsError:
    """Return the error for ids that --hash_indices would map to other rows than before."""
    return SettingsError(
        f"--continue_from: column {name} had {ids} ids, which shared {rows_then} rows; in a table "
        f"of {rows} rows they would have other ones",
        "give the sizes of the checkpoint (--max_table_size, --num_embeddings_per_feature), or "
        "train from scratch without --continue_from",
    )


def load_state(
    path: Path, run: RunState, tables: dict[str, GrownTable] | None = None
) -> dict[str, Any]:
    """Load weights and optimizer state, also from another world size and plan (collective).

    Random number generators are loaded as well if tables and the world size are the same.

    Args:
        path: The checkpoint.
        run: The run. If tables have grown, it must be as it was initialized.
        tables: How each table follows from that of the checkpoint; None if all are the same.

    Returns:
        What a run that is to be resumed keeps beside its weights, on this rank: ``best``, weights
        and optimizer state of the best evaluation (:mod:`training.loop.stopping`), and ``average``,
        that of its weights (:mod:`training.loop.averaging`), if it has them.

    Raises:
        BadInputError: The checkpoint is damaged, or holds values that are not finite.
        SchemaError: Its tensors are not those of the run, for example row-wise Adagrad's moments
            of column shards under another plan.
    """
    state, group = run.tensors(), run.group
    record = call_on_all_ranks(group, path, CheckpointRecord.read, path)
    if tables is not None or record.world_size != group.world_size:
        state.pop("random", None)
    beside: dict[str, Any] = {}
    if not run.alone and tables is None:
        if record.training.get("best"):
            beside["best"] = copy_state({name: state[name] for name in ("model", "optimizer")})
        if record.training.get("averaged"):
            beside["average"] = copy_state(state["model"])
    state |= beside
    shares = group.rank, group.world_size
    call_on_all_ranks(group, path, check_contents, path, record.files, *shares)
    call_on_all_ranks(group, path, _read_state, path, state, tables or {})
    for diverged in gather_objects(group, find_not_finite(state)):
        if diverged:
            raise BadInputError(
                f"{path}: {diverged} holds values that are not finite: training had diverged",
                "use an earlier one",
            )
    call_on_all_ranks(group, path, run.load, state)
    return beside


def call_on_all_ranks(group: Group, path: Path, function: Callable[..., T], *args: Any) -> T:
    """Call a function on every rank, and raise an error of any rank on all of them (collective).

    Args:
        group: This rank.
        path: The checkpoint that the function looks at.
        function: It must not be collective: a rank that fails would leave the others waiting in it.
        args: Its arguments.

    Returns:
        What the function returned on this rank.

    Raises:
        ClickLogError: The function's error. An error that says nothing against the checkpoint does
            not become a BadInputError, so that no other checkpoint is taken in its place.
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
    # The checkpoint is damaged for certain only if no rank has another error.
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
        state: Weights and optimizer state; of tables that have grown, as they were initialized.
        tables: How tables that have grown follow from those of the checkpoint.

    Raises:
        BadInputError: The checkpoint is damaged.
        SchemaError: Its tensors are not those of the run.
        ClickLogError: It cannot be read now.
    """
    with explain_errors(path):
        stored = read_tensors(path)
        windows: list[Window] = []
        # What is to be done once all windows are read.
        finishing: list[Callable[[], object]] = []
        for name, tensor in flatten(state):
            if name not in stored:
                raise SchemaError(
                    f"{path}: holds no {name!r}, which this run needs",
                    "give the same optimizer and model",
                )
            size = tuple(tensor.shape)
            table = _find_table(name, tables)
            if table and size:
                # Row-wise Adagrad's moments of column shards lie one below the other, each as long
                # as the table.
                num_shards = size[0] // table.rows
                size = (num_shards * table.rows_then, *size[1:])
            if stored[name].size != size:
                raise SchemaError(
                    f"{path}: {name} is {list(stored[name].size)}, in this run {list(size)}",
                    "give the same optimizer and model; row-wise Adagrad keeps a moment per column "
                    "shard, so it needs the same world size and --sharding then",
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
    """Return the table whose weights or optimizer state a tensor holds, if it has grown."""
    for table, grown in tables.items():
        if name.endswith(f".{table}.weight") or f".{table}.weight." in name:
            return grown
    return None


def _list_parts(tensor: Any) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Return the parts of a tensor on this rank, each after its first index in every dimension."""
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
    """Add the windows to read for a part of a grown table.

    The weights of rows that start anew become copies of other rows; their moments stay as they were
    initialized.

    Args:
        name: The name of the tensor.
        offsets: The first index of the part in each dimension.
        part: The part.
        table: How the table has grown.
        windows: To which windows are added.

    Returns:
        What is to be done once the windows are read.
    """
    # Moments of column shards lie one below the other: the number of the shard, and a row of it.
    shard, first = divmod(offsets[0], table.rows)
    num_kept = min(first + len(part), table.kept) - first
    if num_kept > 0:
        begin = shard * table.rows_then + first, *offsets[1:]
        windows.append(Window(name, begin, part[:num_kept]))
    rows, origins = table.anew(first, first + len(part))
    if not name.endswith(".weight") or not len(rows):
        return []
    sources = part.new_empty(table.oov_ids, part.shape[1])
    windows.append(Window(name, (FIRST_OOV_ID, offsets[1]), sources))
    return [functools.partial(_copy_rows, part, rows - first, sources, origins - FIRST_OOV_ID)]


def _copy_rows(
    part: torch.Tensor, rows: np.ndarray, sources: torch.Tensor, origins: np.ndarray
) -> None:
    """Set ``part[rows]`` to ``sources[origins]``, some rows at a time."""
    for begin in range(0, len(rows), _COPIED_ROWS):
        block = slice(begin, begin + _COPIED_ROWS)
        target_rows = torch.from_numpy(rows[block]).to(part.device)
        source_rows = torch.from_numpy(origins[block]).to(part.device)
        part.index_copy_(0, target_rows, sources[source_rows])
