"""Scoring of files of any size, in threads and in bounded memory.

The input is cut into pieces of some megabytes. Each thread parses, encodes and scores whole pieces,
mostly without the interpreter lock, and the scores are put back in the order of the rows. Memory is
bounded by the pieces in work and one part. Scores do not depend on the number of threads.

Parts of many pieces are durable beside the output until they become one file: ``.OUTPUT.parts/``
holds the plan of a journal (:mod:`base.files.journal`), ``N.parquet`` (part N) and ``N.tsv`` (its
rejected rows). However a run ends, the next one goes on behind its last part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import itertools
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.arrays import to_arrow, to_numpy
from nvt_torchrec.base.errors import OutputError, SchemaError, SettingsError
from nvt_torchrec.base.files.atomic import TEMPORARY, atomic_path, locked, output_errors, together
from nvt_torchrec.base.files.journal import Journal, refuse_changes
from nvt_torchrec.base.files.remote import filesystem_of
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.base.threads import count_cores, map_in_order
from nvt_torchrec.clicklog.in_memory.value_errors import name_fitted_spec, say_fitted
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, format_of
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.inference.model.torch_threads import one_thread
from nvt_torchrec.inference.predictor import Predictor, input_spec, name_by_label
from nvt_torchrec.models.metrics import ByLabel, Metrics, compute_metrics

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 20
#: Pieces in a part: the most that is scored again after an interruption.
PART_PIECES = 128
_ROW_GROUP_ROWS = 1 << 20
#: In the output's metadata: a digest of what it depends on, and the number of rejected rows.
_WRITTEN_BY = b"nvt_torchrec.predict"
_OTHER = "choose another --output, or remove it first"
#: Rows of a piece with their scores, and lines about its rejected rows.
Result: TypeAlias = tuple[pa.Table, bytes]


@dataclasses.dataclass(frozen=True)
class Scored:
    """Result of :func:`predict_file`: rows scored, rows rejected and the file with the rejected."""

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
    resume: bool = False,
    piece_bytes: int = PIECE_BYTES,
) -> Scored:
    """Score a raw log, with or without labels, in bounded memory.

    The output has a row for each row of the input, in its order: ``row`` int64 (from 0, without
    the header), ``id_columns``, ``probability`` float32, and, if the input has them, ``label``
    uint8, the one that the model predicts, and ``weight`` float32. A model of several labels gives
    ``probability_NAME`` and ``label_NAME`` of each.

    Args:
        predictor: The workflow and the model.
        input_path: Tab- or comma-separated text or JSON lines, also compressed, or parquet; local
            or remote.
        output_path: Parquet file, which appears when it is complete.
        file_format: Format of the input, see :func:`.predictor.input_spec`.
        id_columns: Columns of the input to copy.
        reject: Write malformed rows to ``OUTPUT.rejected.tsv`` instead of stopping at the first.
        need_label: Refuse an input without labels.
        workers: Number of threads; None for the number of cores.
        resume: Continue after the last part of an earlier run with the same arguments, if any.
        piece_bytes: Bytes of the input in a piece.

    Raises:
        BadInputError, BadRowError: The input is missing or malformed.
        SchemaError: An id column, or the label, is missing.
        OutputError: The output exists, of another run, or cannot be written, or the earlier run had
            other arguments.
    """
    spec = input_spec(predictor.spec, input_path, file_format)
    input_path = format_of(spec).pinned(input_path)
    pieces = format_of(spec).stream(input_path, piece_bytes)
    with name_fitted_spec():
        first = next(pieces)
    if need_label and not first.label:
        raise SchemaError(f"{input_path}: no column {spec.label}", "leave --evaluate out")
    _check_id_columns(id_columns, first, predictor.labels)
    pieces = itertools.chain([first], pieces)
    workers = workers or count_cores()
    filesystem, name = filesystem_of(input_path)
    info = filesystem.info(name) if filesystem.exists(name) else {}  # a version never changes
    state = {
        key: str(info[key]) for key in ("size", "mtime", "ETag", "LastModified") if key in info
    }
    key = {  # all that the parts depend on
        "input": [input_path, state, dataclasses.asdict(spec.input)],
        "workflow": predictor.workflow.digest,
        "model": _digest(predictor),
        "id_columns": id_columns,
        "on_bad_rows": "quarantine" if reject else "error",
        "piece size": [piece_bytes, PART_PIECES],
    }
    rejected_file = output_path.with_name(f"{output_path.name}.rejected.tsv")
    if output_path.exists():
        return _finished(output_path, key, rejected_file)
    bar = show_progress("predict")
    with _open_parts(output_path, key, resume=resume) as parts, bar:
        if parts.done:
            rows = parts.counts()[0]
            bar.update(rows)
            log.info("%s: resumed after row %d", output_path, rows)
        left = itertools.islice(pieces, parts.done * PART_PIECES, None)

        def work(piece: UnparsedRows) -> Result:
            result = _score(predictor, piece, id_columns, reject)
            bar.update(len(result[0]))
            return result

        results = map_in_order(work, left, workers, "predict")
        while part := list(itertools.islice(results, PART_PIECES)):
            parts.add(part)
        rows, rejected = parts.finish(rejected_file)
    if rejected:
        log.warning("%s: %d malformed rows left out: %s", input_path, rejected, rejected_file)
    return Scored(rows, rejected, rejected_file)


def _check_id_columns(names: tuple[str, ...], first: UnparsedRows, labels: tuple[str, ...]) -> None:
    """Check the names of columns to copy.

    Args:
        names: The names.
        first: The first piece of the file.
        labels: The labels that the model predicts.

    Raises:
        SchemaError: The file has no such column.
        SettingsError: A name occurs twice, or is in the output anyway.
    """
    taken = {"row", *name_by_label("probability", labels), *name_by_label("label", labels)}
    taken |= {"weight"} if first.spec.weight else set()
    for name in names:
        if name in taken or names.count(name) > 1:
            raise SettingsError(
                f"--id_columns {','.join(names)}: {name!r} is in the output already", "leave it out"
            )
    available = list(first.names()) if names else []
    for name in names:
        if available.count(name) != 1:
            close = difflib.get_close_matches(name, available, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise SchemaError(
                f"{first.path}: column {name} of --id_columns is "
                f"{'ambiguous' if name in available else 'missing'}",
                f"{hint}it has {', '.join(available[:50])}",
            )


def _finished(output: Path, settings: dict[str, Any], rejected_file: Path) -> Scored:
    """Return the result of the run that wrote an output. Raises OutputError if it had others."""
    try:
        footer = pq.read_metadata(output)
        digest, rejected = footer.metadata[_WRITTEN_BY].decode().split()
        if digest != _plan_digest(settings):
            raise ValueError(f"of plan {digest}")
    except (OSError, pa.ArrowException, LookupError, TypeError, ValueError) as error:
        raise OutputError(f"{output} exists, of other settings or inputs", _OTHER) from error
    log.info("%s: this run has written it: done", output)
    shutil.rmtree(_parts_of(output), ignore_errors=True)  # it was killed before
    return Scored(footer.num_rows, int(rejected), rejected_file)


def _plan_digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def _parts_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.parts")


@contextlib.contextmanager
def _open_parts(output: Path, settings: dict[str, Any], *, resume: bool) -> Iterator[_Parts]:
    """Open the parts of an output; meanwhile no other run may write there.

    Args:
        output: The file that the parts become.
        settings: What the scores depend on.
        resume: Keep the parts of an earlier run, which must have had the same settings.

    Raises:
        OutputError: The earlier run had others, another run writes there, or it cannot be written.
    """
    directory = _parts_of(output)
    with contextlib.ExitStack() as stack:
        with output_errors(output):
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(directory / "lock", directory))
        parts = _Parts(output, directory, settings, resume)
        try:
            yield parts
        finally:
            if parts.done:
                log.warning(
                    "%s: %d finished parts are kept, --resume uses them", output, parts.done
                )
            else:
                shutil.rmtree(directory, ignore_errors=True)


class _Parts:
    """The parts of an output; ``done`` of them are finished."""

    def __init__(
        self, output: Path, directory: Path, settings: dict[str, Any], resume: bool
    ) -> None:
        self._output, self._directory, self.done = output, directory, 0
        self._digest = _plan_digest(settings)
        plan = {"settings": json.loads(json.dumps(settings))}  # tuples become lists
        journal = Journal(directory)
        remedy = "call it as before, or without --resume to begin anew"
        before = journal.plan(dict[str, Any], remedy) if resume else None
        if before is None:
            with output_errors(output):
                for file in directory.iterdir():  # of an earlier run, before its plan is gone
                    if file.suffix in (".parquet", ".tsv", TEMPORARY):
                        file.unlink(missing_ok=True)
            journal.begin(plan)
            return
        refuse_changes(before, plan, output, remedy)
        while all(file.exists() for file in self._files(self.done)):
            self.done += 1

    def _files(self, number: int) -> tuple[Path, Path]:
        """Return the files of a part: its rows, and lines about its rejected rows."""
        return self._directory / f"{number}.parquet", self._directory / f"{number}.tsv"

    def counts(self) -> tuple[int, int]:
        """Return how many rows and rejected rows are in the parts so far."""
        rows = rejected = 0
        for scored, bad in map(self._files, range(self.done)):
            rows += pq.read_metadata(scored).num_rows
            rejected += bad.read_bytes().count(b"\n")
        return rows, rejected

    def add(self, results: Sequence[Result]) -> None:
        """Make the next part durable."""
        rows, rejected = self._files(self.done)
        table = pa.concat_tables([table for table, _ in results])
        with together():
            with atomic_path(rejected) as temporary:
                temporary.write_bytes(b"".join(lines for _, lines in results))
            with atomic_path(rows) as temporary:
                pq.write_table(
                    table, temporary, row_group_size=_ROW_GROUP_ROWS, write_page_checksum=True
                )
        self.done += 1

    def finish(self, rejected_file: Path) -> tuple[int, int]:
        """Join the parts into the output, and their rejected rows into another file if any.

        Returns:
            How many rows, and how many rejected ones.
        """
        counts, files = self.counts(), [self._files(number) for number in range(self.done)]
        if counts[1]:
            with atomic_path(rejected_file) as temporary, open(temporary, "wb") as out:
                out.write(b"line\treason\traw\n")
                for _, rejected in files:
                    out.write(rejected.read_bytes())
        written_by = f"{self._digest} {counts[1]}"
        schema = pq.read_schema(files[0][0]).with_metadata({_WRITTEN_BY: written_by})
        with (
            atomic_path(self._output) as temporary,
            pq.ParquetWriter(temporary, schema, write_page_checksum=True) as writer,
        ):
            for rows, _ in files:
                with pq.ParquetFile(rows) as part:
                    for index in range(part.num_row_groups):
                        table = part.read_row_group(index)
                        writer.write_table(table, row_group_size=_ROW_GROUP_ROWS)
        self.done = 0  # they are in the output: not worth keeping
        return counts


def _score(
    predictor: Predictor, piece: UnparsedRows, id_columns: tuple[str, ...], reject: bool
) -> Result:
    with name_fitted_spec():
        rows = piece.parse(reject=reject)
    columns: dict[str, Any] = {"row": to_arrow(piece.first + rows.line)}
    columns |= piece.columns(id_columns, rows.line) if id_columns else {}
    names, labels = predictor.labels, predictor.labels_of(rows)
    with one_thread():  # pieces are scored in parallel already
        scores = predictor.predict_rows(rows, piece.first)
    columns |= zip(name_by_label("probability", names), map(to_arrow, scores.T), strict=True)
    columns |= zip(name_by_label("label", names), map(to_arrow, labels), strict=False)
    if rows.weight is not None:
        columns["weight"] = to_arrow(rows.weight)
    return pa.table(columns), _describe(piece, rows)


def _describe(piece: UnparsedRows, rows: RawRows) -> bytes:
    """Return line (from 1), reason and raw text of a piece's malformed rows."""
    begin = piece.first_line
    return b"".join(
        b"%d\t%s\t%s\n"
        % (
            begin + bad.line,
            say_fitted(bad.reason).encode(),
            bad.text.replace(b"\r", b"").replace(b"\n", b"\\n"),
        )
        for bad in rows.bad
    )


