"""The model of a bundle, for rows that were encoded elsewhere."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.formats.rows import Ids
from nvt_torchrec.inference.predictor import Predictor, as_documented, check_finite

if TYPE_CHECKING:
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

#: The ids of each column, and how many of them each row has: [columns, rows].
_Given: TypeAlias = tuple[list[np.ndarray], np.ndarray]
_ENCODE = "encode the rows with the workflow that the model was trained with"


class Scorer:
    """Scores encoded rows, as :class:`inference.predictor.Predictor` scores raw ones.

    Made by :meth:`load`. Thread-safe.

    Attributes:
        schema: The columns, in order, and the rows of their tables.
        labels: The names of the labels whose probabilities it predicts.
    """

    def __init__(self, predictor: Predictor) -> None:
        """Score with the model of a predictor."""
        self._predictor, self.schema = predictor, predictor.workflow.schema
        self.labels = predictor.labels

    @classmethod
    def load(cls, path: Path | str, checkpoint: Path | str | None = None, **options: Any) -> Scorer:
        """Open a bundle, or a workflow and a checkpoint, as ``Predictor.load`` does."""
        return cls(Predictor.load(path, checkpoint, **options))

    def __reduce__(self) -> tuple[type[Scorer], tuple]:
        """Return what a copy is made of: its predictor, which says how that is copied."""
        return type(self), (self._predictor,)

    def predict(self, dense: Any, ids: KeyedJaggedTensor | Any) -> NDArray[np.float32]:
        """Return the probabilities of a click, float32 [rows]; of several labels [rows, labels].

        Args:
            dense: Normalized values [rows, dense columns], a tensor or an array.
            ids: A KeyedJaggedTensor that has the categorical columns among its keys; or integers
                [rows, categorical columns], in the schema's order: a tensor, an array, or lists of
                them, in which a list stands for the ids of a list column. After them there may be
                the columns of the model's histories, as in the batches of the training.

        Raises:
            SchemaError: A column is missing, or there are more or fewer than in the schema.
            InvalidRowError: An id is outside of its table, or a probability is not finite.
        """
        schema = self.schema
        read = _split_batch if callable(getattr(ids, "lengths", None)) else _split_rows
        columns, lengths = read(ids, schema.categorical, self._predictor.workflow.optional)
        tables = dict(zip(schema.categorical, schema.table_sizes, strict=True))
        features = self._predictor.model.config.features
        sizes = map(tables.__getitem__, features.values())
        of_columns = zip(features, sizes, columns, lengths, strict=False)
        given = Ids.from_lengths(list(itertools.starmap(_checked, of_columns)), lengths)
        values = np.array(_array(dense).T, np.float32, order="C")
        if values.shape != (len(schema.dense), len(given)):
            raise SchemaError(
                f"dense values of shape {list(values.T.shape)} with ids of {len(given)} rows",
                f"pass {len(schema.dense)} dense values for each row",
            )
        scores = self._predictor.predict_encoded(values, given)
        check_finite(scores)
        return as_documented(scores)


def _array(values: Any) -> np.ndarray:
    return np.asarray(values.cpu() if isinstance(values, torch.Tensor) else values)


def _split_batch(
    ids: KeyedJaggedTensor, names: tuple[str, ...], optional: tuple[str, ...]
) -> _Given:
    if set(optional) & set(ids.keys()):
        names += optional
    if missing := sorted(set(names) - set(ids.keys())):
        raise SchemaError(f"the ids have no column {', '.join(missing)}", _ENCODE)
    # not ids[name], which copies lengths and offsets of each column, and is logged about by PyTorch
    keys = ids.keys()
    lengths = _array(ids.lengths()).reshape(len(keys), -1)
    columns = np.split(_array(ids.values()), lengths.sum(1).cumsum()[:-1])
    index = [keys.index(name) for name in names]
    return [columns[j] for j in index], lengths[index]


def _split_rows(ids: Any, names: tuple[str, ...], optional: tuple[str, ...]) -> _Given:
    array = np.array(ids, object) if isinstance(ids, list | tuple) else _array(ids)
    if array.shape[1:2] not in ((len(names),), (len(names + optional),)):
        raise SchemaError(f"ids of shape {list(array.shape)}", f"pass [rows, {len(names)}]")
    if array.dtype != object:
        return list(array.T), np.ones_like(array.T)
    columns, lengths = [], []
    for cells in array.swapaxes(0, 1):
        lists = [cell if isinstance(cell, list | np.ndarray) else [cell] for cell in cells]
        columns.append(np.array([*itertools.chain.from_iterable(lists)] or np.empty(0, np.int64)))
        lengths.append([*map(len, lists)])
    return columns, np.array(lengths)


def _checked(name: str, size: int, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the ids as int64. Raises SchemaError or InvalidRowError."""
    if values.dtype.kind not in "iu":
        raise SchemaError(f"column {name}: ids of type {values.dtype}", "pass integers")
    wrong = (values < 0) | (values >= size)
    if wrong.any():
        at = int(wrong.argmax())
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        reason = f"id {values[at]} is outside of its table of {size} rows"
        raise InvalidRowError(row, name, reason, _ENCODE)
    return values.astype(np.int64)
