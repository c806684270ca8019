"""Scoring of files of any size, in threads and in bounded memory.

The input is cut into pieces of some megabytes. Each thread parses, encodes and scores whole pieces,
mostly without the interpreter lock, and the scores are put back in the order of the rows. Memory is
bounded by the pieces in work and one part (:mod:`inference.parts`). Scores do not depend on the
number of threads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tqdm import tqdm

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import OutputError, SchemaError, SettingsError
from nvt_torchrec.base.threads import in_order
from nvt_torchrec.clicklog.in_memory.remedies import of_fitted_spec, say_fitted
from nvt_torchrec.clicklog.readers.lines import filesystem_of
from nvt_torchrec.clicklog.readers.stream import UnparsedRows, stream_unparsed
from nvt_torchrec.clicklog.readers.text_rows import header_lines
from nvt_torchrec.dlrm.metrics import Metrics
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.formats.spec.feature_spec import FeatureSpec
from nvt_torchrec.inference.accuracy import metrics_of
from nvt_torchrec.inference.inputs.ids import IdColumns, find_id_columns
from nvt_torchrec.inference.predictor import Predictor, input_spec

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
#: Pieces in a part: the most that is scored again after an interruption.
PART_PIECES = 128


@dataclasses.dataclass(frozen=True)
class Scored:
    """Result of :func:`predict_file`: rows scored, rows rejected and the file with the rejected."""

    rows: int
    rejected: int
    rejected_file: Path


@dataclasses.dataclass(frozen=True)
class _Result:
    table: pa.Table
    rejected: bytes


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
    resume: bool = False,
    piece_bytes: int = PIECE_BYTES,
) -> Scored:
    """Score a raw log, with or without labels, in bounded memory.

    The output has a row for each row of the input, in its order: ``row`` int64 (from 0, without
    the header), ``id_columns``, ``probability`` float32, and, if the input has them, ``label``
    uint8, the one that the model predicts, and ``weight`` float32.

    Args:
        predictor: The workflow and the model.
        input_path: Tab- or comma-separated text or JSON lines, also compressed, or parquet; local
            or remote.
        output_path: Parquet file, which appears when it is complete.
        file_format: Format of the input: tsv, csv, json or parquet; None for that of the training
            log, or json or parquet if the path ends so.
        id_columns: Columns of the input to copy.
        reject: Write malformed rows to ``OUTPUT.rejected.tsv`` instead of stopping at the first.
        need_label: Refuse an input without labels.
        workers: Number of threads; None for the number of cores.
        resume: Continue after the last part of an earlier run with the same arguments, if any.
        piece_bytes: Bytes of the input in a piece.

    Raises:
        BadInputError, BadRowError: The input is missing or malformed.
        SchemaError: An id column, or the label, is missing.
        OutputError: The output exists or cannot be written, or the earlier run had other arguments.
    """
    from nvt_torchrec.inference.parts import open_parts

    if output_path.exists():
        raise OutputError(f"{output_path} exists", "choose another --output, or remove it first")
    spec = input_spec(predictor.spec, input_path, file_format)
    pieces = stream_unparsed(input_path, spec, block_bytes=piece_bytes)
    with of_fitted_spec():
        first = next(pieces)
    if need_label and not first.label:
        raise SchemaError(f"{input_path}: no column {spec.label}", "leave --evaluate out")
    ids = find_id_columns(id_columns, input_path, spec, first)
    pieces = itertools.chain([first], pieces)
    workers = workers or len(os.sched_getaffinity(0))
    key = _key(predictor, input_path, spec, ids, reject, piece_bytes)
    bar = tqdm(desc="predict", unit="rows", unit_scale=True, disable=None)
    rejected_file = output_path.with_name(f"{output_path.name}.rejected.tsv")
    with open_parts(output_path, key, resume=resume) as parts, bar:
        if parts.done:
            bar.update(parts.rows)
            log.info("%s: resumed after row %d", output_path, parts.rows)
        left = itertools.islice(pieces, parts.done * PART_PIECES, None)

        def work(piece: UnparsedRows) -> _Result:
            return _score(predictor, piece, ids, reject)

        with _one_torch_thread():
            for part in _chunks(in_order(work, left, workers, "predict"), PART_PIECES, bar):
                parts.add([r.table for r in part], b"".join(r.rejected for r in part))
        rows, rejected = parts.finish(rejected_file)
    if rejected:
        log.warning("%s: %d malformed rows left out: %s", input_path, rejected, rejected_file)
    return Scored(rows, rejected, rejected_file)


def _score(predictor: Predictor, piece: UnparsedRows, ids: IdColumns, reject: bool) -> _Result:
    with of_fitted_spec():
        rows = piece.parse(reject=reject)
    columns: dict[str, Any] = {"row": to_arrow(piece.first + rows.line)}
    columns |= ids.read(piece, rows.line)
    columns["probability"] = to_arrow(predictor.predict_rows(rows))
    labels = predictor.labels_of(rows)
    if labels is not None:
        columns["label"] = to_arrow(labels)
    if rows.weight is not None:
        columns["weight"] = to_arrow(rows.weight)
    return _Result(pa.table(columns), _describe(piece, rows))


def _describe(piece: UnparsedRows, rows: RawRows) -> bytes:
    """Return line (from 1), reason and raw text of a piece's malformed rows."""
    begin = piece.first + 1 + header_lines(piece.spec, piece.path)
    return b"".join(
        b"%d\t%s\t%s\n"
        % (
            begin + bad.line,
            say_fitted(bad.reason).encode(),
            bad.text.replace(b"\r", b"").replace(b"\n", b"\\n"),
        )
        for bad in rows.bad
    )


