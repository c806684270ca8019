"""Score rows that were encoded elsewhere, with the model of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.vectors import count_inputs
from nvt_torchrec.inference.predictor import Predictor, check_finite, squeeze_single_label

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: The ids of each column, and the number of ids in each row, [columns, rows].
_SplitIds: TypeAlias = tuple[list[np.ndarray], np.ndarray]
_ENCODE = "encode the rows with the workflow that the model was trained with"


class Scorer:
    """Scores encoded rows, as :class:`inference.predictor.Predictor` scores raw ones.

    Create it with :meth:`load`. Thread-safe.

    Attributes:
        schema: The columns, in order, and the sizes of their tables.
        labels: The names of the labels whose probabilities it predicts.
    """

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self.schema = predictor.workflow.schema
        self.labels = predictor.labels

    @classmethod
    def load(cls, path: Path | str, checkpoint: Path | str | None = None, **options: Any) -> Scorer:
        """Open a bundle, or a workflow and a checkpoint, as ``Predictor.load`` does."""
        return cls(Predictor.load(path, checkpoint, **options))

    def __reduce__(self) -> tuple[type[Scorer], tuple]:
        """Pickle the scorer as its predictor."""
        return type(self), (self._predictor,)

    def predict(
        self, dense: Any, ids: KeyedJaggedTensor | Any, dense_vectors: Any = None
    ) -> NDArray[np.float32]:
        """Return the probabilities of a click, float32 [rows]; [rows, labels] of several labels.

        Args:
            dense: Normalized values [rows, dense columns], a tensor or an array.
            ids: A KeyedJaggedTensor whose keys include the categorical columns; or integers [rows,
                categorical columns], in the schema's order: a tensor, an array, or nested lists, in
                which the ids of a multi-hot column are a list. The columns of the model's histories
                may follow, as in training batches.
            dense_vectors: For a model with vectors, a tensor or an array [rows, sum of (width +
                1)], as in training batches and in the result of
                :meth:`inference.encoder.Encoder.encode_with_vectors`.

        Raises:
            SchemaError: A column is missing, or there are more or fewer than in the schema.
            InvalidRowError: An id is outside its table, or a value of a vector or a probability is
                not finite.
        """
        schema = self.schema
        # Only a KeyedJaggedTensor has this method; isinstance would need an import of TorchRec.
        is_batch = callable(getattr(ids, "lengths", None))
        split = _split_batch if is_batch else _split_rows
        columns, lengths = split(ids, schema.categorical, self._predictor.workflow.optional)
        table_sizes = dict(zip(schema.categorical, schema.table_sizes, strict=True))
        features = self._predictor.model.config.features
        checked = []
        # Not strict: the last features are histories, whose columns may be left out.
        for (name, column), column_ids, counts in zip(
            features.items(), columns, lengths, strict=False
        ):
            checked.append(_check_ids(name, table_sizes[column], column_ids, counts))
        encoded = Ids.from_lengths(checked, lengths)
        values = np.array(_to_array(dense).T, np.float32, order="C")
        if values.shape != (len(schema.dense), len(encoded)):
            raise SchemaError(
                f"dense values of shape {list(values.T.shape)} with ids of {len(encoded)} rows",
                f"pass {len(schema.dense)} dense values for each row",
            )
        vectors = self._check_vectors(dense_vectors, len(encoded))
        scores = self._predictor.predict_encoded(values, encoded, vectors)
        check_finite(scores)
        return squeeze_single_label(scores)

    def _check_vectors(self, values: Any, num_rows: int) -> np.ndarray | None:
        """Check the vectors; return them as float32 [rows, inputs], or None if the model has none.

        Raises:
            SchemaError: The vectors are missing, or have another shape than the model takes.
            InvalidRowError: A value is not finite.
        """
        vectors = self._predictor.model.config.dense_vectors
        num_inputs = count_inputs(vectors)
        names = ", ".join(vector.name for vector in vectors)
        remedy = f"pass the {num_inputs} inputs of {names} for each row"
        if values is None:
            if vectors:
                raise SchemaError("no dense_vectors, which the model needs", remedy)
            return None
        array = np.array(_to_array(values), np.float32, order="C")
        if array.shape != (num_rows, num_inputs):
            raise SchemaError(
                f"dense_vectors of shape {list(array.shape)} with ids of {num_rows} rows",
                remedy if vectors else "leave dense_vectors out: the model has no vectors",
            )
        is_finite = np.isfinite(array)
        if not is_finite.all():
            row, column = np.argwhere(~is_finite)[0]
            raise InvalidRowError(
                int(row), "", f"input {column} of dense_vectors is {array[row, column]}", _ENCODE
            )
        return array


def _to_array(values: Any) -> np.ndarray:
    """Convert a tensor on any device, or an array, to an array."""
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)


def _split_batch(
    ids: KeyedJaggedTensor, names: tuple[str, ...], optional: tuple[str, ...]
) -> _SplitIds:
    """Split a KeyedJaggedTensor into columns. Raises SchemaError if it lacks one."""
    keys = ids.keys()
    if set(optional) & set(keys):
        names += optional
    missing = sorted(set(names) - set(keys))
    if missing:
        raise SchemaError(f"the ids have no column {', '.join(missing)}", _ENCODE)
    # ids[name] would copy the lengths and offsets of each column and make PyTorch log a message.
    lengths = _to_array(ids.lengths()).reshape(len(keys), -1)
    columns = np.split(_to_array(ids.values()), lengths.sum(1).cumsum()[:-1])
    indices = [keys.index(name) for name in names]
    return [columns[index] for index in indices], lengths[indices]


def _split_rows(ids: Any, names: tuple[str, ...], optional: tuple[str, ...]) -> _SplitIds:
    """Split ids [rows, columns] into columns. Raises SchemaError if their number is wrong."""
    array = np.array(ids, object) if isinstance(ids, list | tuple) else _to_array(ids)
    if array.shape[1:2] not in ((len(names),), (len(names + optional),)):
        raise SchemaError(f"ids of shape {list(array.shape)}", f"pass [rows, {len(names)}]")
    if array.dtype != object:
        return list(array.T), np.ones_like(array.T)
    columns = []
    lengths = []
    for cells in array.swapaxes(0, 1):
        items: list[Any] = []
        counts = []
        for cell in cells:
            cell_ids = cell if isinstance(cell, list | np.ndarray) else [cell]
            items += list(cell_ids)
            counts.append(len(cell_ids))
        # For an empty list NumPy would choose float64.
        columns.append(np.array(items) if items else np.empty(0, np.int64))
        lengths.append(counts)
    return columns, np.array(lengths)


def _check_ids(name: str, size: int, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Check the ids of a column; return them as int64.

    Args:
        name: The column.
        size: The number of rows of its table.
        values: The ids of all rows.
        lengths: The number of ids in each row.

    Raises:
        SchemaError: The ids are not integers.
        InvalidRowError: An id is outside the table.
    """
    if values.dtype.kind not in "iu":
        raise SchemaError(f"column {name}: ids of type {values.dtype}", "pass integers")
    is_outside = (values < 0) | (values >= size)
    if is_outside.any():
        index = int(is_outside.argmax())
        row = int(np.searchsorted(np.cumsum(lengths), index, side="right"))
        reason = f"id {values[index]} is outside its table of {size} rows"
        raise InvalidRowError(row, name, reason, _ENCODE)
    return values.astype(np.int64)
