"""The contract of a model: a function ``build(columns, **settings)`` that returns a torch module.

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

``columns`` are :class:`Columns`. ``settings`` are those of ``--model_settings``: JSON values, which
checkpoints record.

``forward(dense, vectors)`` returns logits, float32 [B, T] for T labels; for one, [B] as well:

- ``dense``, float32 [B, N]: the values of the dense columns as the ETL wrote them; [B, 0] without
  dense columns.
- ``vectors``, float32 [B, V, D], in the order of ``columns.vectors``:

  - for each categorical column the embedding of the row's id, or the sum of those of its list;
  - for each column of each history the mean of the embeddings of its events, 0 without an event,
    times √max_events, because means are smaller. The embeddings are those of the categorical
    column;
  - for each dense column the vector of the row's value (:mod:`.piecewise`); none with
    ``--dense_bins 0``;
  - for each vector of the data (``[[vector]]`` of the spec) a linear function of it
    (:mod:`.dense_vectors`).

  With ``--table_precision`` their values have been stored, and with ``--amp`` they are computed,
  in 16 bits.

A module with an attribute ``id_columns`` or ``length_columns``, names of categorical columns, is
called with ``ids=`` or ``lengths=`` as well:

- ``ids``, int64 [B, N]: the ids of each row in the N columns of ``id_columns``, as the ETL wrote
  them (0 padding, 1 null, 2 unknown, then the vocabulary), below ``columns.num_embeddings``. No
  column of lists may be among them. Rows that only pad a batch have 0.
- ``lengths``, int64 [B, L]: the number of ids of each row in the columns of ``length_columns``, of
  a list 0 or more. Rows that only pad a batch have 0.

A module with an attribute ``vector_columns``, names of vectors of the data, is called with
``dense_vectors=`` as well, float32 [B, all their inputs]: of each of them the values as the data
hold them, then 1, or zeros and 0 in a row without a vector. ``columns.dense_vectors`` says how many
they are (``num_inputs``). Rows that only pad a batch have zeros.

With ``--sequences``, names of histories, it is called with ``lists=`` and ``present=`` as well:

- ``lists``, float32 [B, S, L, D]: the embeddings of the newest L events, oldest first, in each
  column of each of these histories; ``columns.lists`` names the S columns, in the order that they
  have in ``columns.vectors``, and L is ``columns.max_events``. The newest event is always in the
  last position; positions without an event come first, and are 0.
- ``present``, bool [B, S, L]: whether a position has an event. A list may have none.

A parameter of the module that is looked up by ids has a gradient of its own size, which all ranks
add up in each step. So large tables should be TorchRec's, those of the categorical columns.

If there is a linear term, the vectors are multiplied by ``--vector_scale``: embeddings begin
small, and so would the effect of layers. By default a run finds the scale from the module
(:mod:`nvt_torchrec.training.sharding.own_scale`).

The logit of a row depends on that row alone: rows are padded in training, and a server scores them
one by one. So a layer must not compute statistics of a batch. ``nn.BatchNorm1d`` is an exception:
in training its statistics are those of the samples of all ranks, and in a bundle the running ones.
The first dimension of its input must be the rows, or several positions of each row, one row after
the other; and every step must compute it, on all ranks.

``loss(logits, labels, weights)``, if the module has this method, returns the loss of each row,
float [B]. ``logits`` and ``labels`` are [B, T], with one label [B]; ``weights`` are [B], or None
where rows have none, and the method applies them. Otherwise the loss is binary cross-entropy,
summed over the labels.

If the module has an attribute ``sums_dense`` that is true, it gets the sum of the vectors of the
dense columns, as one vector. If it has a method ``align_inputs()``, that is called before the
module computes on tensor cores, so that it can pad layers of unaligned widths.

The module is not concerned with anything else: tables, their optimizers and sharding, lookups,
checkpoints, and the linear term that is added to the logits. The same module trains, under
TorchRec, and serves, on one joined table. It is built under the seed of the run, and keeps the
initial values that it gives itself.
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

#: The largest number of bins of a dense column.
MAX_BINS = 1024
#: Further arguments of ``forward``, and the attribute of a module that names their columns.
RAW_COLUMNS = {"ids": "id_columns", "lengths": "length_columns"}
#: The attribute of a module that names the vectors of the data which it takes as they are.
VECTOR_COLUMNS = "vector_columns"
#: The ids of each table that belong to no value: padding, null and unknown.
RESERVED_IDS = 3
#: A function ``build``.
Build: TypeAlias = Callable[..., nn.Module]


@dataclasses.dataclass(frozen=True)
class Columns:
    """The columns and tables that a model is built for.

    Attributes:
        dense: The names of the dense columns, in the order of the columns of ``dense``.
        categorical: The names of the categorical columns.
        num_embeddings: The rows of the table of each categorical column.
        embedding_dim: The width of all tables, D.
        labels: The names of the labels that are trained, in the order of the logits.
        dense_bins: The bins of each dense column; 0 if dense columns have no vectors.
        histories: The histories (:mod:`nvt_torchrec.formats.histories`).
        max_events: The largest number of events of a history in a row; the newest ones count.
        sequences: The histories whose events the module gets one by one.
        vocabularies: The name of the vocabulary of each categorical column; columns of one
            vocabulary share a table. Empty if each column has a table of its own.
        dense_vectors: The vectors of the data (:mod:`nvt_torchrec.formats.vectors`), in the order
            of their values in ``dense_vectors``.
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
        """The columns that are looked up, each with the categorical column whose table it uses."""
        return list_features(self.categorical, self.histories)

    @property
    def lists(self) -> tuple[str, ...]:
        """The names of the columns in the order of ``lists``."""
        names: list[str] = []
        for history in self.histories:
            if history.name in self.sequences:
                names += history.features
        return tuple(names)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the columns in the order of ``vectors``."""
        names = [*self.features]
        if self.dense_bins:
            names += self.dense
        return (*names, *(vectors.name for vectors in self.dense_vectors))

    @property
    def vector_inputs(self) -> int:
        """The number of values of a row in ``dense_vectors``: those of all vectors of the data."""
        return count_inputs(self.dense_vectors)

    @property
    def vector_bounds(self) -> dict[str, tuple[int, int]]:
        """Where the values of each vector of the data begin and end in ``dense_vectors``."""
        bounds, begin = {}, 0
        for vectors in self.dense_vectors:
            bounds[vectors.name] = begin, begin + vectors.num_inputs
            begin += vectors.num_inputs
        return bounds

    @property
    def width(self) -> int:
        """The number of values of a row in ``dense`` and ``vectors`` together, N + V · D."""
        return len(self.dense) + len(self.vectors) * self.embedding_dim


def find_raw_columns(module: object) -> dict[str, tuple[str, ...]]:
    """Return the columns of ``ids`` and ``lengths``, of those arguments that a module takes."""
    taken = {}
    for argument, attribute in RAW_COLUMNS.items():
        columns = tuple(getattr(module, attribute, ()))
        if columns:
            taken[argument] = columns
    return taken


def find_vector_columns(module: object) -> tuple[str, ...]:
    """Return the vectors of the data that a module takes as they are."""
    return tuple(getattr(module, VECTOR_COLUMNS, ()))


def stack_raw_inputs(
    columns: Mapping[str, tuple[str, ...]], **values: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the arguments ``ids`` and ``lengths`` of a module.

    Args:
        columns: The columns of each argument, from :func:`find_raw_columns`.
        values: For each argument a function that returns the values [B] of a column.

    Returns:
        int64 [B, columns] by the name of the argument.
    """
    stacked = {}
    for argument, names in columns.items():
        stacked[argument] = torch.stack([values[argument](name) for name in names], 1).long()
    return stacked


def fold_ids(ids: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the row of each id in a table that has fewer rows than there are ids.

    The ids 0, 1 and 2 (padding, null, unknown) keep their rows. All others share the remaining
    rows: they are counted from 3 on, modulo the number of these rows.

    Args:
        ids: Integers of any shape, none negative.
        rows: The rows of each id's table; broadcast to ``ids``.
    """
    shared_rows = (rows - RESERVED_IDS).clamp(min=1)
    folded = RESERVED_IDS + (ids - RESERVED_IDS) % shared_rows
    return torch.where(ids < RESERVED_IDS, ids, folded)


def load_build(name: str) -> Build | None:
    """Return the function ``MODULE:FUNCTION``; None for the name of a model of this project.

    It is found as Python finds modules, first in the current directory.

    Raises:
        SettingsError: It cannot be imported.
    """
    module, colon, function = name.partition(":")
    if not colon:
        return None
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except Exception as error:  # errors of the user's module, too
        raise SettingsError(
            f"--model {name}: {type(error).__name__}: {error}",
            "name a function that Python can import from here: --model MODULE:FUNCTION",
        ) from error