def _digest(predictor: Predictor) -> str:
    """Return a digest of the weights of the layers: they differ between models as tables do."""
    table = predictor.model.table
    digest = hashlib.sha256(f"{table.kind} {tuple(table.values.shape)}".encode())
    for tensor in predictor.model.head.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    return digest.hexdigest()


def metrics_of(
    probabilities: np.ndarray, labels: np.ndarray, weights: np.ndarray | None = None
) -> Metrics:
    """Return the metrics of probabilities float32 [n], labels [n] and perhaps weights [n]."""
    # clip to the smallest and largest float32 between 0 and 1
    x = probabilities.astype(np.float64).clip(1e-38, 1 - 2**-25)
    return compute_metrics(np.log(x) - np.log1p(-x), labels, weights)


def evaluate_file(path: Path, labels: tuple[str, ...], *, weighted: bool = False) -> ByLabel:
    """Return the metrics by label of a file that :func:`predict_file` wrote.

    It takes 60 bytes of memory a row.

    Args:
        path: The file.
        labels: The labels that its model predicts.
        weighted: Whether its rows have weights.

    Raises:
        SettingsError: The file has no labels.
    """
    with pq.ParquetFile(path) as file:
        if name_by_label("label", labels)[0] not in file.schema_arrow.names:
            raise SettingsError(f"{path}: no labels", "leave out --evaluate")
        metrics: ByLabel = {}
        pairs = (name_by_label(what, labels) for what in ("probability", "label"))
        for label, *pair in zip(labels, *pairs, strict=True):
            names = [*pair, *(["weight"] if weighted else [])]
            table = file.read(columns=names)
            columns = (np.concatenate([to_numpy(c) for c in table[name].chunks]) for name in names)
            metrics[label] = metrics_of(*columns)
    return metrics
