"""The interface of a model: a function ``build(columns, **settings)`` that returns a torch module.

::

    class Wide(nn.Module):
        def __init__(self, columns, hidden):
            super().__init__()
            first = nn.Linear(columns.width, hidden)
            self.layers = nn.Sequential(first, nn.ReLU(), nn.Linear(hidden, 1))

        def forward(self, dense, vectors):
            return self.layers(torch.cat([dense, vectors.flatten(1)], 1))


    def build(columns, hidden=64):
        return Wide(columns, hidden)

``columns`` is a :class:`Columns`. ``settings`` are the JSON values of ``--model_settings``, which
checkpoints record.

``forward(dense, vectors)`` returns logits, float32 [B, T] for T labels, or also [B] for one label.
Its arguments are:

- ``dense``, float32 [B, N]: the values of the dense columns as the ETL wrote them; [B, 0] without
  dense columns.
- ``vectors``, float32 [B, V, D], in the order of ``columns.vectors``:

  - for each categorical column, the embedding of the row's id, or the sum of the embeddings of the
    row's list;
  - for each column of each history, the mean of the embeddings of the row's events, times
    √max_events because means are smaller; 0 without an event. Histories use the embeddings of the
    categorical columns;
  - for each dense column, the vector of the row's value (:mod:`.piecewise`); none with
    ``--dense_bins 0``;
  - for each vector of the data (``[[vector]]`` of the spec), a linear function of it
    (:mod:`.dense_vectors`).

  With ``--table_precision`` the embeddings are stored with 16 bits, and with ``--amp`` the vectors
  are computed with 16 bits.

If the module has an attribute ``id_columns`` or ``length_columns``, which lists names of
categorical columns, ``forward`` also gets ``ids=`` or ``lengths=``:

- ``ids``, int64 [B, number of id_columns]: the ids of each row in these columns, as the ETL wrote
  them (0 padding, 1 null, 2 unknown, then the vocabulary), below ``columns.num_embeddings``. List
  columns are not allowed. Rows that pad a batch have 0.
- ``lengths``, int64 [B, number of length_columns]: the number of ids of each row in these columns,
  0 or more in list columns. Rows that pad a batch have 0.

If the module has an attribute ``vector_columns``, which lists names of vectors of the data,
``forward`` also gets ``dense_vectors=``, float32 [B, all their inputs]. For each of these vectors
it contains the values of the data followed by the indicator 1, or zeros and the indicator 0 if the
row has no vector. ``columns.dense_vectors`` has the number of inputs of each (``num_inputs``). Rows
that pad a batch have zeros.

With ``--sequences``, which lists names of histories, ``forward`` also gets ``lists=`` and
``present=``:

- ``lists``, float32 [B, S, L, D]: the embeddings of the newest L events, oldest first, in each
  column of each of these histories. ``columns.lists`` names the S columns, in the same order as in
  ``columns.vectors``, and L is ``columns.max_events``. The newest event is always in the last
  position; positions without an event come first and are 0.
- ``present``, bool [B, S, L]: whether a position has an event. A list may be empty.

If the module looks up a parameter by ids, all ranks add up a dense gradient of the parameter's full
size in each step. So large tables should be those of the categorical columns, which TorchRec
shards.

If there is a linear term, the vectors are multiplied by ``--vector_scale``, because embeddings are
small at first, and so would be the effect of the layers. By default a run derives the scale from
the module (:mod:`nvt_torchrec.training.sharding.own_scale`).

The logit of a row must depend only on that row, because rows are padded in training and a server
scores them one by one. So a layer must not compute statistics of a batch. ``nn.BatchNorm1d`` is an
exception: in training it uses the statistics over the rows of all ranks, and in a bundle the
running statistics. The first dimension of its input must be the rows, or several positions of each
row in row-major order, and it must be computed in every step on all ranks.

If the module has a method ``loss(logits, labels, weights)``, it returns the loss of each row, float
[B]. ``logits`` and ``labels`` are [B, T], or [B] for one label. ``weights`` are [B], or None if
rows have no weights, and the method must apply them. Without this method, the loss is the binary
cross-entropy, summed over the labels.

If the module has a true attribute ``sums_dense``, the vectors of the dense columns are summed to
one vector. If it has a method ``align_inputs()``, it is called before the module computes on tensor
cores, so that layers of unaligned widths can be padded.

Everything else is done outside of the module: tables, their optimizers and sharding, lookups,
checkpoints, and the linear term, which is added to the logits. The same module is trained under
TorchRec and served on one joined table. It is built with the seed of the run, and it initializes
its own parameters.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.histories import StoredHistory, list_features
from nvt_torchrec.formats.vectors import StoredVectors, count_inputs

#: The maximum number of bins of a dense column.
MAX_BINS = 1024
#: Optional arguments of ``forward``, and the attribute of a module that names their columns.
RAW_COLUMNS = {"ids": "id_columns", "lengths": "length_columns"}
#: The attribute of a module that names the vectors of the data that it takes unchanged.
VECTOR_COLUMNS = "vector_columns"
#: The number of ids of each table that do not stand for a value: padding, null and unknown.
RESERVED_IDS = 3
#: The type of a function ``build``.
Build: TypeAlias = Callable[..., nn.Module]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns and tables that a model is built for.

    Attributes:
        dense: The names of the dense columns, in the order of ``forward``'s argument ``dense``.
        categorical: The names of the categorical columns.
        num_embeddings: The number of rows of the table of each categorical column.
        embedding_dim: The width of all tables, D.
        labels: The names of the trained labels, in the order of the logits.
        dense_bins: The number of bins of each dense column; 0 if dense columns have no vectors.
        histories: The histories (:mod:`nvt_torchrec.formats.histories`).
        max_events: The maximum number of events per history and row; the newest events are used.
        sequences: The names of the histories whose events the module gets one by one.
        vocabularies: The name of the vocabulary of each categorical column. Columns with the same
            vocabulary share a table. Empty if each column has its own table.
        dense_vectors: The vectors of the data (:mod:`nvt_torchrec.formats.vectors`), in the order
            of ``forward``'s argument ``dense_vectors``.
    """

    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    num_embeddings: tuple[int, ...]
    embedding_dim: int
    labels: tuple[str, ...]
    dense_bins: int = dataclasses.field(default=0, kw_only=True)
    histories: tuple[StoredHistory, ...] = dataclasses.field(default=(), kw_only=True)
    max_events: int = dataclasses.field(default=0, kw_only=True)
    sequences: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    vocabularies: tuple[str, ...] = dataclasses.field(default=(), kw_only=True)
    dense_vectors: tuple[StoredVectors, ...] = dataclasses.field(default=(), kw_only=True)

    @property
    def features(self) -> dict[str, str]:
        """The categorical column whose table is used, by the name of each looked-up column."""
        return list_features(self.categorical, self.histories)

    @property
    def lists(self) -> tuple[str, ...]:
        """The names of the columns of ``forward``'s argument ``lists``, in order."""
        names: list[str] = []
        for history in self.histories:
            if history.name in self.sequences:
                names += history.features
        return tuple(names)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the vectors of ``forward``'s argument ``vectors``, in order."""
        names = [*self.features]
        if self.dense_bins:
            names += self.dense
        return (*names, *(vectors.name for vectors in self.dense_vectors))

    @property
    def vector_inputs(self) -> int:
        """The number of inputs of all vectors of the data: the width of ``dense_vectors``."""
        return count_inputs(self.dense_vectors)

    @property
    def vector_bounds(self) -> dict[str, tuple[int, int]]:
        """The range [begin, end) of each vector's inputs in ``dense_vectors``, by name."""
        bounds = {}
        begin = 0
        for vectors in self.dense_vectors:
            bounds[vectors.name] = begin, begin + vectors.num_inputs
            begin += vectors.num_inputs
        return bounds

    @property
    def width(self) -> int:
        """The total number of values of a row in ``dense`` and ``vectors``, N + V · D."""
        return len(self.dense) + len(self.vectors) * self.embedding_dim


