"""Extend a saved workflow by a day: new values get new ids, and existing ids never change.

:func:`write_base_state` writes the state of generation 0 (:mod:`workflows.extension_state`).
:func:`extend_workflow` makes the next generation, workflow and state, from the previous one and the
counts of a day. Days are added one by one, so that the result does not depend on how days are
grouped into commands.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.day_names import format_day
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.schema import LARGEST_TABLE
from nvt_torchrec.formats.vectors import select_vectors
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.extension_state import (
    ExtensionState,
    find_growing,
    make_empty_pending,
    read_state,
    write_state,
)
from nvt_torchrec.workflows.vocabulary import (
    FittedVocabulary,
    PendingValues,
    Values,
    concatenate,
    find_unequal,
    fit_vocabulary,
    keep_pending,
    make_empty_values,
    order_by_value,
    read_vocabulary,
    take,
)
from nvt_torchrec.workflows.writer import Fitted, write_workflow

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DayCounts:
    """The counts of one day.

    Attributes:
        day: The day.
        values: By vocabulary, the distinct values in any order, and the number of occurrences of
            each, int64, at least 1, over all columns that share the vocabulary. Vocabularies
            without values on this day, and hashed columns, may be left out.
        nulls: By vocabulary, the number of rows in which a single-hot column was missing; 0 if left
            out.
    """

    day: int
    values: dict[str, tuple[Values, np.ndarray]]
    nulls: dict[str, int]


def write_base_state(
    directory: Path, description: WorkflowDescription, fitted: Fitted, days: Sequence[int]
) -> None:
    """Write the state of generation 0.

    Args:
        directory: The directory of the state.
        description: The description of the workflow that ``fitted`` was written to.
        fitted: The fitted state, with pending values.
        days: The days it was fitted on, ascending.

    Raises:
        OutputError: The directory cannot be written.
    """
    spec = description.spec
    pending = {}
    for name, column in find_growing(spec).items():
        pending[name] = fitted.pending.get(name, make_empty_pending(column))
    write_state(directory, spec, ExtensionState(description.digest, 0, days[-1], pending))


def extend_workflow(
    workflow: Path,
    state: Path,
    counts: DayCounts,
    to_workflow: Path,
    to_state: Path,
    *,
    threads: int,
    tables: Path | None = None,
) -> WorkflowDescription:
    """Write the next generation of a workflow, with the values that a day adds.

    The same arguments give the same bytes. The existing workflow and state are not changed.

    Args:
        workflow: The directory of the saved workflow.
        state: The directory of its state.
        counts: The counts of a day later than all days counted before (not checked).
        to_workflow: The directory of the extended workflow; not ``workflow``.
        to_state: The directory of its state.
        threads: Number of threads; the bytes do not depend on it.
        tables: The directory of the tables as of the day; needed for a spec with tables.

    Returns:
        The description of the extended workflow.

    Raises:
        BadInputError: Workflow or state are damaged.
        SchemaError: The state belongs to another workflow, or a vocabulary becomes too large.
        OutputError: A directory cannot be written.
    """
    description = inspect(workflow)
    description.verify()
    before = read_state(state, description)
    encoder = compiled.load(workflow, verify=True)
    spec = description.spec
    columns = find_growing(spec)

    def extend(name: str) -> ExtendedVocabulary:
        column = columns[name]
        nothing = make_empty_values(column.raw), np.empty(0, np.int64)
        values, numbers = counts.values.get(name, nothing)
        return _extend_vocabulary(
            column,
            read_vocabulary(description, column),
            before.pending[name],
            values=values,
            numbers=numbers,
            indices=encoder.find(column.name, values),
            nulls=int(counts.nulls.get(name, 0)),
        )

    with ThreadPoolExecutor(threads) as pool:
        extended = dict(zip(columns, pool.map(extend, columns), strict=True))
    vocabularies = {}
    for name, (column, *_) in spec.vocabularies.items():
        if name in extended:
            vocabularies[name] = extended[name].vocabulary
        else:  # hashed
            nothing = make_empty_values(column.raw), np.empty(0, np.int64)
            vocabularies[name] = fit_vocabulary(*nothing, column, 0)
    fitted = Fitted(description.statistics, vocabularies)
    after = write_workflow(
        to_workflow,
        spec,
        fitted,
        threads=threads,
        days=(counts.day,),
        ancestors=description.lineage,
        tables=tables,
        known=select_vectors(description.files),
    )
    pending = {name: vocabulary.pending for name, vocabulary in extended.items()}
    generation = ExtensionState(after.digest, after.generation, counts.day, pending)
    write_state(to_state, spec, generation)
    _log_generation(description, after, extended)
    return after


def _log_generation(
    before: WorkflowDescription, after: WorkflowDescription, extended: dict[str, ExtendedVocabulary]
) -> None:
    """Log the number of values a day added, and warn of vocabularies that are full."""
    generation = after.lineage[-1]
    last = before.lineage[-1]
    added = sum(generation.values.values()) - sum(last.values.values())
    day = format_day(generation.days[-1])
    log.info("generation %d, day %s: %d values added", generation.number, day, added)
    full = []
    for name, column in find_growing(after.spec).items():
        num_waiting = len(extended[name].pending)
        max_values = column.max_table_size - column.reserved_ids
        is_full = generation.values[name] == max_values
        was_full = last.values[name] == max_values
        # A table that was already full, and that no values wait for, was reported for another day.
        if is_full and (num_waiting or not was_full):
            full.append(f"{name} ({num_waiting} values wait for an id)")
    if full:
        log.warning(
            "at max_table_size: %s\n  -> `nvt-etl run` on newer days gives ids to newer values",
            ", ".join(full),
        )
    forgotten = []
    for name, vocabulary in extended.items():
        if vocabulary.forgotten:
            forgotten.append(f"{name} ({vocabulary.forgotten})")
    if forgotten:
        log.warning(
            "too many values wait for an id; the rarest were forgotten: %s", ", ".join(forgotten)
        )


@dataclasses.dataclass(frozen=True)
class ExtendedVocabulary:
    """A vocabulary after a day.

    Attributes:
        vocabulary: The values with ids.
        pending: The values without an id.
        forgotten: The number of pending values that were dropped, because there were too many.
    """

    vocabulary: FittedVocabulary
    pending: PendingValues
    forgotten: int


def _extend_vocabulary(
    column: CategoricalColumn,
    before: FittedVocabulary,
    pending: PendingValues,
    *,
    values: Values,
    numbers: np.ndarray,
    indices: np.ndarray,
    nulls: int,
) -> ExtendedVocabulary:
    """Add a day to a vocabulary.

    Values that qualify for an id by the column's policy are appended by falling count over all
    days, ties by value. With ``max_table_size``, every value qualifies as long as the table has
    room.

    Args:
        column: The column.
        before: The vocabulary before the day.
        pending: The values without an id before the day.
        values: The distinct values of the day, in any order.
        numbers: int64 [n], the number of occurrences of each, at least 1.
        indices: int64 [n], the index of each value in the vocabulary; -1 if it is not in it.
        nulls: The number of rows of the day in which a single-hot column was missing.

    Raises:
        SchemaError: The vocabulary needs more ids than 32-bit integers allow.
        SettingsError: Its strings have more than 2 GiB.
    """
    has_id = indices >= 0
    counts = before.counts.copy()
    counts[indices[has_id]] += numbers[has_id]
    unseen = take(values, np.flatnonzero(~has_id))
    pending = _sum_counts(
        concatenate([pending.values, unseen], column.name),
        np.concatenate([pending.counts, numbers[~has_id]]),
    )

    qualified = _find_qualified(column, len(counts), pending.counts)
    added = pending.take(qualified)
    values = before.values
    if len(added):
        values = concatenate([values, added.values], column.name)
        counts = np.concatenate([counts, added.counts])
        pending = pending.take(np.delete(np.arange(len(pending)), qualified))
    size = column.reserved_ids + len(counts)
    if size > LARGEST_TABLE:
        raise SchemaError(
            f"column {column.name}: its vocabulary needs {size} ids, and ids are 32-bit integers",
            "set max_table_size or hash_buckets for this column in the spec, and fit again",
        )
    kept = keep_pending(pending)
    total = before.observed["oov"] + before.observed["unique"] + int(numbers.sum())
    unique = int(counts.sum())
    observed = {"null": before.observed["null"] + nulls, "oov": total - unique, "unique": unique}
    vocabulary = FittedVocabulary(values, counts, observed)
    return ExtendedVocabulary(vocabulary, kept, forgotten=len(pending) - len(kept))


def _sum_counts(values: Values, counts: np.ndarray) -> PendingValues:
    """Return the distinct values in ascending order, with the sums of their counts."""
    if not len(counts):
        return PendingValues(values, counts)
    ordered = PendingValues(values, counts).take(order_by_value(values))
    differs = find_unequal(ordered.values[1:], ordered.values[:-1])
    first = np.flatnonzero(np.concatenate([[True], differs]))
    return PendingValues(take(ordered.values, first), np.add.reduceat(ordered.counts, first))


def _find_qualified(column: CategoricalColumn, num_values: int, counts: np.ndarray) -> np.ndarray:
    """Return the indices of the pending values that get new ids, in the order of the ids.

    Args:
        column: The column.
        num_values: The number of values that have an id.
        counts: int64 [n], the counts of the pending values, which are in ascending order.
    """
    qualified = np.flatnonzero(counts >= column.freq_threshold)
    qualified = qualified[np.argsort(-counts[qualified], kind="stable")]
    if column.max_table_size:
        num_free = column.max_table_size - column.reserved_ids - num_values
        qualified = qualified[: max(0, num_free)]
    return qualified
