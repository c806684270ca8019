"""Prepare the drawing of negatives: read all items, and the items of each user.

The result is a directory in the state of a run, and in ``OUT/extension`` for later days::

    negatives.json   see :mod:`.negatives_record`
    candidates/      the items, see :mod:`.candidates`
    counts.npy       int64 [items], the number of training rows with label 1 of each item in the
                     first run
    pairs.npy        int64 [pairs], ascending, the joined hashes of user and item
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.negatives.candidates import (
    CANDIDATES,
    ItemRows,
    make_candidate_spec,
    select_item_columns,
)
from nvt_torchrec.etl.negatives.negatives_record import (
    COUNTS,
    FORMAT,
    PAIRS,
    RECORD,
    NegativesRecord,
    check_directory,
)
from nvt_torchrec.etl.negatives.positives import Positives, look_up_counts
from nvt_torchrec.etl.negatives.sampler import NegativeSampler, compute_log_weights
from nvt_torchrec.etl.state.output import NEGATIVES
from nvt_torchrec.etl.tables.table_sources import TableSources
from nvt_torchrec.etl.tables.table_writer import read_table_file
from nvt_torchrec.etl.units.unit_plan import UnitPlan
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.table_files import list_table_arrays

log = logging.getLogger(__name__)

#: The minimum share of the log's items that a table must have.
_MIN_FOUND = 0.01


def prepare_negatives(
    plan: UnitPlan,
    spec: FeatureSpec,
    work: Path,
    sources: TableSources,
    *,
    earlier: Path | None,
    threads: int,
    max_bad_rows: int,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Read all blocks, and write the data from which negatives are drawn to the state of a run.

    Nothing is done if an earlier process has written them.

    Args:
        plan: The blocks.
        spec: The columns.
        work: The directory of the state.
        sources: The files of tables.
        earlier: For an extension, ``OUT/extension`` of the earlier days. The counts of items are
            taken from it, so that an item's probability and its log-Q correction stay the same.
        threads: Number of blocks that are read at once.
        max_bad_rows: The maximum number of malformed rows of a block that are left out; 0: a
            malformed row is an error.
        report: Called with the number of rows read since the last call.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A file cannot be read, or a file of earlier days is damaged.
        SettingsError: The table has hardly any item of the log.
        OutputError: The directory cannot be written.
    """
    directory = work / NEGATIVES
    if directory.exists():
        return
    splits = {unit.block: unit.split for unit in plan.units}

    def read(block: Block) -> Positives:
        train = splits[block] == "train"
        return Positives.read(block, spec, train=train, max_bad_rows=max_bad_rows)

    parts = []
    for part in map_in_order(read, plan.blocks, threads, "negatives"):
        report(part.rows)
        parts.append(part)
    positives = Positives.merge(parts)
    assert spec.negatives is not None
    stored_spec = make_candidate_spec(spec)
    items = [positives.items]
    pairs = np.asarray(positives.pairs.values)
    if spec.negatives.table:
        items = _read_table(spec, sources, threads, reject=max_bad_rows > 0)
        if items:
            _check_found(spec, positives, items)
    if earlier is not None:
        earlier_record = check_directory(earlier / NEGATIVES)
        before = ItemRows.read(earlier / NEGATIVES / CANDIDATES, stored_spec)
        items.append(before)
        pairs = np.union1d(pairs, map_array(earlier / NEGATIVES / PAIRS))
    candidates = ItemRows.concatenate(items).keep_oldest()
    counts = look_up_counts(positives.trained, candidates.keys)
    log_mean_weight = 0.0
    if spec.negatives.popularity and len(counts):
        weights = np.exp(compute_log_weights(counts, spec.negatives.popularity))
        log_mean_weight = float(np.log(weights.mean()))
    if earlier is not None:
        counts = np.zeros(len(candidates.keys), np.int64)
        index = np.searchsorted(candidates.keys, before.keys)
        counts[index] = map_array(earlier / NEGATIVES / COUNTS)
        log_mean_weight = earlier_record.log_mean_weight
    log.info("negatives: drawn from %d items", len(candidates.keys))
    with new_directory(directory) as temporary:
        candidates.write(temporary / CANDIDATES, stored_spec)
        write_array(temporary / COUNTS, counts)
        write_array(temporary / PAIRS, pairs)
        names = [COUNTS, PAIRS]
        names += [f"{CANDIDATES}/{file}" for file in list_table_arrays(stored_spec, CANDIDATES)]
        files = {name: FileEntry.from_file(temporary / name) for name in names}
        record = NegativesRecord(files, log_mean_weight)
        FORMAT.write(temporary / RECORD, dataclasses.asdict(record))


def _read_table(
    spec: FeatureSpec, sources: TableSources, threads: int, *, reject: bool
) -> list[ItemRows]:
    """Read the items of a table; [] for an extension without files of the table."""
    assert spec.negatives is not None
    (rule,) = (rule for rule in spec.tables if rule.name == spec.negatives.table)
    (source,) = rule.file_key
    columns = select_item_columns(spec, rule.name, source)
    names = [column.name for column in columns]
    parts = []
    for file in sources.get(rule.name, []):
        for piece, _ in read_table_file(rule, spec, file, threads, reject, columns):
            rows = ItemRows.from_rows(piece.rows, piece.spec, names, piece.row_keys.keys)
            parts.append(dataclasses.replace(rows, starts=piece.row_keys.starts))
    return parts


def _check_found(spec: FeatureSpec, positives: Positives, items: list[ItemRows]) -> None:
    """Raise :class:`SettingsError` if hardly any item of the log is in the table."""
    counted = positives.items.keys
    found = int(np.count_nonzero(np.isin(counted, np.concatenate([part.keys for part in items]))))
    if found < _MIN_FOUND * len(counted):
        assert spec.negatives is not None
        raise SettingsError(
            f"negatives: table {spec.negatives.table} has {found:,} of the {len(counted):,} items "
            "of the log",
            "correct the key of the table in the spec; log and table are read alike: "
            f"{spec.negatives.item} as {spec.make_key_read(spec.negatives.item).raw}",
        )


def check_stored(extension: Path) -> None:
    """Check that the files of ``OUT/extension`` are whole. Raises :class:`BadInputError`."""
    check_directory(extension / NEGATIVES)


def keep_negatives(work: Path, extension: Path) -> None:
    """Link the data for later days from the state of a run. Raises OSError."""
    shutil.copytree(work / NEGATIVES, extension / NEGATIVES, copy_function=os.link)


@functools.lru_cache(1)
def open_sampler(work: Path, spec: FeatureSpec) -> NegativeSampler | None:
    """Open the sampler of negatives in the state of a run; None for a spec without negatives."""
    return NegativeSampler(work / NEGATIVES, spec) if spec.negatives else None
