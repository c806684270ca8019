"""From the counts of blocks, which are runs in a directory, to vocabularies and statistics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.clicklog.readers.raw import Block
from nvt_torchrec.etl.engines import block as block_functions
from nvt_torchrec.etl.engines.counting import Counts, merge
from nvt_torchrec.etl.engines.hardware import cores
from nvt_torchrec.etl.engines.job import Job
from nvt_torchrec.etl.engines.runs import Runs
from nvt_torchrec.etl.output import FIT
from nvt_torchrec.etl.results import NoTrainingRowsError
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn
from nvt_torchrec.workflows.extension.workflow import DayCounts
from nvt_torchrec.workflows.moments import merge_moments, normalized, statistics
from nvt_torchrec.workflows.vocabulary import FittedVocabulary, PendingValues, Values, apply_policy
from nvt_torchrec.workflows.writer import Fitted

_Result = TypeVar("_Result")
#: The version of the partial results; a run does not use those of another version.
_VERSION = 3


def open_runs(job: Job, blocks: list[Block], *, ahead: int = 1) -> Runs:
    """Open the partial results of a job; those that depend on other things are deleted.

    Whether malformed rows are rejected does not matter: a block that was counted without rejecting
    has no such rows.

    Args:
        job: The job.
        blocks: The blocks that are counted.
        ahead: How many of them may wait for the disk.
    """
    described = [_VERSION, block_functions.PIECE_BYTES, job.spec.to_dict()]
    described += [dataclasses.astuple(block) for block in blocks]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return Runs(job.work / FIT, len(blocks), len(job.spec.vocabularies), key, ahead=ahead)


def fit(job: Job, blocks: list[Block]) -> Fitted:
    """Return the vocabularies and statistics that the counts of all blocks give.

    The result depends only on the blocks and the spec, not on which runs were merged.

    Args:
        job: The job.
        blocks: The blocks of the training days, all of which are counted.

    Raises:
        BadInputError: There are no rows, or a file is missing or damaged.
        SettingsError: A column has strings of more than 2 GiB in all.
    """

    def vocabulary(
        counts: Counts, column: CategoricalColumn, nulls: int
    ) -> tuple[FittedVocabulary, PendingValues]:
        return apply_policy(_to_vocabulary(counts, column), counts.counts, column, nulls)

    spec = job.spec
    rows, _, moments, vocabularies = _add_up(job, blocks, vocabulary)
    if not rows and spec.split.by != "days":
        raise BadInputError(
            f"split by {spec.split.by}: no well-formed row is for training",
            "change the split in the spec, or look at the first line of the files",
        )
    if not rows:
        raise BadInputError("the training days have no well-formed row", "look at their first line")
    return Fitted(
        statistics=statistics(moments, spec) if normalized(spec) else {},
        vocabularies={name: fitted for name, (fitted, _) in vocabularies.items()},
        pending={name: pending for name, (_, pending) in vocabularies.items()},
        moments=moments if normalized(spec) else None,
    )


def day_counts(job: Job, day: int, blocks: list[Block]) -> DayCounts:
    """Return what a workflow is extended by: the counts of a day, or of its rows for training.

    Args:
        job: The job.
        day: The number of the day.
        blocks: Its blocks, all of which are counted.

    Raises:
        NoTrainingRowsError: None of its rows is for training, and none of a later day will be.
        BadInputError: The day has no well-formed row, or a file is missing or damaged.
        SettingsError: A column has too many different strings.
    """

    def values(counts: Counts, column: CategoricalColumn, _: int) -> tuple[Values, np.ndarray]:
        return _to_vocabulary(counts, column), counts.counts

    split = job.spec.split
    rows, nulls, moments, vocabularies = _add_up(job, blocks, values)
    if not rows and split.by == "days":
        raise BadInputError(f"day {day} has no well-formed row", "look at its first line")
    if not rows and split.by == "time":
        raise NoTrainingRowsError(
            f"day {day}: no row is before {split.valid_from}, so none is for training: the "
            "cuts of a split by time stay where they are",
            "run the ETL again over all files with later valid_from and test_from in the spec's "
            '[split]; or, to train on each day when the next one is there, with by = "days"; or '
            "score the day with `python -m inference predict --evaluate`",
        )
    return DayCounts(day, vocabularies, nulls, moments if normalized(job.spec) else None)


def _add_up(
    job: Job, blocks: list[Block], finish: Callable[[Counts, CategoricalColumn, int], _Result]
) -> tuple[int, dict[str, int], np.ndarray, dict[str, _Result]]:
    """Add up the counts of all blocks; call ``finish`` for each vocabulary, in several threads.

    Returns:
        The number of well-formed rows; by vocabulary, the rows in which a single-hot column was
        missing; the moments of the dense columns, float64 [dense columns, 4]; by vocabulary, what
        ``finish`` returned.
    """
    with open_runs(job, blocks) as runs:
        if runs.missing:
            raise BadInputError(
                f"{job.work}: {len(runs.missing)} of {len(blocks)} blocks were not counted there",
                "all workers must see the output directory at the same path",
            )
        files, rows = runs.files, runs.rows
    small_first = sorted(files, key=lambda file: file.path.stat().st_size)
    nulls = sum(file.array("nulls") for file in files).tolist()

    def vocabulary(index: int, columns: tuple[CategoricalColumn, ...]) -> _Result:
        counts = merge(file.counts(index) for file in small_first)
        return finish(counts, columns[0], nulls[index])

    names = job.spec.vocabularies
    with ThreadPoolExecutor(cores(), "etl") as pool:
        finished = pool.map(vocabulary, range(len(names)), names.values())
        vocabularies = dict(zip(names, finished, strict=True))
    moments = merge_moments([block for file in files for block in file.array("moments")])
    return rows, dict(zip(names, nulls, strict=True)), moments, vocabularies


def _to_vocabulary(counts: Counts, column: CategoricalColumn) -> Values:
    """Convert values to the types of vocabularies: int64, or strings with 32-bit offsets."""
    if not isinstance(counts.values, pa.Array):
        return counts.values.astype(np.int64)
    try:
        return counts.values.cast(pa.string())
    except pa.ArrowInvalid:
        raise SettingsError(
            f"column {column.name}: {len(counts)} different strings of more than 2 GiB in all",
            "set hash_buckets for this column in the spec",
        ) from None
