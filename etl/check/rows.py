"""Checks of the data: page checksums, nulls, ranges of ids, finite numbers, labels and weights.

Every row group is read once, in batches.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.etl.check.output import AGAIN, Output
from nvt_torchrec.etl.labels import one_label, one_label_remedy

_BATCH_ROWS = 1 << 16
_IDS = "ids have to be from 0 to the table's rows - 1: run the ETL again"
_FINITE = "training would diverge: replace the value, or run the ETL again"
_LABELS = "labels are 0 or 1: run the ETL again"
_WEIGHTS = "weights are not negative: correct the column in the log, and run the ETL again"


@dataclasses.dataclass
class _Problem:
    """A kind of invalid value in a row group: the first of them, and how many there are."""

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
    problems: dict[tuple[str, str], _Problem] = dataclasses.field(default_factory=dict)
    unreadable: str = ""


def check(
    output: Output, *, workers: int, report: Callable[[int, int], object] | None = None
) -> None:
    """Read all data; see :func:`etl.commands.check.check` for the arguments."""
    total = sum(footer.num_rows for footer in output.footers.values())
    groups = [
        (file, group)
        for file, footer in output.footers.items()
        for group in range(footer.num_row_groups)
    ]
    positives: Counter = Counter()
    negatives: Counter = Counter()
    with ThreadPoolExecutor(workers, "check") as pool:
        for scan in pool.map(lambda key: _scan(output, *key), groups):
            if report:
                report(scan.rows, total)
            where = f"{scan.file}: row group {scan.group}"
            if scan.unreadable:
                output.error("data", where, scan.unreadable, AGAIN)
            for (kind, column), problem in scan.problems.items():
                more = f" ({problem.count} such in the row group)" if problem.count > 1 else ""
                place = f"{where}, row {problem.row}, column {column}"
                output.error(kind, place, problem.what + more, problem.remedy)
            positives[scan.file] += scan.positives
            negatives[scan.file] += scan.negatives
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
    for split, counted in counts.items():
        where = output.root / split
        if what := one_label(counted["rows"], counted["positives"]):
            output.warning("labels", where, what, remedy)
        expected = output.manifest.splits.get(split, {}) if output.manifest else {}
        if expected.get("positives", counted["positives"]) != counted["positives"]:
            what = f"{counted['positives']} rows have label 1, the manifest says "
            output.error("rows", where, f"{what}{expected['positives']}", AGAIN)


def _scan(output: Output, file: str, group: int) -> _Scan:
    scan = _Scan(file, group)
    try:
        parquet = pq.ParquetFile(
            output.root / file, metadata=output.footers[file], page_checksum_verification=True
        )
        for batch in parquet.iter_batches(_BATCH_ROWS, [group], use_threads=False):
            _scan_batch(output, scan, batch)
            scan.rows += len(batch)
    except (OSError, pa.ArrowException) as error:
        scan.unreadable = f"cannot be read: {error}"
    return scan


def _scan_batch(output: Output, scan: _Scan, batch: pa.RecordBatch) -> None:
    """Check the rows of a batch."""
    schema, sizes = output.schema, _sizes(output, scan.file)
    for name in schema.columns if schema else batch.schema.names:
        if batch.schema.names.count(name) != 1:
            continue  # reported already
        array, offsets = batch.column(name), None
        if array.null_count:  # a null list is empty
            _add(scan, "nulls", name, _is_null(array), lambda i: "a null", AGAIN)
        if pa.types.is_list(array.type):
            offsets = to_numpy(array.offsets).astype(np.int64)
            array = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            offsets -= offsets[0]
            if array.null_count:
                nulls = _is_null(array)
                _add(scan, "nulls", name, nulls, lambda i: "a null in a list", AGAIN, offsets)
        if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
            continue  # the type was reported already
        values = to_numpy(pc.fill_null(array, 0) if array.null_count else array)
        if schema and name == schema.label:
            scan.positives += int(np.count_nonzero(values == 1))
            scan.negatives += int(np.count_nonzero(values == 0))
        for kind, wrong, what, remedy in _wrong_values(output, name, values, sizes.get(name)):
            _add(
                scan, kind, name, wrong, lambda i, v=values, w=what: w.format(v[i]), remedy, offsets
            )


def _is_null(array: pa.Array) -> np.ndarray:
    return array.is_null().to_numpy(zero_copy_only=False)


def _sizes(output: Output, file: str) -> dict[str, int]:
    """Return the table size of each column that holds ids.

    Tables may have grown since the file was written; its sizes are those of then.
    """
    if output.schema is None:
        return {}
    sizes = dict(zip(output.schema.categorical, output.schema.table_sizes, strict=True))
    then = output.sizes.get(file, {})
    return sizes | {name: size for name, size in then.items() if name in sizes}


def _wrong_values(
    output: Output, name: str, values: np.ndarray, size: int | None
) -> Iterator[tuple[str, np.ndarray, str, str]]:
    """Yield kind, mask, description and remedy of values that a column must not have."""
    schema = output.schema
    if schema and name in schema.labels:
        yield "labels", (values != 0) & (values != 1), "label {:g}", _LABELS
    elif size is not None:
        if len(values) and (values.min() < 0 or values.max() >= size):
            wrong = (values < 0) | (values >= size)
            yield "id range", wrong, f"id {{}}, the table has {size} rows", _IDS
    elif values.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            total = values.sum(dtype=np.float64)  # finite only if all values are
        if not np.isfinite(total):
            yield "not finite", ~np.isfinite(values), "{} instead of a finite number", _FINITE
        if schema and name == schema.weight:
            yield "weights", values < 0, "weight {:g}", _WEIGHTS


def _add(
    scan: _Scan,
    kind: str,
    column: str,
    wrong: np.ndarray,
    what: Callable[[int], str],
    remedy: str,
    offsets: np.ndarray | None = None,
) -> None:
    """Add a problem, if there is one; ``offsets`` are those of the rows, for values of lists."""
    count = int(np.count_nonzero(wrong))
    if count:
        first = int(np.argmax(wrong))
        row = first
        if offsets is not None:
            row = int(np.searchsorted(offsets, first, side="right")) - 1
        problem = _Problem(what(first), remedy, scan.rows + row, 0)
        scan.problems.setdefault((kind, column), problem).count += count
