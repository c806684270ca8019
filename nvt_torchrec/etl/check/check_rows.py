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

from nvt_torchrec.base.arrays import null_mask, to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.check.check_files import AGAIN, WARNING, Output
from nvt_torchrec.etl.finish.make_manifest import one_label, one_label_remedy
from nvt_torchrec.formats.histories import HistoryStore, StoredHistory
from nvt_torchrec.formats.schema import TableSchema

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
    count: int = 0


@dataclasses.dataclass
class _Scan:
    """The result of reading a row group."""

    file: str
    group: int
    rows: int = 0
    positives: int = 0
    problems: dict[tuple[str, str], _Problem] = dataclasses.field(default_factory=dict)
    unreadable: str = ""


def check_values(
    output: Output, *, workers: int, report: Callable[[int, int], object] | None = None
) -> None:
    """Read all data; see :func:`etl.commands.check.check` for the arguments."""
    events = _count_events(output)
    total = sum(footer.num_rows for footer in output.footers.values())
    groups = [
        (file, group)
        for file, footer in output.footers.items()
        for group in range(footer.num_row_groups)
    ]
    counts: dict[str, Counter] = {split: Counter() for split in output.splits}
    split_of = {file: split for split, files in output.splits.items() for file in files}
    with ThreadPoolExecutor(workers, "check") as pool:
        for scan in pool.map(lambda key: _scan(output, events, *key), groups):
            if report:
                report(scan.rows, total)
            where = f"{scan.file}: row group {scan.group}"
            if scan.unreadable:
                output.add("data", where, scan.unreadable, AGAIN)
            for (kind, column), problem in scan.problems.items():
                more = f" ({problem.count} such in the row group)" if problem.count > 1 else ""
                place = f"{where}, row {problem.row}, column {column}"
                output.add(kind, place, problem.what + more, problem.remedy)
            counts[split_of[scan.file]].update(rows=scan.rows, positives=scan.positives)
    if output.schema:
        _check_labels(output, counts)


def _check_labels(output: Output, counts: dict[str, Counter]) -> None:
    """Compare labels with the manifest; find splits with only one."""
    manifest = output.manifest
    for split, counted in counts.items():
        where, positives = output.root / split, counted["positives"]
        if what := one_label(counted["rows"], positives):
            remedy = one_label_remedy(counts, manifest.split if manifest else None)
            output.add("labels", where, what, remedy, severity=WARNING)
        expected = manifest.splits.get(split, counted)["positives"] if manifest else positives
        if expected != positives:
            what = f"{positives} rows have label 1, the manifest says {expected}"
            output.add("rows", where, what, AGAIN)


def _count_events(output: Output) -> dict[str, np.ndarray]:
    """Return how many events each key of each history has; check the ids of the events."""
    schema, counts = output.schema, {}
    if schema is None:
        return {}
    for history in schema.histories:
        sizes = [schema.table_sizes[schema.categorical.index(name)] for name in history.columns]
        try:
            store = HistoryStore(output.root, history, sizes)
        except BadInputError as error:
            output.add("histories", output.root, error.what, error.remedy)
            continue
        for part in store.parts:
            for name, size, ids in zip(history.columns, sizes, part.ids, strict=True):
                if len(ids) and not 0 <= ids.min() <= ids.max() < size:
                    what = f"an id outside of the table of {size} rows"
                    output.add("histories", part.directory / f"{name}.npy", what, AGAIN)
        counts[history.name] = np.concatenate([np.diff(part.offsets) for part in store.parts])
    return counts


def _scan_history(
    scan: _Scan, history: StoredHistory, batch: pa.RecordBatch, counts: np.ndarray
) -> None:
    """Check that the pointers of rows lead to events that there are."""
    key, events = (to_numpy(batch.column(name)) for name in history.pointers)
    there = (key >= 0) & (key < len(counts))
    most = np.where(there, counts[np.where(there, key, 0)] if len(counts) else 0, 0)
    wrong = (events < 0) | (events > most) | (~there & (key != -1))
    if wrong.any():
        row = int(wrong.argmax())
        what = f"{events[row]} events of key {key[row]}, which has {most[row]}"
        problem = _Problem(what, AGAIN, scan.rows + row)
        problem = scan.problems.setdefault(("histories", history.pointers[1]), problem)
        problem.count += int(np.count_nonzero(wrong))


def _scan(output: Output, events: dict[str, np.ndarray], file: str, group: int) -> _Scan:
    scan = _Scan(file, group)
    try:
        parquet = pq.ParquetFile(
            output.root / file, metadata=output.footers[file], page_checksum_verification=True
        )
        for batch in parquet.iter_batches(_BATCH_ROWS, [group], use_threads=False):
            for name in output.schema.columns if output.schema else batch.schema.names:
                if batch.schema.names.count(name) == 1:  # otherwise it was reported already
                    _scan_column(output.schema, scan, name, batch.column(name))
            for history in output.schema.histories if output.schema else ():
                if {*history.pointers} <= {*batch.schema.names} and history.name in events:
                    _scan_history(scan, history, batch, events[history.name])
            scan.rows += len(batch)
    except (OSError, pa.ArrowException) as error:
        scan.unreadable = f"cannot be read: {error}"
    return scan


def _scan_column(schema: TableSchema | None, scan: _Scan, name: str, array: pa.Array) -> None:
    """Check the values of a column in a batch."""
    rows = np.arange(scan.rows, scan.rows + len(array))

    def add(kind: str, wrong: np.ndarray, what: str, remedy: str) -> None:
        if not wrong.any():
            return
        first = int(wrong.argmax())
        text = what.format(array[first].as_py())
        problem = scan.problems.setdefault((kind, name), _Problem(text, remedy, int(rows[first])))
        problem.count += int(np.count_nonzero(wrong))

    if array.null_count:
        add("nulls", null_mask(array), "a null", AGAIN)
    if pa.types.is_list(array.type):
        rows = rows[to_numpy(pc.list_parent_indices(array))]
        array = array.flatten()
        if array.null_count:
            add("nulls", null_mask(array), "a null in a list", AGAIN)
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return  # the type was reported already
    values = to_numpy(pc.fill_null(array, 0) if array.null_count else array)
    if schema and name == schema.label:
        scan.positives += int(np.count_nonzero(values == 1))
    for finding in _wrong_values(schema, name, values):
        add(*finding)


def _wrong_values(
    schema: TableSchema | None, name: str, values: np.ndarray
) -> Iterator[tuple[str, np.ndarray, str, str]]:
    """Yield kind, mask, description and remedy of values that a column must not have."""
    if schema and name in schema.labels:
        yield "labels", (values != 0) & (values != 1), "label {:g}", _LABELS
    elif schema and name in schema.categorical:
        size = schema.table_sizes[schema.categorical.index(name)]
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
