"""Extend a saved workflow by a day: new values get new ids, and no value gets another one.

:func:`write_base_state` writes the state of generation 0 (:mod:`workflows.extension.state`);
:func:`extend_workflow` makes the next generation, workflow and state, of the one before and the
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

from nvt_torchrec.formats.day_names import day_text
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.extension.grow_vocabulary import (
    DayOfVocabulary,
    ExtendedVocabulary,
    extend_vocabulary,
)
from nvt_torchrec.workflows.extension.state import (
    ExtensionState,
    no_values,
    read_state,
    remembered,
    write_state,
)
from nvt_torchrec.workflows.vocabulary import Values, empty_values, finish, read_vocabulary
from nvt_torchrec.workflows.writer import Descent, Fitted, write_workflow

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class DayCounts:
    """What was counted on one day.

    Attributes:
        day: The day.
        values: By vocabulary, the distinct values in any order and how often each occurred, int64,
            at least 1; over all columns that share the vocabulary. Vocabularies of which nothing
            was seen, and hashed columns, may be left out.
        nulls: By vocabulary, number of rows in which a single-hot column was missing; 0 where left
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
        description: The workflow that was written of ``fitted``, with its days.
        fitted: With pending values.
        days: The days it was fitted on, increasing.

    Raises:
        OutputError: The directory cannot be written.
    """
    spec = description.spec
    pending = {
        name: fitted.pending.get(name, no_values(column))
        for name, column in remembered(spec).items()
    }
    write_state(directory, spec, ExtensionState(description.digest, 0, days[-1], pending))


def extend_workflow(
    workflow: Path,
    state: Path,
    counts: DayCounts,
    to_workflow: Path,
    to_state: Path,
    *,
    threads: int,
) -> WorkflowDescription:
    """Write the next generation of a workflow: what a day adds to it.

    The same arguments give the same bytes. The workflow and the state that are extended stay as
    they are.

    Args:
        workflow: The directory of the saved workflow.
        state: The directory of its state.
        counts: What was counted on a day after all that were counted before, which is not checked.
        to_workflow: The directory of the extended workflow, another one.
        to_state: The directory of its state.
        threads: Number of threads; the bytes do not depend on it.

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
    columns = remembered(spec)

    def extend(name: str) -> ExtendedVocabulary:
        column = columns[name]
        known = read_vocabulary(description, column)
        values, numbers = counts.values.get(name, (empty_values(column.raw), np.empty(0, np.int64)))
        places = encoder.find(column.name, values)
        counted = DayOfVocabulary(values, numbers, places, int(counts.nulls.get(name, 0)))
        return extend_vocabulary(column, known, before.pending[name], counted)

    with ThreadPoolExecutor(threads) as pool:
        extended = dict(zip(columns, pool.map(extend, columns), strict=True))
    vocabularies = {
        name: extended[name].vocabulary
        if name in extended
        else finish(empty_values(column.raw), np.empty(0, np.int64), column, 0)
        for name, (column, *_) in spec.vocabularies.items()
    }
    fitted = Fitted(description.statistics, vocabularies)
    descent = Descent((counts.day,), description.lineage)
    after = write_workflow(to_workflow, spec, fitted, threads=threads, descent=descent)
    pending = {name: vocabulary.pending for name, vocabulary in extended.items()}
    generation = ExtensionState(after.digest, after.generation, counts.day, pending)
    write_state(to_state, spec, generation)
    _log(description, after, extended)
    return after


def _log(
    before: WorkflowDescription,
    after: WorkflowDescription,
    extended: dict[str, ExtendedVocabulary],
) -> None:
    generation, last = after.lineage[-1], before.lineage[-1]
    log.info(
        "generation %d, day %s: %d values added",
        generation.number,
        day_text(generation.days[-1]),
        sum(count - last.values[name] for name, count in generation.values.items()),
    )
    waiting = []
    for name, column in remembered(after.spec).items():
        count = len(extended[name].pending)
        full = column.max_table_size - column.reserved_ids
        if generation.values[name] == full and (count or last.values[name] < full):
            waiting.append(f"{name} ({count} values wait for an id)")
    if waiting:
        log.warning(
            "at max_table_size: %s\n  -> `nvt-etl run` of newer days gives ids to newer values",
            ", ".join(waiting),
        )
    forgotten = [
        f"{name} ({vocabulary.forgotten})"
        for name, vocabulary in extended.items()
        if vocabulary.forgotten
    ]
    if forgotten:
        log.warning(
            "too many values wait for an id; the rarest were forgotten: %s", ", ".join(forgotten)
        )
