"""Score raw rows with a saved workflow and a trained model."""

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
from nvt_torchrec.inference.model.bundle import compute_bundle_digest, is_bundle, read_bundle
from nvt_torchrec.inference.model.scoring import KINDS, ServingModel
from nvt_torchrec.inference.model.served_checkpoint import check_device, check_pair, read_checkpoint
from nvt_torchrec.inference.model.torch_threads import limit_threads
from nvt_torchrec.models.checkpoint.record import compute_digest
from nvt_torchrec.models.contract import Build
from nvt_torchrec.workflows import compiled
from nvt_torchrec.workflows.compiled.encoded_rows import EncodedRows, join_rows, split_rows
from nvt_torchrec.workflows.description import inspect

log = logging.getLogger(__name__)

#: The most rows that the model scores at once; bounds the memory of the activations.
MODEL_ROWS = 8192
#: The most float32 values of vectors and of event embeddings that the model takes at once: 64 MiB.
_MAX_VALUES = 1 << 24
#: The bytes of a file that are parsed at once.
_BLOCK_BYTES = 16 << 20


class Predictor:
    """Scores raw rows as the evaluation in training scores them. Create it with :meth:`load`.

    Thread-safe, because scoring changes no state.

    Attributes:
        workflow: The workflow, which encodes rows on the CPU.
        model: The model, which scores encoded rows.
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
        #: The paths and options passed to `load`; None if it was created in another way.
        self._opened: tuple[Path, Path | None, dict[str, Any]] | None = None
        values_per_row = len(config.lists) * config.max_events * config.embedding_dim
        values_per_row += count_inputs(config.dense_vectors)
        self._max_rows = min(MODEL_ROWS, max(1, _MAX_VALUES // max(1, values_per_row)))

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
            path: The directory of the bundle or, with ``checkpoint``, of the saved workflow.
            checkpoint: The directory of a training checkpoint of any world size. It is read into
                memory, whereas a bundle is mapped.
            device: The device of the model, which must hold all tables. Rows are encoded on the
                CPU.
            tables: The type of the embeddings: float32, float16 (half the memory) or int8 (a
                quarter, plus 8 bytes per row). None for the bundle's type, or float32 for a
                checkpoint.
            model: The function that builds the module, for the checkpoint of a custom model.
                A bundle contains its model and needs no function.
            check: Read all files of the bundle or workflow, and compare them with their digests.
                A checkpoint's digests are always compared.

        Raises:
            BadInputError: A file is missing or damaged.
            SchemaError: Workflow and model do not belong together.
            SettingsError: The device cannot be used, or the bundle's tables cannot be converted.
        """
        if tables is not None and tables not in KINDS:
            raise SettingsError(f"unknown tables {tables!r}", f"pass one of {', '.join(KINDS)}")
        device = check_device(device)
        if checkpoint is None:
            if not is_bundle(path) and (Path(path) / "metadata.json").is_file():
                raise BadInputError(
                    f"{path} is a saved workflow, not a bundle", "also pass a checkpoint"
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
        """Pickle a loaded predictor as the paths of its files, which the copy opens again."""
        if self._opened is None:
            return type(self), (self.workflow, self.model)
        path, checkpoint, options = self._opened
        return _open_again, (path, checkpoint, options, _compute_digest(path, checkpoint))

    @property
    def spec(self) -> FeatureSpec:
        """The raw columns."""
        return self.workflow.spec

    @property
    def row_spec(self) -> FeatureSpec:
        """The raw columns, and the lists of histories that rows in memory may hold."""
        return self.workflow.row_spec

    def predict(self, rows: Any, shared: Mapping[str, Any] | None = None) -> NDArray[np.float32]:
        """Return the probabilities of a click.

        Args:
            rows: A list of dicts, one for each row; a frame (pandas, Polars, …) or Arrow table; a
                dict of arrays or lists, one for each column; or the path of a file in the spec's
                format or of a parquet file. Columns are those of the raw log, from which features
                are derived as in training. They are found by name; additional columns, such as the
                label, are ignored. Missing values are None, NaN, NA, an empty string or list, or a
                string or number that the spec lists as null. An integer may be a float without a
                fraction, a hex32 value the integer of its digits, a list an array, and a time a
                datetime or a value in the spec's time_format. Strings are trimmed, and parsed
                leniently, where the spec says so. The histories of a model are lists of raw
                values, the oldest first: columns ``NAME.COLUMN``, or in dicts ``{"NAME":
                {"COLUMN": […]}}``. For rows without them, and for files, the workflow's event
                state of the row's key is used, if it has one.
                A vector is a list or an array of numbers under its name; for rows without it, the
                vector of the row's key is looked up in a table.
            shared: Values that all rows share, such as a user and the user's history if the rows
                are candidates. A row's own value takes precedence. Rows are then dicts, or a dict
                of columns.

        Returns:
            Float32 [rows], in their order; [rows, labels] for several :attr:`labels`.

        Raises:
            SchemaError: A column is missing, or has a type that cannot hold its raw type.
            InvalidRowError: A column cannot hold a value, or a probability is not finite.
            BadInputError, BadRowError: A file is missing or malformed.
        """
        if isinstance(rows, str | Path) and not shared:
            return squeeze_single_label(self._predict_file(rows))
        return squeeze_single_label(self.predict_rows(self.read(rows, shared)))

    def read(self, rows: Any, shared: Mapping[str, Any] | None = None) -> RawRows:
        """Convert rows in memory, as in :meth:`predict`, to typed columns."""
        return self._encoder.read(rows, shared)

    def encode(self, rows: Any, shared: Mapping[str, Any] | None = None) -> EncodedRows:
        """Convert rows in memory, as in :meth:`predict`, to ids and dense values."""
        return self.workflow.transform(self.read(rows, shared))

    def select_labels(self, rows: RawRows) -> NDArray[np.uint8]:
        """Return the values of :attr:`labels`, uint8 [labels, rows]; [0, rows] without labels."""
        names = self.labels if len(rows.labels) else ()
        return rows.labels[[self.spec.labels.index(label) for label in names]]

    def predict_rows(self, rows: RawRows, first: int = 0) -> NDArray[np.float32]:
        """Return the probabilities [rows, labels] of parsed rows, with or without labels.

        Args:
            rows: The rows.
            first: The number of the first row in its file, for errors.

        Raises:
            InvalidRowError: A probability is not finite.
        """
        self._check_times(rows)
        scores = self.predict_parts([self.workflow.transform(rows)])
        check_finite(scores, first + rows.line)
        return scores

    def _check_times(self, rows: RawRows) -> None:
        """Warn once if rows are older than the end of the workflow's event state."""
        events = self.workflow.events
        if self._has_warned or events is None or rows.times is None or not len(rows):
            return
        times = rows.times[0][rows.times[0] != NO_TIME]
        oldest = int(times.min(initial=events.as_of))
        if oldest < events.as_of:
            self._has_warned = True
            log.warning(
                "warning: there are rows of %s, but the workflow's events reach until %s: the "
                "rows' aggregates and histories contain later events, so metrics are too good\n"
                "  -> evaluate later rows, or use the metrics of the training run",
                format_time(oldest),
                format_time((events.as_of - 1) // 1_000_000 * 1_000_000),  # to the second
            )

    def predict_parts(self, parts: Sequence[EncodedRows]) -> NDArray[np.float32]:
        """Return the probabilities of encoded rows, without checking that they are finite.

        Args:
            parts: The rows in several parts, such as one for each request.

        Returns:
            Float32 [rows of all parts, labels], one part after the other.

        Raises:
            BadInputError, SchemaError: A file of vectors or of the model is damaged.
        """
        batches = [parts]
        if sum(map(len, parts)) > self._max_rows:
            # Gather vectors for one piece at a time: the vectors of all rows may exceed the memory.
            batches = []
            for part in parts:
                batches += [[piece] for piece in split_rows(part, self._max_rows)]
        scores = []
        for batch in batches:
            dense, ids = join_rows(batch)
            scores.append(self.predict_encoded(dense, ids, self.take_vectors(batch)))
        return scores[0] if len(scores) == 1 else np.concatenate(scores)

    def take_vectors(self, parts: Sequence[EncodedRows]) -> np.ndarray | None:
        """Gather the vectors of rows for :meth:`predict_encoded`; None if the model takes none.

        Raises:
            BadInputError, SchemaError: A file of vectors is damaged.
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
            dense: Float32 [dense columns, rows], as in EncodedRows.
            ids: The ids, as in EncodedRows.
            dense_vectors: Float32 [rows, sum of (width + 1)], in the layout of
                :mod:`formats.vectors`; None for a model without vectors.

        Returns:
            Float32 [rows, labels].
        """
        num_rows = dense.shape[1]
        if num_rows == 0:
            return self._no_scores
        size = self._max_rows
        with torch.inference_mode():
            if num_rows <= size:
                with limit_threads(num_rows):
                    return self._score(dense, ids, dense_vectors)
            parts = []
            for begin in range(0, num_rows, size):
                end = begin + size
                vectors = None if dense_vectors is None else dense_vectors[begin:end]
                parts.append(self._score(dense[:, begin:end], ids.slice(begin, end), vectors))
        return np.concatenate(parts)

    def _score(self, dense: np.ndarray, ids: Ids, dense_vectors: np.ndarray | None) -> np.ndarray:
        """Score at most ``_max_rows`` rows; return float32 [rows, labels]."""
        ids = self.model.fold(ids)
        logits = self.model.compute_logits(
            dense, self.model.lookup(ids), ids, dense_vectors=dense_vectors
        )
        return torch.sigmoid(logits).cpu().numpy()

    def _predict_file(self, path: Path | str) -> np.ndarray:
        """Score the rows of a file; return float32 [rows, labels]."""
        # This module imports fsspec, which a server does not need.
        from nvt_torchrec.clicklog.readers.log_format import get_format

        spec = make_input_spec(self.spec, str(path))
        with name_fitted_spec():
            scores = [self._no_scores]
            for piece in get_format(spec).stream(str(path), _BLOCK_BYTES):
                scores.append(self.predict_rows(piece.drop_label().parse(), piece.first))
        return np.concatenate(scores)


def _compute_digest(path: Path, checkpoint: Path | None) -> str:
    """Return the digest of a bundle or of a checkpoint, which records its workflow's digest."""
    return compute_bundle_digest(path) if checkpoint is None else compute_digest(checkpoint)


def _open_again(
    path: Path, checkpoint: Path | None, options: dict[str, Any], digest: str
) -> Predictor:
    check_same_digest(digest, _compute_digest(path, checkpoint), checkpoint or path)
    return Predictor.load(path, checkpoint, **options)


def squeeze_single_label(probabilities: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return probabilities [rows, labels] in the form of the Python API: [rows] for one label."""
    return probabilities[:, 0] if probabilities.shape[1] == 1 else probabilities


def check_finite(probabilities: np.ndarray, rows: np.ndarray | None = None) -> None:
    """Refuse probabilities that are not finite.

    Args:
        probabilities: The probabilities [rows, labels].
        rows: The number of each row [rows], for errors; None to count from 0.

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
            "a dense value of the row or the model's weights are too large: correct the row or "
            "leave it out, or use an earlier checkpoint",
        )


def name_by_label(output: str, labels: tuple[str, ...]) -> list[str]:
    """Return the name of an output for each label: ``OUTPUT``, or ``OUTPUT_LABEL`` of several."""
    return [output] if len(labels) == 1 else [f"{output}_{label}" for label in labels]


def make_input_spec(spec: FeatureSpec, path: str, file_format: str | None = None) -> FeatureSpec:
    """Make the spec of a file to score, which may have another format than the training log.

    As in a request, rows may lack their time and then count as rows of the end of the last day. So
    a file with a header may lack that column. The column by which rows were split is not read.

    Args:
        spec: The workflow's spec.
        path: The path of the file.
        file_format: A key of ``INPUT_FORMATS``; None to choose by the path's suffix, or else the
            spec's format.
    """
    if file_format is None:
        file_format = _find_format(path) or spec.input.format
    if file_format != spec.input.format:
        kept = ["max_line_kb", "decimal"]
        if INPUT_FORMATS[file_format].delimiter:
            # Delimited text has the log's values, only with another delimiter.
            kept += ["columns", "encoding"]
            if spec.input.delimiter:
                kept.append("list_separator")
        options = {name: getattr(spec.input, name) for name in kept}
        spec = dataclasses.replace(spec, input=InputFormat(file_format, **options))
    # Without a header, columns are identified by their position, so none may be left out.
    has_names = spec.input.header or not INPUT_FORMATS[file_format].delimiter
    return allow_scoring(spec) if has_names else spec


def _find_format(path: str) -> str | None:
    """Return the format that a path's suffix belongs to; None if it belongs to no format."""
    ending = path.rpartition(".")[2]
    for name, file_format in INPUT_FORMATS.items():
        if ending in file_format.endings:
            return name
    return None