def find_raw_columns(module: object) -> dict[str, tuple[str, ...]]:
    """Return the columns of a module's arguments ``ids`` and ``lengths``, if it takes them."""
    taken = {}
    for argument, attribute in RAW_COLUMNS.items():
        columns = tuple(getattr(module, attribute, ()))
        if columns:
            taken[argument] = columns
    return taken


def find_vector_columns(module: object) -> tuple[str, ...]:
    """Return the names of the vectors of the data that a module takes unchanged."""
    return tuple(getattr(module, VECTOR_COLUMNS, ()))


def stack_raw_inputs(
    columns: Mapping[str, tuple[str, ...]], **values: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the arguments ``ids`` and ``lengths`` of a module.

    Args:
        columns: The columns of each argument, from :func:`find_raw_columns`.
        values: For each argument, a function that returns the values [B] of a column.

    Returns:
        int64 [B, columns], by the name of the argument.
    """
    stacked = {}
    for argument, names in columns.items():
        stacked[argument] = torch.stack([values[argument](name) for name in names], 1).long()
    return stacked


def fold_ids(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Map ids to the rows of a table that has fewer rows than the vocabulary has ids.

    Ids 0, 1 and 2 (padding, null, unknown) keep their rows. All other ids share the remaining rows:
    id i gets row 3 + (i - 3) modulo their number.

    Args:
        ids: Non-negative integers of any shape.
        rows: The number of rows of each id's table, broadcast to ``ids``.
    """
    shared_rows = (rows - RESERVED_IDS).clamp(min=1)
    folded = RESERVED_IDS + (ids - RESERVED_IDS) % shared_rows
    return torch.where(ids < RESERVED_IDS, ids, folded)


def load_build(name: str) -> Build | None:
    """Import the function ``MODULE:FUNCTION``; return None for a name without a colon.

    The current directory is searched first.

    Raises:
        SettingsError: The function cannot be imported.
    """
    module, colon, function = name.partition(":")
    if not colon:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise SettingsError(
            f"--model {name}: {type(error).__name__}: {error}",
            "name a function that Python can import from here: --model MODULE:FUNCTION",
        ) from error
