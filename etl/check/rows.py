"""Checks of the data: page checksums, nulls, ranges of ids, finite numbers, labels.

Every row group is read once, in batches.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.etl.check.files import AGAIN, Output
from nvt_torchrec.etl.labels import one_label, one_label_remedy

_BATCH_ROWS = 1 << 16
_IDS = "ids have to be from 0 to the table's rows - 1: run the ETL again"
_FINITE = "training would diverge: replace the value, or run the ETL again"


@dataclasses.dataclass(frozen=True)
class _Problem:
    """A kind of invalid value in a row group: the first of them, and how many there are."""

    kind: str
    column: str
    what: str
    remedy: str
    row: int
    count: int


@dataclasses.dataclass
class _Scan:
    """The result of reading a row group."""

    file: str
    group: int
    rows: int = 0
    positives: int = 0
    negatives: int = 0
    problems: list[_Problem] = dataclasses.field(default_factory=list)
    unreadable: str = ""


def check(
    output: Output, *, workers: int, report: Callable[[int, int], object] | None = None
) -> None:
    """Read all data; see :func:`etl.commands.check.check` for the arguments."""
    known = _check_statistics(output)
    total = sum(footer.num_rows for footer in output.footers.values())
    found: dict[tuple[str, str, str], tuple[_Problem, int]] = {}
    positives: Counter = Counter()
    negatives: Counter = Counter()
    with ThreadPoolExecutor(workers, "check") as pool:
        for scan in _scans(pool, output):
            if report:
                report(scan.rows, total)
            if scan.unreadable:
                where = f"{scan.file}: row group {scan.group}"
                output.error("data", where, scan.unreadable, AGAIN)
            for problem in scan.problems:
                key = (scan.file, problem.column, problem.kind)
                first, group = found.get(key, (problem, scan.group))
                if key in found:
                    first = dataclasses.replace(first, count=first.count + problem.count)
                found[key] = (first, group)
            positives[scan.file] += scan.positives
            negatives[scan.file] += scan.negatives
    for (file, column, kind), (problem, group) in found.items():
        if (file, column, kind) not in known:
            where = f"{file}: row group {group}, row {problem.row}, column {column}"
            more = f" ({problem.count} such in the file)" if problem.count > 1 else ""
            output.error(kind, where, problem.what + more, problem.remedy)
    _check_labels(output, positives, negatives)


def _check_labels(output: Output, positives: Counter, negatives: Counter) -> None:
    counts = {
        split: {
            "rows": sum(positives[file] + negatives[file] for file in files),
            "positives": sum(positives[file] for file in files),
        }
        for split, files in output.splits.items()
    }
    remedy = one_label_remedy(counts, output.split_rule)
    for split, found in counts.items():
        counted = found["positives"]
        if what := one_label(found["rows"], counted):
            output.warning("labels", output.root / split, what, remedy)
        if output.manifest is None:
            continue
        expected = output.manifest.splits.get(split, {}).get("positives")
        if expected is not None and counted != expected:
            output.error(
                "rows",
                output.root / split,
                f"{counted} rows have label 1, the manifest says {expected}",
                AGAIN,
            )


def _check_statistics(output: Output) -> set[tuple[str, str, str]]:
    """Check nulls and ranges of ids by the footers; return findings as (file, column, kind)."""
    known = set()
    for file, footer in output.footers.items():
        sizes = _sizes(output, file)
        for i in range(footer.num_row_groups):
            group = footer.row_group(i)
            for j in range(group.num_columns):
                column = group.column(j)
                name, statistics = _column_name(column.path_in_schema, sizes), column.statistics
                if name is None or statistics is None:
                    continue
                where = f"{file}: row group {i}, column {name}"
                nulls = statistics.null_count if statistics.has_null_count else 0
                flat = name == column.path_in_schema  # an empty list counts as a null here
                if flat and nulls and (file, name, "nulls") not in known:
                    known.add((file, name, "nulls"))
                    output.error("nulls", where, f"{nulls} nulls", AGAIN)
                size = sizes[name]
                if size is None or not statistics.has_min_max:
                    continue
                if not isinstance(statistics.min, int):
                    continue  # another type, which was reported already
                for id_ in (statistics.min, statistics.max):
                    if not 0 <= id_ < size and (file, name, "id range") not in known:
                        known.add((file, name, "id range"))
                        output.error("id range", where, _outside(id_, size), _IDS)
    return known


def _sizes(output: Output, file: str) -> dict[str, int | None]:
    """Return the schema's columns, each with its table size if it holds ids.

    Tables may have grown since the file was written; its sizes are those of then.
    """
    if output.schema is None:
        return {}
    sizes: dict[str, int | None] = dict.fromkeys(output.schema.columns)
    sizes |= dict(zip(output.schema.categorical, output.schema.table_sizes, strict=True))
    then = output.sizes.get(file, {})
    return sizes | {name: size for name, size in then.items() if name in sizes}


def _column_name(path: str, sizes: dict) -> str | None:
    """Return ``ids`` for ``ids.list.element``; None for a column that is not in the schema."""
    return path if path in sizes else name if (name := path.split(".")[0]) in sizes else None


def _outside(id_: int, size: int) -> str:
    return f"id {id_}, the table has {size} rows"


def _scans(pool: ThreadPoolExecutor, output: Output) -> Iterator[_Scan]:
    groups = [
        (file, group)
        for file, footer in output.footers.items()
        for group in range(footer.num_row_groups)
    ]
    return pool.map(lambda key: _scan(output, *key), groups)


def _scan(output: Output, file: str, group: int) -> _Scan:
    scan = _Scan(file, group)
    try:
        parquet = pq.ParquetFile(
            output.root / file, metadata=output.footers[file], page_checksum_verification=True
        )
        batches = parquet.iter_batches(_BATCH_ROWS, [group], use_threads=False)
        for batch in batches:
            _scan_batch(output, scan, batch)
            scan.rows += len(batch)
    except (OSError, pa.ArrowException) as error:
        scan.unreadable = f"cannot be read: {error}"
    return scan


def _scan_batch(output: Output, scan: _Scan, batch: pa.RecordBatch) -> None:
    """Check the rows of a batch."""
    schema = output.schema
    sizes = _sizes(output, scan.file)
    for name in schema.columns if schema else batch.schema.names:
        if batch.schema.names.count(name) != 1:
            continue  # reported already
        array = batch.column(name)

        def problem(kind: str, what: str, remedy: str, row: int, count: int, name=name) -> None:
            row += scan.rows
            scan.problems.append(_Problem(kind, name, what, remedy, row, int(count)))

        if array.null_count:
            first = pc.index(array.is_null(), True).as_py()
            problem("nulls", "a null", AGAIN, first, array.null_count)
        if pa.types.is_list(array.type):  # a null list is empty
            _scan_lists(array, sizes.get(name), problem)
            continue
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            continue  # the type was reported already
        values = to_numpy(pc.fill_null(array, 0) if array.null_count else array)
        if schema and name in schema.labels:
            if name == schema.label:
                scan.positives += int(np.count_nonzero(values == 1))
                scan.negatives += int(np.count_nonzero(values == 0))
            _first(
                problem,
                "labels",
                (values != 0) & (values != 1),
                lambda i, values=values: f"label {values[i]:g}",
                "labels are 0 or 1: run the ETL again",
            )
        elif sizes.get(name) is not None:
            _scan_ids(values, sizes[name], problem)
        elif values.dtype.kind == "f":
            _scan_finite(values, problem)
            if schema and name == schema.weight:
                _first(
                    problem,
                    "weights",
                    values < 0,
                    lambda i, values=values: f"weight {values[i]:g}",
                    "weights are not negative: correct the column in the log, and run the ETL "
                    "again",
                )


def _first(problem: Callable, kind: str, wrong: np.ndarray, what: Callable, remedy: str) -> None:
    count = np.count_nonzero(wrong)
    if count:
        row = int(np.argmax(wrong))
        problem(kind, what(row), remedy, row, count)


def _scan_ids(values: np.ndarray, size: int, problem: Callable, rows: Any = None) -> None:
    """Check ids; ``rows`` maps positions in ``values`` to rows, for lists."""
    if not len(values) or (values.min() >= 0 and values.max() < size):
        return
    wrong = (values < 0) | (values >= size)
    at = int(np.argmax(wrong))
    row = at if rows is None else rows(at)
    problem("id range", _outside(values[at], size), _IDS, row, np.count_nonzero(wrong))


def _scan_finite(values: np.ndarray, problem: Callable) -> None:
    with np.errstate(invalid="ignore"):
        total = values.sum(dtype=np.float64)  # finite only if all values are
    if not np.isfinite(total):
        _first(
            problem,
            "not finite",
            ~np.isfinite(values),
            lambda i: f"{values[i]} instead of a finite number",
            _FINITE,
        )


def _scan_lists(array: pa.ListArray, size: int | None, problem) -> None:
    offsets = to_numpy(array.offsets).astype(np.int64)
    child = array.values.slice(offsets[0], offsets[-1] - offsets[0])
    offsets -= offsets[0]

    def row_of(at: int) -> int:
        return int(np.searchsorted(offsets, at, side="right")) - 1

    if child.null_count:
        first = pc.index(child.is_null(), True).as_py()
        problem("nulls", "a null in a list", AGAIN, row_of(first), child.null_count)
    if pa.types.is_integer(child.type) and size is not None:
        values = to_numpy(pc.fill_null(child, 0) if child.null_count else child)
        _scan_ids(values, size, problem, row_of)