@contextlib.contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Set PyTorch to one thread: pieces are scored in parallel already."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _chunks(results: Iterator[_Result], size: int, bar: tqdm) -> Iterator[list[_Result]]:
    chunk: list[_Result] = []
    for result in results:
        bar.update(len(result.table))
        chunk.append(result)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _key(
    predictor: Predictor,
    path: str,
    spec: FeatureSpec,
    ids: IdColumns,
    reject: bool,
    piece_bytes: int,
) -> dict[str, Any]:
    """Return everything that the parts depend on."""
    filesystem, name = filesystem_of(path)
    info = filesystem.info(name)
    state = {
        key: str(info[key]) for key in ("size", "mtime", "ETag", "LastModified") if key in info
    }
    return {
        "input": [path, state, dataclasses.asdict(spec.input)],
        "workflow": predictor.workflow.digest,
        "model": _digest(predictor),
        "id_columns": ids.names,
        "on_bad_rows": "quarantine" if reject else "error",
        "piece size": [piece_bytes, PART_PIECES],
    }


def _digest(predictor: Predictor) -> str:
    """Return a digest of the dense layers, which differ between models as the tables do."""
    table = predictor.model.table
    digest = hashlib.sha256(f"{table.kind} {tuple(table.values.shape)}".encode())
    for layer in itertools.chain(*predictor.model.layers.values()):
        for tensor in layer:
            digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def evaluate_file(path: Path, *, weighted: bool = False) -> Metrics:
    """Return the metrics of a file that :func:`predict_file` wrote, with 60 bytes of memory a row.

    Args:
        path: The file.
        weighted: Whether its rows have weights.

    Raises:
        SettingsError: The file has no labels.
    """
    with pq.ParquetFile(path) as file:
        if "label" not in file.schema_arrow.names:
            raise SettingsError(f"{path}: no labels", "leave out --evaluate")
        names = ["probability", "label", *(["weight"] if weighted else [])]
        table = file.read(columns=names)
    columns = (np.concatenate([to_numpy(c) for c in table[name].chunks]) for name in names)
    return metrics_of(*columns)
