"""The interface of the engines of the ETL, which count and encode the blocks of a log.

``cpu`` and ``dask`` run the same functions and write the same bytes: in threads of this process, or
on the workers of a Dask cluster, which use their GPUs if the log has Criteo's format. ``nvtabular``
runs NVTabular's own operators over Dask. The counts of blocks, which are runs in a directory, are
added up here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.base.threads import count_cores
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.engines.runs import Runs
from nvt_torchrec.etl.events.earlier_days import open_values
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.event_values import EventValues
from nvt_torchrec.etl.row_additions import RowAdditions
from nvt_torchrec.etl.state.output import EVENTS, FIT
from nvt_torchrec.etl.units import counting
from nvt_torchrec.etl.units.counting import (
    Counts,
    compute_statistics,
    has_moments,
    merge,
    merge_moments,
)
from nvt_torchrec.etl.units.unit_plan import Unit
from nvt_torchrec.etl.units.writing import UnitResult
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.workflows.extend_workflow import DayCounts
from nvt_torchrec.workflows.vocabulary import FittedVocabulary, PendingValues, Values, apply_policy
from nvt_torchrec.workflows.writer import Fitted

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")
#: The version of the format of partial results; those of another version are not used.
_VERSION = 4
#: Called with the number of rows done since the last call.
Report: TypeAlias = Callable[[float], object]


@dataclasses.dataclass(frozen=True)
class Job:
    """The parameters of an engine, for a run or an extension.

    Attributes:
        spec: The feature spec.
        work: The directory of the state, for counts, parts and records; all workers see it.
        max_bad_rows: How many malformed rows of a block may be left out; 0: one is an error.
        workers: The number of threads of the ``cpu`` engine.
        strict_gpu: Whether to raise an error if a GPU and the host disagree.
    """

    spec: FeatureSpec
    work: Path
    max_bad_rows: int = 0
    workers: int = 1
    strict_gpu: bool = False

    @property
    def event_files(self) -> EventFiles | None:
        """The files of the events; None for a spec without events."""
        return EventFiles(self.work / EVENTS) if self.spec.events else None

    @property
    def events(self) -> EventValues | None:
        """The aggregates of all rows; None for a spec without events."""
        return open_values(self.work, self.spec)

    @property
    def additions(self) -> RowAdditions:
        """The data that are added to the rows of a block when they are read."""
        return RowAdditions.open(self.work, self.spec)


def open_runs(job: Job, blocks: list[Block], *, ahead: int = 1) -> Runs:
    """Open the partial results of a job; results of other blocks or another spec are deleted.

    They do not depend on ``max_bad_rows``: a block that was counted without leaving out malformed
    rows has none.

    Args:
        job: The job.
        blocks: The blocks to count.
        ahead: How many blocks may wait for the disk.
    """
    described = [_VERSION, counting.PIECE_BYTES, job.spec.to_dict()]
    described += [dataclasses.astuple(block) for block in blocks]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    return Runs(job.work / FIT, len(blocks), len(job.spec.vocabularies), key, ahead=ahead)


def add_up(
    job: Job, blocks: list[Block], finish: Callable[[Counts, CategoricalColumn, int], _Result]
) -> tuple[int, dict[str, int], np.ndarray, dict[str, _Result]]:
    """Add up the counts of all blocks; call ``finish`` for each vocabulary, in several threads.

    Args:
        job: The job.
        blocks: The blocks, all of which were counted.
        finish: Called with the counts of a vocabulary, its first column, and the number of missing
            values in its single-hot columns.

    Returns:
        The number of well-formed rows; by vocabulary, the number of missing values in its
        single-hot columns; the moments of the dense columns, without those of aggregates, float64
        [dense columns, 4]; by vocabulary, the result of ``finish``.

    Raises:
        BadInputError: Blocks were not counted, or a file is missing or damaged.
    """
    with open_runs(job, blocks) as runs:
        if runs.missing:
            raise BadInputError(
                f"{job.work}: no counts of {len(runs.missing)} of {len(blocks)} blocks",
                "all workers must see the output directory at the same path",
            )
        files = runs.files
        rows = runs.rows
    # Merging small counts first copies fewer values.
    small_first = sorted(files, key=lambda file: file.path.stat().st_size)
    nulls = np.sum([file.array("nulls") for file in files], axis=0).tolist()

    def merge_vocabulary(index: int, columns: tuple[CategoricalColumn, ...]) -> _Result:
        counts = merge(file.counts(index) for file in small_first)
        return finish(counts, columns[0], nulls[index])

    names = job.spec.vocabularies
    with ThreadPoolExecutor(count_cores(), "etl") as pool:
        finished = pool.map(merge_vocabulary, range(len(names)), names.values())
        vocabularies = dict(zip(names, finished, strict=True))
    # In the order of the blocks, because the last bits depend on the order of additions.
    moments_of_blocks: list[np.ndarray] = []
    for file in files:
        moments_of_blocks += list(file.array("moments"))
    moments = merge_moments(moments_of_blocks)
    return rows, dict(zip(names, nulls, strict=True)), moments, vocabularies


def _compute_aggregate_moments(block: Block, job: Job) -> np.ndarray:
    """Compute the moments of the aggregates of a block, float64 [aggregates, 4]."""
    spec = dataclasses.replace(job.spec, dense=tuple(job.spec.aggregates))
    events = job.events
    assert events is not None
    moments = [np.zeros((len(spec.dense), 4))]
    for rows in events.iterate_trained(block):
        moments.append(counting.compute_moments(rows, spec))
    return merge_moments(moments)


def _to_vocabulary_type(counts: Counts, column: CategoricalColumn) -> Values:
    """Convert counted values to the type of a vocabulary: int64, or strings with 32-bit offsets."""
    if not isinstance(counts.values, pa.Array):
        return counts.values.astype(np.int64)
    try:
        return counts.values.cast(pa.string())
    except pa.ArrowInvalid:
        raise SettingsError(
            f"column {column.name}: {len(counts)} distinct strings with more than 2 GiB of text",
            "set hash_buckets for this column in the spec",
        ) from None


class Engine:
    """Counts and encodes the blocks of a job. Started by :func:`etl.engine_choice.start_engine`.

    Attributes:
        job: The job.
        compare_seconds: The time spent comparing GPUs with the host, including compiling kernels.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.compare_seconds = 0.0

    def count(self, blocks: list[Block], report: Report) -> None:
        """Count the categories of blocks and the moments of their dense columns, durably.

        After an interruption, a call with the same blocks counts only the missing ones.

        Raises:
            BadRowError: A row is malformed; if there are several, the first one in the order of
                ``blocks`` is reported.
            BadInputError: A block cannot be read.
            OutputError: The directory of the state cannot be written.
            WorkerLostError: Workers ran out of memory.
        """
        raise NotImplementedError

    def encode(self, units: list[Unit], workflow: Path) -> Iterator[UnitResult]:
        """Encode units with a saved workflow; write their parts and records.

        The workflow is loaded from disk, so the training data are made with the same workflow as
        inference uses.

        Yields:
            The results, all units of a block together. After the last one, all units are durable.

        Raises:
            BadRowError: A row is malformed. The first error is raised, and units that have not
                begun are cancelled.
            BadInputError: A block cannot be read.
            OutputError: A part cannot be written.
            WorkerLostError: Workers ran out of memory.
        """
        raise NotImplementedError

    def map_tasks(
        self, work: Callable[[_Task], _Result], tasks: Iterable[_Task]
    ) -> Iterator[_Result]:
        """Run tasks in the threads or workers of the engine; see :class:`base.threads.MapTasks`.

        Raises:
            WorkerLostError: Workers ran out of memory.
        """
        raise NotImplementedError

    def _add_moments(self, moments: np.ndarray, blocks: list[Block]) -> None:
        """Fill in the rows of aggregates in the moments of the dense columns."""
        spec = self.job.spec
        if not spec.aggregates:
            return
        indices = [j for j, column in enumerate(spec.dense) if column.aggregate]
        compute = functools.partial(_compute_aggregate_moments, job=self.job)
        moments[indices] = merge_moments(list(self.map_tasks(compute, blocks)))

    def fit(self, blocks: list[Block], report: Report) -> Fitted:
        """Count the blocks for training; return their vocabularies and statistics.

        The result depends only on the blocks and the spec, not on the order in which runs merged.

        Raises:
            BadInputError: There are no rows, or a file is missing or damaged.
            SettingsError: A column has distinct strings with more than 2 GiB of text.
            ClickLogError: See :meth:`count`.
        """
        spec = self.job.spec

        def fit_vocabulary(
            counts: Counts, column: CategoricalColumn, nulls: int
        ) -> tuple[FittedVocabulary, PendingValues]:
            return apply_policy(_to_vocabulary_type(counts, column), counts.counts, column, nulls)

        self.count(blocks, report)
        rows, _, moments, vocabularies = add_up(self.job, blocks, fit_vocabulary)
        self._add_moments(moments, blocks)
        if not rows:
            raise BadInputError(
                f"split by {spec.split.by}: no well-formed row is for training",
                "look at the first line of the files, or change the split in the spec",
            )
        return Fitted(
            statistics=compute_statistics(moments, spec) if has_moments(spec) else {},
            vocabularies={name: fitted for name, (fitted, _) in vocabularies.items()},
            pending={name: pending for name, (_, pending) in vocabularies.items()},
        )

    def count_day(self, day: int, blocks: list[Block], report: Report) -> DayCounts:
        """Count the blocks of a new day, or only its training rows; return the counts.

        Raises:
            BadInputError: The day has no well-formed row, or a file is missing or damaged.
            SettingsError: A column has distinct strings with more than 2 GiB of text.
            ClickLogError: See :meth:`count`.
        """
        spec = self.job.spec

        def convert_counts(
            counts: Counts, column: CategoricalColumn, _: int
        ) -> tuple[Values, np.ndarray]:
            return _to_vocabulary_type(counts, column), counts.counts

        self.count(blocks, report)
        rows, nulls, _, vocabularies = add_up(self.job, blocks, convert_counts)
        if not rows and spec.split.by == "days":
            raise BadInputError(f"day {day} has no well-formed row", "look at its first line")
        return DayCounts(day, vocabularies, nulls)
