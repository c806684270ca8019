"""Arrays → the parquet of a training set, in parts of a fixed number of rows.

An import that is resumed writes only the parts that its journal has no record of.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from clicklog.arrays import to_arrow
from clicklog.errors import BadInputError, SettingsError
from clicklog.etl_output import EtlOutput
from clicklog.files.journal import Journal
from clicklog.manifest import InputFile, Manifest, PartFile
from clicklog.schema import TableSchema
from clicklog.splits import SPLITS
from clicklog.versions import installed_version
from etl import output
from etl.importers.arrays import ArrayFile, ArraySource, RowSet
from etl.manifest import (
    click_counts,
    days_of_splits,
    split_counts,
)
from etl.parquet import ROW_GROUP_ROWS, write_descriptions, write_part
from etl.settings import ImportSettings
from etl.state import already_finished, begin_or_resume

log = logging.getLogger(__name__)

ROWS_PER_PART = 2 * ROW_GROUP_ROWS
_LARGEST_ID = 2**31 - 2  # 1 + it still is an int32


@dataclasses.dataclass(frozen=True)
class _Part:
    """Rows [begin, end) of a set, and the file they go to."""

    file: str
    rows: RowSet
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class _PartRecord:
    """What the journal keeps of a part.

    Attributes:
        rows: in it.
        positives: rows with label 1.
        bytes: of the file.
        largest: the largest id of each categorical column.
    """

    rows: int
    positives: int
    bytes: int
    largest: list[int]


def import_arrays(
    source: ArraySource, settings: ImportSettings, report: Callable[[int], object] = lambda n: None
) -> dict[str, Any]:
    """Write the set as ``python -m etl run`` would, but for the workflow; returns the manifest.

    Args:
        source: what :func:`etl.importers.arrays.find_source` found.
        settings: sizes, threads.
        report: called with the rows written since the last call.

    Raises:
        BadInputError: a value cannot be used in training; names file, row, column and value.
        SettingsError: the table sizes do not fit the set.
        OutputError: the output directory holds something else, or cannot be written.
    """
    sizes = _given_sizes(source, settings)
    record = {
        "settings": {
            "import": source.kind,
            "input_path": str(settings.input_path.absolute()),
            "table_sizes": list(sizes) if sizes else None,
            "modulo": settings.modulo,
        },
        "inputs": _fingerprints(source),
        "versions": {name: installed_version(name) for name in ("nvt-torchrec", "pyarrow")},
    }
    with output.claimed(
        settings.output_path, resume=settings.resume, restart=settings.restart
    ) as work:
        if output.is_finished(settings.output_path):
            return already_finished(settings.output_path, record, "choose another --output_path")
        begin_or_resume(work, record, settings.output_path)
        return _import(source, settings, sizes, record, work, report)


def _given_sizes(source: ArraySource, settings: ImportSettings) -> tuple[int, ...] | None:
    sizes = settings.num_embeddings_per_feature or source.table_sizes
    if sizes is None:
        if settings.modulo:
            raise SettingsError("--modulo without table sizes", "set --num_embeddings_per_feature")
        return None
    if len(sizes) != len(source.categorical):
        raise SettingsError(
            f"{len(sizes)} table sizes, the set has {len(source.categorical)} categorical columns",
            "give one for each, in their order",
        )
    for name, size in zip(source.categorical, sizes, strict=True):
        if not 1 <= size <= _LARGEST_ID + 1:
            raise SettingsError(f"column {name}: a table of {size} rows", "from 1 to 2147483647")
    return sizes


def _fingerprints(source: ArraySource) -> dict[str, dict[str, Any]]:
    files = {str(file.path): file.path.stat() for row_set in source.sets for file in row_set.files}
    return {
        path: {"size": stat.st_size, "modified": str(stat.st_mtime_ns)}
        for path, stat in sorted(files.items())
    }


def _import(
    source: ArraySource,
    settings: ImportSettings,
    sizes: tuple[int, ...] | None,
    record: dict,
    work: Path,
    report: Callable,
) -> dict[str, Any]:
    root = EtlOutput(settings.output_path).splits
    parts = _cut(source)
    for split in SPLITS:
        if not any(row_set.split == split for row_set in source.sets):
            log.warning("%s: no rows for %s", settings.input_path, split)
    journal = Journal(work)
    finished = journal.finished(_PartRecord)

    def import_part(part: _Part) -> _PartRecord:
        if part.file not in finished:
            finished[part.file] = _write(part, source, sizes, settings, root)
            journal.add({part.file: dataclasses.asdict(finished[part.file])})
        return finished[part.file]

    results = []
    with ThreadPoolExecutor(settings.workers, "import") as pool:
        try:
            for result in pool.map(import_part, parts):
                results.append(result)
                report(result.rows)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if sizes is None:
        largest = np.max([result.largest for result in results], axis=0)
        sizes = tuple((largest + 1).tolist())
    schema = TableSchema(source.label, source.dense, source.categorical, sizes)
    write_descriptions(root, [part.file for part in parts], schema)
    manifest = _manifest(source, schema, record, parts, results)
    manifest.write(EtlOutput(settings.output_path).manifest)
    output.release(settings.output_path)
    return manifest


def _cut(source: ArraySource) -> list[_Part]:
    parts, numbers = [], dict.fromkeys(SPLITS, 0)
    for rows in source.sets:
        for begin in range(rows.begin, rows.end, ROWS_PER_PART):
            file = f"{rows.split}/part.{numbers[rows.split]}.parquet"
            parts.append(_Part(file, rows, begin, min(begin + ROWS_PER_PART, rows.end)))
            numbers[rows.split] += 1
    if not numbers["train"]:
        raise BadInputError(
            f"{source.sets[0].label.path.parent}: no rows to train on",
            "give a set with a split train",
        )
    return parts


def _write(
    part: _Part,
    source: ArraySource,
    sizes: tuple[int, ...] | None,
    settings: ImportSettings,
    root: Path,
) -> _PartRecord:
    """Write one part, durably."""
    rows, begin, end = part.rows, part.begin, part.end
    label = rows.label.read(begin, end)[0].astype(np.float32)
    _refuse(
        (label != 0) & (label != 1), label, rows.label, begin, source.label,
        "labels are 0 or 1: leave rows without a label out",
    )  # fmt: skip
    columns = [label]
    if rows.dense:
        for name, values in zip(source.dense, rows.dense.read(begin, end), strict=True):
            values = values.astype(np.float32)
            _refuse(
                ~np.isfinite(values), values, rows.dense, begin, name, "training needs a number"
            )
            columns.append(values)
    ids = [(file, values) for file in rows.categorical for values in file.read(begin, end)]
    largest = []
    for j, (name, (file, values)) in enumerate(zip(source.categorical, ids, strict=True)):
        size = sizes[j] if sizes else None
        values = _checked_ids(values, size, settings.modulo, file, begin, name)
        largest.append(int(values.max(initial=0)))
        columns.append(values)
    schema = TableSchema(source.label, source.dense, source.categorical, (1,) * len(ids)).arrow
    size = write_part(
        pa.Table.from_arrays([to_arrow(c) for c in columns], schema=schema), root / part.file
    )
    return _PartRecord(end - begin, int(np.count_nonzero(label)), size, largest)


def _checked_ids(
    values: np.ndarray, size: int | None, modulo: bool, file: ArrayFile, begin: int, name: str
) -> np.ndarray:
    """int32, each below ``size``."""
    if modulo:
        return np.mod(values.astype(np.int64), size).astype(np.int32)
    _refuse(
        values < 0, values, file, begin, name,
        "ids are not negative; raw hashes can be taken modulo the table sizes: --modulo with "
        "--num_embeddings_per_feature",
    )  # fmt: skip
    if size is None:
        remedy = (
            "raw hashes are not ids: run TorchRec's contiguous preprocessing, or `python -m etl "
            "run` on the raw log, or use --modulo with --num_embeddings_per_feature"
        )
    else:
        remedy = (
            f"the table has {size} rows: set --num_embeddings_per_feature, or leave it to the data"
        )
    _refuse(values > (_LARGEST_ID if size is None else size - 1), values, file, begin, name, remedy)
    return values.astype(np.int32)


def _refuse(
    wrong: np.ndarray, values: np.ndarray, file: ArrayFile, begin: int, name: str, remedy: str
) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadInputError(f"{file.path}: row {begin + row}: column {name}: {values[row]}", remedy)


def _manifest(
    source: ArraySource,
    schema: TableSchema,
    record: dict,
    parts: list[_Part],
    results: list[_PartRecord],
) -> Manifest:
    """As that of a run (:func:`etl.manifest.make_manifest`), without a workflow."""
    by_day_and_split: dict[str, dict[str, dict[str, Any]]] = {}
    for part, result in zip(parts, results, strict=True):
        own = by_day_and_split.setdefault(str(part.rows.day), {})
        counts = own.setdefault(part.rows.split, _no_rows())
        counts["rows"] += result.rows
        counts["positives"] += result.positives
    days_of = days_of_splits(by_day_and_split)
    rows = {
        str(file.path): {"in": file.rows, "out": file.rows, "rejected": 0}
        for row_set in source.sets
        for file in row_set.files
    }
    days = {str(file.path): row_set.day for row_set in source.sets for file in row_set.files}
    total = sum(result.rows for result in results)
    return Manifest(
        settings=record["settings"],
        inputs=[
            InputFile(days[path], path, fingerprint, rows[path])
            for path, fingerprint in record["inputs"].items()
        ],
        rows={"in": total, "out": total, "rejected": 0},
        days=days_of,
        splits={
            split: split_counts(by_day_and_split, split) if days_of[split] else _no_rows()
            for split in SPLITS
        },
        by_day_and_split=by_day_and_split,
        by_day=click_counts(by_day_and_split),
        num_embeddings_per_feature=schema.num_embeddings_per_feature,
        workflow_digest=None,
        versions=record["versions"],
        files=[
            PartFile(part.file, result.rows, result.bytes, part.rows.day)
            for part, result in zip(parts, results, strict=True)
        ],
        next_parts={split: sum(part.rows.split == split for part in parts) for split in SPLITS},
    )


def _no_rows() -> dict[str, Any]:
    return {"rows": 0, "positives": 0, "missing": {}, "out_of_vocabulary": {}}
