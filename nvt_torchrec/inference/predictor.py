"""A saved workflow and a trained model, which together score raw rows."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError, name_fitted_spec
from nvt_torchrec.formats.feature_spec import FeatureSpec, InputFormat
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.feature_spec.raw_types.time import format_time
from nvt_torchrec.formats.feature_spec.spec_variants import allow_scoring
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.rows import NO_TIME, RawRows
from nvt_torchrec.formats.vectors import count_inputs
from nvt_torchrec.inference.encoder import Encoder, check_same_digest
from nvt_torchrec.inference.model.bundle import bundle_digest, is_bundle, read_bundle
from nvt_torchrec.inference.model.scoring import KINDS, ServingModel
from nvt_torchrec.inference.model.served_checkpoint import check_device, check_pair, read_checkpoint
from nvt_torchrec.inference.model.torch_threads import threads_for
from nvt_torchrec.models.checkpoint.record import compute_digest
from nvt_torchrec.models.contract import Build
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.encoded_rows import EncodedRows, join_rows, split_rows
from nvt_torchrec.workflows.description import inspect

log = logging.getLogger(__name__)

#: How many rows the model scores at once, at most: it bounds the memory of the activations.
MODEL_ROWS = 8192
#: How many values of vectors, and of embeddings of lists, the model takes at once, at most: 64 MiB.
_MAX_VALUES = 1 << 24
#: Bytes of a file that are parsed at once.
_BLOCK_BYTES = 16 << 20


class Predictor:
    """Scores raw rows as the evaluation in training scores them. Made by :meth:`load`.

    Thread-safe, because scoring changes nothing.

    Attributes:
        workflow: Encodes rows, on the CPU.
        model: Scores encoded rows.
        labels: The names of the labels whose probabilities it predicts.
    """

    def __init__(self, workflow: compiled.CompiledWorkflow, model: ServingModel) -> None:
        config = model.config
        self.workflow = workflow.add_histories(config.histories, config.max_events)
        self.model = model
        self.labels = config.labels
        self._encoder = Encoder(self.workflow)
        self._no_scores = np.empty((0, len(self.labels)), np.float32)
        self._has_warned = False
        #: The paths and options that `load` was called with; None if it was not.
        self._opened: tuple[Path, Path | None, dict[str, Any]] | None = None
        values_of_row = len(config.lists) * config.max_events * config.embedding_dim
        values_of_row += count_inputs(config.dense_vectors)
        self._rows_at_once = min(MODEL_ROWS, max(1, _MAX_VALUES // max(1, values_of_row)))

    @classmethod
    def load(
        cls,
        path: Path | str,
        checkpoint: Path | str | None = None,
        *,
        device: torch.device | str = "cpu",
        tables: str | None = None,
        model: Build | None = None,
        check: bool = False,
    ) -> Predictor:
        """Open a bundle, or a saved workflow and a training checkpoint.

        Args:
            path: Directory of the bundle; with ``checkpoint``, of the saved workflow.
            checkpoint: Directory of a training checkpoint of any world size. It is read into
                memory, whereas a bundle is mapped.
            device: Device of the model, which must hold all tables. Rows are encoded on the CPU.
            tables: Type of the embeddings: float32, float16 (half the memory) or int8 (a quarter,
                and 8 bytes a row). None for the bundle's type, or float32 for a checkpoint.
            model: The function that makes the module of an own model, for its checkpoint. A bundle
                holds the model, and needs none.
            check: Read all files of the bundle or workflow, and compare them with their digests.
                A checkpoint's digests are always compared.

        Raises:
            BadInputError: A file is missing or damaged.
            SchemaError: Workflow and model do not belong together.
            SettingsError: The device cannot be used, or the bundle's tables cannot be converted.
        """
        if tables is not None and tables not in KINDS:
            raise SettingsError(f"tables {tables!r}", f"one of {', '.join(KINDS)}")
        device = check_device(device)
        if checkpoint is None:
            if not is_bundle(path) and (Path(path) / "metadata.json").is_file():
                raise BadInputError(
                    f"{path}: a saved workflow, not a bundle", "also pass a checkpoint"
                )
            workflow, trained = read_bundle(path, device, check=check)
        else:
            if check:
                inspect(path).verify()
            workflow = compiled.load(path, verify=check)
            trained, origin = read_checkpoint(checkpoint, device, model)
            check_pair(
                workflow.schema,
                workflow.digest,
                trained.config,
                origin.workflow_digest,
                path,
                checkpoint,
            )
        predictor = cls(workflow, trained.convert(tables or trained.table.kind))
        checkpoint = None if checkpoint is None else Path(checkpoint).resolve()
        options = {"device": device, "tables": tables, "model": model}
        predictor._opened = Path(path).resolve(), checkpoint, options
        return predictor

    def __reduce__(self) -> tuple[Callable[..., Predictor], tuple]:
        """Return what a copy is made of: its files, which are opened again, if it was loaded."""
        if self._opened is None:
            return type(self), (self.workflow, self.model)
        path, checkpoint, options = self._opened
        return _open_again, (path, checkpoint, options, _digest(path, checkpoint))

    @property
    def spec(self) -> FeatureSpec:
        """The raw columns."""
        return self.workflow.spec

    @property
    def row_spec(self) -> FeatureSpec:
        """The raw columns, and the lists of histories that rows in memory may have."""
        return self.workflow.row_spec

    def predict(self, rows: Any, shared: Mapping[str, Any] | None = None) -> NDArray[np.float32]:
        """Return the probabilities of a click.

        Args:
            rows: A list of dicts, one for each row; a frame (pandas, Polars, …) or Arrow table; a
                dict of arrays or lists, one for each column; or the path of a file in the spec's
                format or of a parquet file. Columns are those of the raw log, from which features
                are derived as for the training. They are found by name, and further ones, such as
                the label, are ignored. Missing values are None, NaN, NA, an empty string or list,
                or a text or number that the spec calls null. An integer may be a float without a
                fraction, a hex32 value the integer of its digits, a list an array, and a time a
                datetime or what the spec's time_format says. Strings are trimmed, and read
                leniently, where the spec says so. The histories of a model are lists of raw
                values, the oldest first: columns ``NAME.COLUMN``, or in dicts ``{"NAME":
                {"COLUMN": […]}}``. For rows without them, and for files, the workflow's own state
                of the row's key is taken, if there is one.
                A vector is a list or an array of numbers under its name; without it, that of the
                row's key in a table is taken.
            shared: Values for all rows that have none of their own, such as the user whose
                candidates they are, and the user's history. Rows are then dicts, or a dict of
                columns.

        Returns:
            Float32 [rows], in their order; of several :attr:`labels` [rows, labels].

        Raises:
            SchemaError: A column is missing, or has a type that cannot hold its raw type.
            InvalidRowError: A column cannot hold a value, or a probability is not finite.
            BadInputError, BadRowError: A file is missing or malformed.
        """
        if isinstance(rows, str | Path) and not shared:
            return as_documented(self._predict_file(rows))
        return as_documented(self.predict_rows(self.read(rows, shared)))

    def read(self, rows: Any, shared: Mapping[str, Any] | None = None) -> RawRows:
        """Convert rows in memory to typed columns; see :meth:`predict`."""
        return self._encoder.read(rows, shared)

    def encode(self, rows: Any, shared: Mapping[str, Any] | None = None) -> EncodedRows:
        """Convert rows in memory to ids and dense values; see :meth:`predict`."""
        return self.workflow.transform(self.read(rows, shared))

    def labels_of(self, rows: RawRows) -> NDArray[np.uint8]:
        """Return the values uint8 [labels, n] of :attr:`labels`; [0, n] of rows without labels."""
        names = self.labels if len(rows.labels) else ()
        return rows.labels[[self.spec.labels.index(label) for label in names]]

    def predict_rows(self, rows: RawRows, first: int = 0) -> NDArray[np.float32]:
        """Return the probabilities [rows, labels] of parsed rows, with or without labels.

        Args:
            rows: The rows.
            first: The number of the first line of ``rows`` in its file, for errors.

        Raises:
            InvalidRowError: A probability is not finite.
        """
        self._check_times(rows)
        scores = self.predict_parts([self.workflow.transform(rows)])
        check_finite(scores, first + rows.line)
        return scores

    def _check_times(self, rows: RawRows) -> None:
        """Warn, once, of rows that are older than what is known of their keys."""
        events = self.workflow.events
        if self._has_warned or events is None or rows.times is None or not len(rows):
            return
        times = rows.times[0][rows.times[0] != NO_TIME]
        oldest = int(times.min(initial=events.as_of))
        if oldest < events.as_of:
            self._has_warned = True
            log.warning(
                "warning: rows of %s, and the workflow knows what happened until %s: their "
                "aggregates and histories hold events after them, so metrics are too good\n  -> "
                "evaluate later rows, or take the metrics of the training",
                format_time(oldest),
                format_time((events.as_of - 1) // 1_000_000 * 1_000_000),  # to the second
            )

    def predict_parts(self, parts: Sequence[EncodedRows]) -> NDArray[np.float32]:
        """Return the probabilities of encoded rows, those of one part after the other.

        It does not check that they are finite.

        Args:
            parts: The rows, such as those of several requests.

        Returns:
            Float32 [rows of all parts, labels].

        Raises:
            BadInputError, SchemaError: A file of vectors or of the model is damaged.
        """
        together = [parts]
        if sum(map(len, parts)) > self._rows_at_once:
            # Vectors are gathered for a piece at a time: those of all rows may not fit into memory.
            together = []
            for part in parts:
                together += [[piece] for piece in split_rows(part, self._rows_at_once)]
        scored = []
        for pieces in together:
            dense, ids = join_rows(pieces)
            scored.append(self.predict_encoded(dense, ids, self.take_vectors(pieces)))
        return scored[0] if len(scored) == 1 else np.concatenate(scored)

    def take_vectors(self, parts: Sequence[EncodedRows]) -> np.ndarray | None:
        """Return the vectors of rows, as :meth:`predict_encoded` takes them.

        Raises:
            BadInputError, SchemaError: As :meth:`predict_parts`.
        """
        if not self.model.config.dense_vectors:
            return None
        gathered = [self.workflow.take_vectors(part) for part in parts]
        return gathered[0] if len(gathered) == 1 else np.concatenate(gathered)

    def predict_encoded(
        self, dense: np.ndarray, ids: Ids, dense_vectors: np.ndarray | None = None
    ) -> NDArray[np.float32]:
        """Return the probabilities of encoded rows, without checking that they are finite.

        Args:
            dense: float32 [dense columns, rows], as in EncodedRows.
            ids: The ids, as in EncodedRows.
            dense_vectors: float32 [rows, sum of (width + 1)], see :mod:`formats.vectors`; None for
                a model that takes none.

        Returns:
            Float32 [rows, labels].
        """
        num_rows = dense.shape[1]
        if num_rows == 0:
            return self._no_scores
        size = self._rows_at_once
        with torch.inference_mode():
            if num_rows <= size:
                with threads_for(num_rows):
                    return self._score(dense, ids, dense_vectors)
            parts = []
            for begin in range(0, num_rows, size):
                end = begin + size
                vectors = None if dense_vectors is None else dense_vectors[begin:end]
                parts.append(self._score(dense[:, begin:end], ids.slice(begin, end), vectors))
        return np.concatenate(parts)

    def _score(self, dense: np.ndarray, ids: Ids, dense_vectors: np.ndarray | None) -> np.ndarray:
        """Return the probabilities of some rows, float32 [rows, labels]."""
        ids = self.model.fold(ids)
        logits = self.model.logits(dense, self.model.lookup(ids), ids, dense_vectors=dense_vectors)
        return torch.sigmoid(logits).cpu().numpy()

    def _predict_file(self, path: Path | str) -> np.ndarray:
        """Return the probabilities of a file's rows, float32 [rows, labels]."""
        # It imports fsspec, which a server does not need.
        from nvt_torchrec.clicklog.readers.log_format import get_format

        spec = input_spec(self.spec, str(path))
        with name_fitted_spec():
            scores = [self._no_scores]
            for piece in get_format(spec).stream(str(path), _BLOCK_BYTES):
                scores.append(self.predict_rows(piece.drop_label().parse(), piece.first))
        return np.concatenate(scores)


