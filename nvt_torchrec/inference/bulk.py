"""Score files of any size, in threads and in bounded memory.

The input is cut into pieces of a few megabytes. Each thread parses, encodes and scores whole
pieces, mostly without the interpreter lock, and the scores are put back into the order of the rows.
Memory is bounded by the pieces in progress and the pieces that are written together. Scores do not
depend on the number of threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError, SettingsError
from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.base.threads import count_cores, map_in_order
from nvt_torchrec.clicklog.in_memory.value_errors import name_fitted_spec, say_fitted
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, get_format
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.inference.model.torch_threads import use_one_thread
from nvt_torchrec.inference.predictor import Predictor, make_input_spec, name_by_label
from nvt_torchrec.models.metrics import ByLabel, Metrics, compute_metrics

log = logging.getLogger(__name__)

#: The bytes of the input that a thread takes at once.
PIECE_BYTES = 4 << 20
#: The number of pieces that are written together.
PART_PIECES = 128
_ROW_GROUP_ROWS = 1 << 20
#: The scored rows of a piece, and the lines that describe its rejected rows.
Result: TypeAlias = tuple[pa.Table, bytes]


@dataclasses.dataclass(frozen=True)
class Scored:
    """Result of :func:`predict_file`.

    Attributes:
        rows: The number of scored rows.
        rejected: The number of rejected rows.
        rejected_file: The file with the rejected rows; it exists if there are any.
    """

    rows: int
    rejected: int
    rejected_file: Path


def predict_file(
    predictor: Predictor,
    input_path: str,
    output_path: Path,
    *,
    file_format: str | None = None,
    id_columns: tuple[str, ...] = (),
    reject: bool = False,
    need_label: bool = False,
    workers: int | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> Scored:
    """Score a raw log, with or without labels, in bounded memory.

    The output has a row for each row of the input, in the same order, with the columns ``row``
    int64 (from 0, without the header), ``id_columns``, ``probability`` float32 and, if the input
    has them, ``label`` uint8 (the label that the model predicts) and ``weight`` float32. A model of
    several labels gives ``probability_NAME`` and ``label_NAME`` for each label.

    Args:
        predictor: The workflow and the model.
        input_path: Tab- or comma-separated text or JSON lines, also compressed, or parquet; local
            or remote.
        output_path: The parquet file to write. It appears only when it is complete.
        file_format: The input's format, a key of ``INPUT_FORMATS``; None to choose it as
            :func:`.predictor.make_input_spec` does.
        id_columns: The columns of the input to copy to the output.
        reject: Write malformed rows to ``OUTPUT.rejected.tsv`` instead of stopping at the first.
        need_label: Refuse an input without labels.
        workers: The number of threads; None for the number of cores.
        piece_bytes: The approximate size of a piece of the input.

    Raises:
        BadInputError, BadRowError: The input is missing or malformed.
        SchemaError: An id column, or the label, is missing.
        OutputError: The output exists or cannot be written.
    """
    spec = make_input_spec(predictor.spec, input_path, file_format)
    pieces = read_pieces(spec, input_path, piece_bytes)
    with name_fitted_spec():
        first = next(pieces, None)
    if first is None:
        raise BadInputError(f"{input_path} has no rows", "pass a file with rows to score")
    if need_label and not first.label:
        raise SchemaError(f"{input_path} has no column {spec.label}", "leave --evaluate out")
    _check_id_columns(id_columns, first, predictor.labels)
    pieces = itertools.chain([first], pieces)
    workers = workers or count_cores()
    rejected_file = output_path.with_name(f"{output_path.name}.rejected.tsv")
    if output_path.exists():
        raise OutputError(f"{output_path} exists", "choose another --output, or remove it first")
    with show_progress("predict") as bar:

        def work(piece: UnparsedRows) -> Result:
            result = _score(predictor, piece, id_columns, reject)
            bar.update(len(result[0]))
            return result

        results = map_in_order(work, pieces, workers, "predict")
        rows, rejected = _write(output_path, rejected_file, results)
    if rejected:
        log.warning("%s: %d malformed rows were moved to %s", input_path, rejected, rejected_file)
    return Scored(rows, rejected, rejected_file)


def read_pieces(spec: FeatureSpec, path: str, piece_bytes: int) -> Iterator[UnparsedRows]:
    """Read a file to score in pieces; skip its label column if labels come from separate files.

    Args:
        spec: The spec of the file, from :func:`make_input_spec`.
        path: The file.
        piece_bytes: The approximate size of a piece.
    """
    for piece in get_format(spec).stream(path, piece_bytes):
        yield piece.drop_label() if spec.label_files else piece


def _check_id_columns(names: tuple[str, ...], first: UnparsedRows, labels: tuple[str, ...]) -> None:
    """Check the names of the columns to copy.

    Args:
        names: The names.
        first: The first piece of the file.
        labels: The labels that the model predicts.

    Raises:
        SchemaError: The file has no such column, or several.
        SettingsError: A name is listed twice, or is a column of the output anyway.
    """
    output_names = ["row", *name_by_label("probability", labels), *name_by_label("label", labels)]
    if first.spec.weight:
        output_names.append("weight")
    available = list(first.names()) if names else []
    for name in names:
        if name in output_names or names.count(name) > 1:
            raise SettingsError(
                f"--id_columns {','.join(names)}: {name!r} is in the output already", "leave it out"
            )
        if available.count(name) != 1:
            problem = "ambiguous" if name in available else "missing"
            raise SchemaError(
                f"{first.path}: column {name} of --id_columns is {problem}",
                did_you_mean(name, available[:50]),
            )


def _write(output: Path, rejected_file: Path, results: Iterator[Result]) -> tuple[int, int]:
    """Write the results, several pieces at a time; write rejected rows to a separate file.

    Returns:
        The number of rows, and the number of rejected rows.
    """
    # Both files are opened when the first piece needs them: the output's schema is known only then,
    # and a run without malformed rows shall leave no file for them.
    writer = rejected_rows = None
    num_rows = num_rejected = 0
    with contextlib.ExitStack() as stack:
        while part := list(itertools.islice(results, PART_PIECES)):
            table = pa.concat_tables([table for table, _ in part])
            lines = b"".join(lines for _, lines in part)
            if writer is None:
                path = stack.enter_context(atomic_path(output))
                writer = stack.enter_context(
                    pq.ParquetWriter(path, table.schema, write_page_checksum=True)
                )
            if lines and rejected_rows is None:
                path = stack.enter_context(atomic_path(rejected_file))
                rejected_rows = stack.enter_context(open(path, "wb"))
                rejected_rows.write(b"line\treason\traw\n")
            if rejected_rows is not None:
                rejected_rows.write(lines)
            writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
            num_rows += len(table)
            num_rejected += lines.count(b"\n")
    return num_rows, num_rejected


def _score(
    predictor: Predictor, piece: UnparsedRows, id_columns: tuple[str, ...], reject: bool
) -> Result:
    """Parse and score a piece."""
    with name_fitted_spec():
        rows = piece.parse(reject=reject)
    columns: dict[str, Any] = {"row": to_arrow(piece.first + rows.line)}
    if id_columns:
        columns.update(piece.columns(id_columns, rows.line))
    with use_one_thread():  # other threads score other pieces at the same time
        scores = predictor.predict_rows(rows, piece.first)
    for name, values in zip(name_by_label("probability", predictor.labels), scores.T, strict=True):
        columns[name] = to_arrow(values)
    # Not strict: a file without labels gives no label columns.
    labels = predictor.select_labels(rows)
    for name, values in zip(name_by_label("label", predictor.labels), labels, strict=False):
        columns[name] = to_arrow(values)
    if rows.weight is not None:
        columns["weight"] = to_arrow(rows.weight)
    return pa.table(columns), _describe_rejected(piece, rows)


def _describe_rejected(piece: UnparsedRows, rows: RawRows) -> bytes:
    """Return a line for each malformed row: its line number (from 1), the reason and its text."""
    lines = []
    for bad in rows.bad:
        reason = say_fitted(bad.reason).encode()
        text = bad.text.replace(b"\r", b"").replace(b"\n", b"\\n")
        lines.append(b"%d\t%s\t%s\n" % (piece.first_line + bad.line, reason, text))
    return b"".join(lines)


def measure_probabilities(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> Metrics:
    """Return the metrics of probabilities float32 [n], labels [n] and optional weights [n]."""
    # A float32 probability near 0 or 1 is rounded to 0 or 1, whose logit would be infinite. So
    # probabilities are clipped: the limits are about the smallest and the largest float32 between.
    x = probabilities.astype(np.float64).clip(1e-38, 1 - 2**-25)
    return compute_metrics(np.log(x) - np.log1p(-x), labels, weights)


def evaluate_file(path: Path, labels: tuple[str, ...], *, weighted: bool = False) -> ByLabel:
    """Return the metrics of each label, from a file that :func:`predict_file` wrote.

    This takes 60 bytes of memory per row.

    Args:
        path: The file.
        labels: The labels that the model predicts.
        weighted: True if the rows have weights.
    """
    metrics: ByLabel = {}
    score_names = name_by_label("probability", labels)
    label_names = name_by_label("label", labels)
    with pq.ParquetFile(path) as file:
        for label, *names in zip(labels, score_names, label_names, strict=True):
            if weighted:
                names.append("weight")
            table = file.read(columns=names)
            columns = []
            for name in names:
                columns.append(np.concatenate([to_numpy(part) for part in table[name].chunks]))
            metrics[label] = measure_probabilities(*columns)
    return metrics
