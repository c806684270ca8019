"""The configuration of a model, which a training run makes and checkpoints and bundles store."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.base.files.validation import convert
from nvt_torchrec.formats.feature_spec.feature_spec import MAX_COLUMNS
from nvt_torchrec.formats.schema import LARGEST_TABLE, check_vocabularies
from nvt_torchrec.models.contract import (
    MAX_BINS,
    Columns,
    find_raw_columns,
    find_vector_columns,
)
from nvt_torchrec.models.registry import MAX_VECTOR_SCALE

log = logging.getLogger(__name__)

#: The maximum number of events per row, over all lists, that a model gets one by one.
_MAX_LISTED_EVENTS = 1 << 14


@dataclasses.dataclass(frozen=True)
class OwnModel:
    """Facts about the module of a custom model (:mod:`.contract`), stored instead of its code.

    Attributes:
        id_columns: The columns whose ids it takes.
        length_columns: The columns whose list lengths it takes.
        vector_columns: The vectors of the data that it takes unchanged.
        widest: The width of its widest layer, from which learning rates are derived.
        digest: A digest of its operators (:func:`.onnx_head.digest_graph`); "" if unknown.
    """

    id_columns: tuple[str, ...] = ()
    length_columns: tuple[str, ...] = ()
    widest: int = 1
    digest: str = ""
    vector_columns: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ModelConfig(Columns):
    """A model: its columns and tables, and the settings of its layers (:func:`.head.build_head`).

    Attributes:
        first_order: The factor of the linear term (:class:`.head.LinearTerm`); 0 turns it off.
        model: A key of :data:`.registry.MODELS`, or the MODULE:FUNCTION of a custom model.
        settings: The settings of its function ``build``, as JSON values.
        vector_scale: The factor by which the module's input vectors are multiplied if there is a
            linear term.
        hash_indices: Whether ids beyond a table's rows share rows (:func:`.contract.fold_ids`).
        own: Facts about a custom model, whose code is imported only if the caller names it; None
            for a model of this project.

    Raises:
        SchemaError: The values contradict each other or are out of range.
    """

    first_order: float
    model: str
    settings: dict[str, Any]
    vector_scale: float = 1.0
    hash_indices: bool = False
    own: OwnModel | None = None

    def __post_init__(self) -> None:
        if len(self.categorical) != len(self.num_embeddings):
            raise SchemaError(
                f"{len(self.categorical)} categorical features, "
                f"{len(self.num_embeddings)} table sizes"
            )
        check_vocabularies(self.categorical, self.vocabularies, self.num_embeddings)
        for size in (self.embedding_dim, *self.num_embeddings):
            if not 1 <= size <= LARGEST_TABLE:
                raise SchemaError(f"no table has {size} rows or columns")
        if not 0 <= self.dense_bins <= MAX_BINS:
            raise SchemaError(f"no model has {self.dense_bins} dense_bins")
        if not 0 <= self.first_order < math.inf:
            raise SchemaError(f"no model has first_order {self.first_order}")
        if not 0 < self.vector_scale <= MAX_VECTOR_SCALE:
            raise SchemaError(f"no model has vector_scale {self.vector_scale}")
        if not self.labels:
            raise SchemaError("a model without a label")
        unknown = set(self.features.values()) - set(self.categorical)
        if unknown:
            raise SchemaError(f"a history of {unknown}, which are not categorical columns")
        names = [vectors.name for vectors in self.dense_vectors]
        if len({*names}) < len(names) or len(names) > MAX_COLUMNS:
            raise SchemaError(
                f"dense_vectors {', '.join(names):.80}: too many, or one is listed twice"
            )
        unknown = {*find_vector_columns(self.own)} - {*names}
        if unknown:
            raise SchemaError(f"vector_columns {unknown}, which are not vectors of the data")
        unknown = set(self.sequences) - {history.name for history in self.histories}
        if unknown:
            raise SchemaError(f"sequences {unknown}, which are not histories")
        if self.max_events < (1 if self.histories else 0):
            raise SchemaError(f"no model has max_events {self.max_events}")
        if len(self.lists) * self.max_events > _MAX_LISTED_EVENTS:
            raise SchemaError(
                f"{self.max_events} events in {len(self.lists)} columns of sequences: a model gets "
                f"at most {_MAX_LISTED_EVENTS} events one by one",
                "give --max_events a smaller value, or fewer --sequences",
            )
        if self.first_order and self.embedding_dim <= self.first_order_width > 1:
            raise SchemaError(
                f"embedding_dim {self.embedding_dim} with {len(self.labels)} labels and up to "
                f"{self.first_order_width // len(self.labels)} features per table, which are "
                "columns of one vocabulary and their histories: the linear term needs a coordinate "
                "of the embeddings for each label and each feature of a table",
                "choose a larger --embedding_dim, or --first_order 0",
            )

    @property
    def columns(self) -> Columns:
        """The columns, which are the argument of ``build``."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(Columns)}
        return Columns(**values)

    @property
    def lookups(self) -> dict[str, str]:
        """The categorical column whose table is used, by the key of the lookup.

        The key of a feature is its name. A feature in ``lists`` has one key per position instead,
        with the newest event in the last position. A position has at most one id, so tables are
        sharded, trained and stored in the same way with and without lists.
        """
        columns = {}
        for name, column in self.features.items():
            for key in self.list_keys(name):
                columns[key] = column
        return columns

    def list_keys(self, feature: str) -> list[str]:
        """Return the keys of a feature in ``lookups``."""
        if feature not in self.lists:
            return [feature]
        return [f"{feature}:{position}" for position in range(self.max_events)]

    @property
    def features_of_tables(self) -> dict[str, list[str]]:
        """The keys of ``lookups`` that use each table, by the table's name."""
        table_by_column = self.table_by_column
        found: dict[str, list[str]] = {table: [] for table in table_by_column.values()}
        for name, column in self.lookups.items():
            found[table_by_column[column]].append(name)
        return found

    @property
    def first_order_coordinates(self) -> dict[str, int]:
        """The first coordinate of the embeddings that holds linear weights, by feature.

        Each feature of a table has its own weights, one for each of the T labels. The weights of
        feature n, counted from 0, begin at coordinate n · T.
        """
        coordinates: dict[str, int] = {}
        table_by_column = self.table_by_column
        num_features = Counter[str]()
        for name, column in self.features.items():
            table = table_by_column[column]
            coordinates[name] = num_features[table] * len(self.labels)
            num_features[table] += 1
        return coordinates

    @property
    def first_order_width(self) -> int:
        """The number of coordinates of the embeddings that hold weights of the linear term."""
        if not self.first_order:
            return 0
        return max(self.first_order_coordinates.values(), default=0) + len(self.labels)

    @property
    def table_by_column(self) -> dict[str, str]:
        """The name of the table of each categorical column, ``t_<vocabulary>``."""
        names = (f"t_{name}" for name in self.vocabularies or self.categorical)
        return dict(zip(self.categorical, names, strict=True))

    @property
    def tables(self) -> dict[str, int]:
        """The number of rows of each table, by its name."""
        return dict(zip(self.table_by_column.values(), self.num_embeddings, strict=True))

    @property
    def feature_rows(self) -> tuple[int, ...]:
        """The number of rows of the table of each of ``features``."""
        rows = dict(zip(self.categorical, self.num_embeddings, strict=True))
        return tuple(rows[column] for column in self.features.values())

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict, which :meth:`from_dict` reads."""
        value = dataclasses.asdict(self)
        # Leave out keys that have no effect, so that older versions can read the configuration.
        if not self.histories:
            del value["histories"], value["max_events"]
        if not self.sequences:
            del value["sequences"]
        if not self.vocabularies:
            del value["vocabularies"]
        if not self.hash_indices:
            del value["hash_indices"]
        if not self.dense_vectors:
            del value["dense_vectors"]
        if self.own and not self.own.vector_columns:
            del value["own"]["vector_columns"]
        return value

    @classmethod
    def from_dict(cls, value: Any) -> ModelConfig:
        """Read what :meth:`to_dict` returned.

        Raises:
            SchemaError: A key is missing or unknown, or its value is of another type.
        """
        if isinstance(value, dict) and "program" in value:  # written by versions before 0.2
            value = {**value, "own": _read_program(value["program"])}
            del value["program"]
        try:
            return convert(cls, value)
        except ValueError as error:
            raise SchemaError(f"not the configuration of a model: {error}") from None

    def describe_differences(self, then: ModelConfig) -> str:
        """Describe the values that differ from those in ``then``; return "" if none differs.

        Renamed labels are not a difference.
        """
        before = then._list_comparable_values()
        now = self._list_comparable_values()
        return describe_differences(before, {**dict.fromkeys(before), **now})

    def _list_comparable_values(self) -> dict[str, Any]:
        """Return the values that :meth:`describe_differences` compares, by name."""
        value = {**self.to_dict(), **self.settings}
        del value["settings"], value["own"]
        value["labels"] = len(self.labels)
        value["raw columns"] = find_raw_columns(self.own)
        value["vector_columns"] = find_vector_columns(self.own)
        value["hash_indices"] = self.hash_indices
        return value

    def warn_of_other_code(self, then: ModelConfig, path: Path | str) -> None:
        """Warn if a custom model has other operators than the model of the checkpoint ``path``.

        Only warn, because another version of PyTorch may export the same code differently.
        """
        if self.own is None or then.own is None:
            return
        is_known = self.own.digest and then.own.digest
        if is_known and self.own.digest != then.own.digest:
            log.warning(
                "%s: the operators of --model %s have changed since this checkpoint was written: "
                "the code or the version of PyTorch is not the same",
                path,
                self.model,
            )


def describe_differences(then: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe the values of ``now`` that differ from those of ``then``; "" if none differs."""
    changes = []
    for name, value in now.items():
        if then.get(name) != value:
            changes.append(f"{name} was {then.get(name)}, is {value}")
    return "; ".join(changes)


def _read_program(program: Any) -> dict[str, Any] | None:
    """Return the value of ``own`` for a checkpoint of a version that stored a program instead."""
    if not isinstance(program, dict):
        return None
    return {name: program.get(name, []) for name in ("id_columns", "length_columns")}
