"""One saved workflow and one trained model, put together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clicklog.errors import BadInputError, SettingsError
from clicklog.readers.raw import stream_pieces
from clicklog.rows import Ragged, RawRows
from clicklog.spec.columns import InputFormat
from clicklog.spec.feature_spec import FeatureSpec
from inference.inputs.frames import read_columns, read_dicts
from inference.inputs.values import RowReader
from inference.model.bundle import is_bundle, read_bundle
from inference.model.scoring import ServingModel
from inference.model.tables import KINDS
from inference.model.weights import check_pair, read_checkpoint, usable
from workflows import compiled
from workflows.compiled.workflow import Ids
from workflows.description import inspect, verify

#: Rows that go through the model at once: bounds the memory of its activations.
MODEL_ROWS = 8192
#: Rows from which on a column at a time is faster than a row at a time.
MANY_ROWS = 16
_BLOCK_BYTES = 16 << 20


class Predictor:
    """Scores raw rows as the model would have scored them in training's evaluation.

    Thread-safe: nothing is changed by scoring. Made by :meth:`load`.

    Attributes:
        workflow: encodes rows; on the CPU.
        model: scores what was encoded.
    """

    def __init__(self, workflow: compiled.CompiledWorkflow, model: ServingModel) -> None:
        self.workflow, self.model = workflow, model
        self._reader = RowReader(workflow.spec)

    @classmethod
    def load(
        cls,
        path: Path | str,
        checkpoint: Path | str | None = None,
        *,
        device: torch.device | str = "cpu",
        tables: str | None = None,
        check: bool = False,
    ) -> Predictor:
        """Open a bundle, or a saved workflow and a training checkpoint.

        Args:
            path: of the bundle; with ``checkpoint``, of the saved workflow.
            checkpoint: directory of a training checkpoint, of any world size. It is read into
                memory; a bundle is mapped, which takes no time.
            device: where the model goes; it must hold all tables. Rows are encoded on the CPU.
            tables: the type that embeddings are kept in: float32, float16 (half the memory) or
                int8 (a quarter and 8 bytes a row); None: the bundle's, float32 of a checkpoint.
            check: read all files of the bundle or workflow first, compare their digests, and check
                every id and offset in them. A checkpoint's are always compared.

        Raises:
            BadInputError: one of them is missing or damaged.
            SchemaError: they do not belong together.
            SettingsError: there is no such device, or the bundle's tables are of another type
                already.
        """
        if tables is not None and tables not in KINDS:
            raise SettingsError(f"tables {tables!r}", f"one of {', '.join(KINDS)}")
        device = usable(device)
        if checkpoint is None:
            if not is_bundle(path) and (Path(path) / "metadata.json").is_file():
                raise BadInputError(
                    f"{path}: a saved workflow, no bundle", "pass a checkpoint, too"
                )
            return cls(*_with_tables(*read_bundle(path, device, check=check), tables))
        if check:
            verify(path, inspect(path))
        workflow = compiled.load(path, verify=check)
        model, shape = read_checkpoint(checkpoint, device)
        check_pair(workflow.schema, workflow.digest, shape, path, checkpoint)
        return cls(*_with_tables(workflow, model, tables))

    def on(self, device: torch.device | str) -> Predictor:
        """The same, with the model on another device. Raises SettingsError if there is none."""
        return Predictor(self.workflow, self.model.to(usable(device)))

    @property
    def spec(self) -> FeatureSpec:
        """The raw columns."""
        return self.workflow.spec

    def predict(self, rows: Any) -> np.ndarray:
        """Probabilities of a click.

        Args:
            rows: any of: a list of dicts, one for each row; a frame (pandas, Polars, …) or Arrow
                table; a dict of arrays or lists, one for each column; the path of a file in the
                spec's format, or of a parquet file. Columns go by name, further ones (a label
                among them) are ignored. Missing are None, NaN, NA, an empty string or list.
                Integers may be held by floats that hold them exactly, hex32 also by their digits,
                lists by lists or arrays.

        Returns:
            float32 [rows], in their order.

        Raises:
            SchemaError: a column is missing, or of a type that cannot hold its raw type.
            InvalidRowError: a value that its column cannot hold, with row and column.
            BadInputError, BadRowError: a file that is missing or malformed.
        """
        return self.predict_rows(self.read(rows)) if not _is_path(rows) else self._file(rows)

    def read(self, rows: Any) -> RawRows:
        """Rows in memory as typed columns; takes and raises what :meth:`predict` does."""
        if isinstance(rows, list | tuple) and all(isinstance(row, Mapping) for row in rows):
            read_few = len(rows) < MANY_ROWS
            return self._reader.read(rows) if read_few else read_dicts(rows, self.spec)
        return read_columns(rows, self.spec)

    def predict_rows(self, rows: RawRows) -> np.ndarray:
        """Probabilities float32 [n] of parsed rows, with or without labels."""
        encoded = self.workflow.transform(rows)
        return self.predict_encoded(encoded.dense, encoded.ids)

    @torch.inference_mode()
    def predict_encoded(self, dense: np.ndarray, ids: np.ndarray | list[Ids]) -> np.ndarray:
        """Probabilities float32 [n] of what the workflow makes of rows; see EncodedRows."""
        count = dense.shape[1]
        if count <= MODEL_ROWS:
            return self._score(dense, ids) if count else np.empty(0, np.float32)
        pieces = [
            self._score(dense[:, at : at + MODEL_ROWS], cut_ids(ids, at, at + MODEL_ROWS))
            for at in range(0, count, MODEL_ROWS)
        ]
        return np.concatenate(pieces)

    def _score(self, dense: np.ndarray, ids: np.ndarray | list[Ids]) -> np.ndarray:
        logits = self.model.logits(dense, self.model.lookup(ids))
        return torch.sigmoid(logits).cpu().numpy()

    def _file(self, path: Path | str) -> np.ndarray:
        spec = input_spec(self.spec, str(path))
        pieces = [
            self.predict_rows(piece.without_label().parse())
            for piece in stream_pieces(str(path), spec, block_bytes=_BLOCK_BYTES)
        ]
        return np.concatenate(pieces) if pieces else np.empty(0, np.float32)


def _with_tables(
    workflow: compiled.CompiledWorkflow, model: ServingModel, tables: str | None
) -> tuple[compiled.CompiledWorkflow, ServingModel]:
    table = model.table.convert(tables or model.table.kind)
    return workflow, dataclasses.replace(model, table=table)


def _is_path(rows: Any) -> bool:
    return isinstance(rows, str | Path)


def input_spec(spec: FeatureSpec, path: str, file_format: str | None = None) -> FeatureSpec:
    """The spec for a file, whatever format the training log had.

    Args:
        spec: the workflow's.
        path: parquet is known by the ending of the name.
        file_format: tsv, csv or parquet; None: the spec's, but for files that are called parquet.
    """
    if file_format is None and path.endswith((".parquet", ".pq")):
        file_format = "parquet"
    if file_format in (None, spec.input.format):
        return spec
    return dataclasses.replace(
        spec, input=InputFormat(file_format, max_line_kb=spec.input.max_line_kb)
    )


def cut_ids(ids: np.ndarray | Sequence[Ids], begin: int, end: int) -> np.ndarray | list[Ids]:
    """The ids of some rows."""
    if isinstance(ids, np.ndarray):
        return ids[:, begin:end]
    return [_cut_column(column, begin, end) for column in ids]


def _cut_column(column: Ids, begin: int, end: int) -> Ids:
    if not isinstance(column, Ragged):
        return column[begin:end]
    offsets = column.offsets[begin : end + 1]
    return Ragged(offsets - offsets[0], column.values[offsets[0] : offsets[-1]])