def _digest(path: Path, checkpoint: Path | None) -> str:
    """Return the digest of a bundle, or of a checkpoint, which names that of its workflow."""
    return bundle_digest(path) if checkpoint is None else compute_digest(checkpoint)


def _open_again(
    path: Path, checkpoint: Path | None, options: dict[str, Any], digest: str
) -> Predictor:
    check_same_digest(digest, _digest(path, checkpoint), checkpoint or path)
    return Predictor.load(path, checkpoint, **options)


def as_documented(probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return probabilities [rows, labels] as Python users get them: of one label, [rows]."""
    return probabilities[:, 0] if probabilities.shape[1] == 1 else probabilities


def check_finite(probabilities: np.ndarray, rows: np.ndarray | None = None) -> None:
    """Refuse probabilities that are not finite.

    Args:
        probabilities: The probabilities [n, labels].
        rows: The numbers of their rows [n], for errors; None: from 0 on.

    Raises:
        InvalidRowError: A probability is not finite.
    """
    is_finite = np.isfinite(probabilities)
    if not is_finite.all():
        index = int(is_finite.all(1).argmin())
        raise InvalidRowError(
            index if rows is None else int(rows[index]),
            "",
            f"the model computed the probability {probabilities[~is_finite][0]}",
            "a dense value of the row is too large, or the model's weights are: correct the row or "
            "leave it out, or take an earlier checkpoint",
        )


def name_by_label(what: str, labels: tuple[str, ...]) -> list[str]:
    """Return the names of an output for each label: ``what``; of several labels ``what_LABEL``."""
    return [what] if len(labels) == 1 else [f"{what}_{label}" for label in labels]


def input_spec(spec: FeatureSpec, path: str, file_format: str | None = None) -> FeatureSpec:
    """Return the spec for a file to score, which may have another format than the training log.

    As in a request, rows may lack their time; they count as rows of the end of the last day. So a
    file with a header may lack the column. The column by which rows were split is not read.

    Args:
        spec: The workflow's spec.
        path: Path of the file.
        file_format: A key of ``INPUT_FORMATS``; None for the spec's format, or the one whose files
            have the path's ending.
    """
    if file_format is None:
        file_format = _find_format(path) or spec.input.format
    if file_format != spec.input.format:
        kept = ["max_line_kb", "decimal"]
        if INPUT_FORMATS[file_format].delimiter:
            # Text holds the values as the log does, between other separators.
            kept += ["columns", "encoding"]
            if spec.input.delimiter:
                kept.append("list_separator")
        options = {name: getattr(spec.input, name) for name in kept}
        spec = dataclasses.replace(spec, input=InputFormat(file_format, **options))
    # Without names, columns are told apart by their number, so none of them may be left out.
    has_names = spec.input.header or not INPUT_FORMATS[file_format].delimiter
    return allow_scoring(spec) if has_names else spec


def _find_format(path: str) -> str | None:
    """Return the format whose files have a path's ending; None if there is none."""
    ending = path.rpartition(".")[2]
    for name, file_format in INPUT_FORMATS.items():
        if ending in file_format.endings:
            return name
    return None
