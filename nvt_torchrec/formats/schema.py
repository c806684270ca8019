"""The schema next to the parquet: the labels, dense and categorical columns, and the table sizes.

It is written as ``.merlin/schema.json`` in the form that Merlin reads
(``merlin.io.Dataset(path).schema``: names, tags, dtypes, ``embedding_sizes``), and read back here
without importing Merlin.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.formats.histories import StoredHistory, list_features
from nvt_torchrec.formats.vectors import StoredVectors

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_FILE = Path(".merlin") / "schema.json"
# Tags that Merlin does not define.
#: The column with the weights of the rows.
WEIGHT_TAG = "sample_weight"
#: The column with the correction for drawing negatives by popularity.
LOG_Q_TAG = "log_q_correction"
#: The columns that point to a history's events.
HISTORY_TAG = "history"
#: The columns with the numbers of vectors.
VECTOR_TAG = "vector"
#: Merlin's tags.
_TARGET_TAG = "target"
_DENSE_TAG = "continuous"
_CATEGORICAL_TAG = "categorical"
#: What to do about a damaged schema.
_AGAIN = "copy it again, or run the ETL again"
#: The largest number of rows of a table, because ids are int32.
LARGEST_TABLE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TableSchema:
    """The columns of the training parquet, in order, and the rows that each embedding table needs.

    Attributes:
        labels: The names of the label columns (float32), the main one first. A string is accepted
            for a single label.
        dense: The names of the dense columns (float32).
        categorical: The names of the id columns (int32).
        table_sizes: For each categorical column, 1 + its largest possible id.
        multi_hot: The categorical columns that hold a list of ids in each row (list<int32>).
        weight: The name of the column with the weights of the rows (float32); "" for none.
        histories: The histories, each with two additional columns (int32); see
            :mod:`nvt_torchrec.formats.histories`.
        vocabularies: For each categorical column, the name of its vocabulary. Columns with the same
            one share ids and an embedding table. () if each has its own.
        vectors: The vectors, each with one additional column (int32); see
            :mod:`nvt_torchrec.formats.vectors`.
        log_q_correction: The name of the column with the correction that training may add to a
            row's logit, if items are drawn by popularity (float32, docs/negatives.md); "" for none.
    """

    labels: tuple[str, ...]
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    table_sizes: tuple[int, ...]
    multi_hot: tuple[str, ...] = ()
    weight: str = ""
    histories: tuple[StoredHistory, ...] = ()
    vocabularies: tuple[str, ...] = ()
    vectors: tuple[StoredVectors, ...] = ()
    log_q_correction: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.labels, str):
            object.__setattr__(self, "labels", (self.labels,))
        if len({*self.vocabularies}) == len(self.categorical):
            object.__setattr__(self, "vocabularies", ())
        if len(self.categorical) != len(self.table_sizes):
            raise SchemaError(
                f"{len(self.categorical)} categorical columns, {len(self.table_sizes)} table sizes"
            )
        for name, size in zip(self.categorical, self.table_sizes, strict=True):
            if not isinstance(size, Integral):
                raise SchemaError(f"column {name}: a table of {size!r} rows", "give an integer")
            if size > LARGEST_TABLE:
                raise SchemaError(
                    f"column {name}: a table of {size} rows; int32 ids allow {LARGEST_TABLE}",
                    "hash the ids, or number them consecutively, for a smaller table",
                )
        check_vocabularies(self.categorical, self.vocabularies, self.table_sizes)
        unknown = set(self.multi_hot) - set(self.categorical)
        if unknown:
            raise SchemaError(f"multi-hot columns {sorted(unknown)} are not categorical columns")
        self._check_histories()
        self._check_vectors()

    def _check_histories(self) -> None:
        """Check that histories list single-hot columns, and that their names are unique.

        Raises:
            SchemaError: One of these is not so.
        """
        single = set(self.categorical) - {*self.multi_hot}
        names = [*self.columns]
        for history in self.histories:
            names += history.features
            for name in history.columns:
                if name not in single:
                    raise SchemaError(
                        f"history {history.name}: column {name} is not a categorical column with "
                        "one id in each row",
                        "name such a column, whose vocabulary and table the history shares",
                    )
        if self.histories and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SchemaError(f"two columns are called {twice}", "rename the history")

    def _check_vectors(self) -> None:
        """Raise SchemaError unless the names of vectors are unique."""
        if not self.vectors:
            return
        names = [*self.columns]
        for history in self.histories:
            names += [history.name, *history.features]
        names += [vector.name for vector in self.vectors]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SchemaError(f"two columns are called {twice}", "rename the vector")

    @property
    def columns(self) -> list[str]:
        """All columns in the order of the parquet files."""
        return [*self.floats, *self.integers]

    @property
    def integers(self) -> list[str]:
        """The int32 and list<int32> columns, which come last: ids, pointers, numbers of vectors."""
        names = [*self.categorical]
        for history in self.histories:
            names += history.pointers
        names += [vector.pointer for vector in self.vectors]
        return names

    @property
    def features(self) -> dict[str, str]:
        """The keys of a batch's ids, each with the column whose table it uses.

        See :func:`.histories.list_features`.
        """
        return list_features(self.categorical, self.histories)

    @property
    def label(self) -> str:
        """The main label's column."""
        return self.labels[0]

    @property
    def floats(self) -> list[str]:
        """The float32 columns, which come first: labels, weight, log-Q correction, dense."""
        optional = [name for name in (self.weight, self.log_q_correction) if name]
        return [*self.labels, *optional, *self.dense]

    @functools.cached_property
    def arrow(self) -> pa.Schema:
        """The schema of the parquet: float32, then int32 or list<int32>; no nulls."""
        import pyarrow as pa  # takes 100 ms, and readers of table sizes do not need it

        fields = [pa.field(name, pa.float32(), nullable=False) for name in self.floats]
        ids = pa.field("element", pa.int32(), nullable=False)
        for name in self.integers:
            kind = pa.list_(ids) if name in self.multi_hot else pa.int32()
            fields.append(pa.field(name, kind, nullable=False))
        return pa.schema(fields)

    @property
    def num_embeddings_per_feature(self) -> str:
        """The table sizes as ``--num_embeddings_per_feature`` takes them."""
        return ",".join(map(str, self.table_sizes))

    def write(self, directory: Path | str) -> None:
        """Write ``directory/.merlin/schema.json``."""
        write_json(Path(directory) / SCHEMA_FILE, self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON that Merlin reads as a schema."""
        features = []
        for name in self.labels:
            features.append(_describe_column(name, "FLOAT", [_TARGET_TAG, "binary_classification"]))
        if self.weight:
            features.append(_describe_column(self.weight, "FLOAT", [WEIGHT_TAG]))
        if self.log_q_correction:
            features.append(_describe_column(self.log_q_correction, "FLOAT", [LOG_Q_TAG]))
        for name in self.dense:
            features.append(_describe_column(name, "FLOAT", [_DENSE_TAG]))
        vocabularies = self.vocabularies or self.categorical
        columns = zip(self.categorical, self.table_sizes, vocabularies, strict=True)
        for name, size, domain in columns:
            feature = _describe_column(name, "INT", [_CATEGORICAL_TAG])
            feature["intDomain"] = {"name": domain, "max": str(size - 1), "isCategorical": True}
            properties = feature["annotation"]["extraMetadata"][0]
            if name in self.multi_hot:  # Merlin marks a ragged list by an unbounded dimension
                properties |= {"is_list": True, "is_ragged": True, "_dims": [[0.0, None]] * 2}
            properties["embedding_sizes"] = {
                "cardinality": size,
                "dimension": suggest_embedding_dimension(size),
            }
            features.append(feature)
        for history in self.histories:
            key_name, events_name = history.pointers
            key_column = _describe_column(key_name, "INT", [HISTORY_TAG])
            properties = key_column["annotation"]["extraMetadata"][0]
            properties |= {"history": history.name, "columns": list(history.columns)}
            features += [key_column, _describe_column(events_name, "INT", [HISTORY_TAG])]
        for vector in self.vectors:
            column = _describe_column(vector.pointer, "INT", [VECTOR_TAG])
            column["annotation"]["extraMetadata"][0] |= {
                "vector": vector.name,
                "width": vector.width,
                "dtype": vector.dtype,
            }
            features.append(column)
        return {"feature": features}

    @classmethod
    def read(cls, directory: Path | str) -> TableSchema:
        """Read ``directory/.merlin/schema.json``, or the one of ``train``, as NVTabular writes it.

        Raises:
            BadInputError: The file is missing or damaged.
            SchemaError: It has no label, or a categorical column without a table size.
        """
        path = Path(directory) / SCHEMA_FILE
        train_path = Path(directory) / "train" / SCHEMA_FILE
        if not path.exists() and train_path.exists():
            path = train_path
        value = read_json(path, "the schema that the ETL writes next to the parquet files", _AGAIN)
        try:
            return cls.from_dict(value, path)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise BadInputError(
                f"{path}: damaged, or not a schema of Merlin: {error!r}", _AGAIN
            ) from error

    @classmethod
    def from_dict(cls, value: Any, path: Path | str) -> TableSchema:
        """Make a schema from Merlin's JSON.

        Args:
            value: The JSON.
            path: The name of the file, for errors.

        Raises:
            SchemaError: It has no label, or a categorical column without a table size.
            AttributeError, LookupError, TypeError, ValueError, OverflowError: It is not a schema.
        """
        tags = (_TARGET_TAG, WEIGHT_TAG, LOG_Q_TAG, _DENSE_TAG, _CATEGORICAL_TAG)
        names: dict[str, list[str]] = {tag: [] for tag in tags}
        seen: set[str] = set()
        sizes: list[int] = []
        multi_hot: list[str] = []
        histories: list[StoredHistory] = []
        vocabularies: list[str] = []
        vectors: list[StoredVectors] = []
        for feature in value.get("feature", []):
            feature_tags = feature.get("annotation", {}).get("tag", [])
            name = feature["name"]
            if not isinstance(name, str) or name in seen:
                raise ValueError(f"column name {name!r:.60} is not a string, or occurs twice")
            seen.add(name)
            tag = next((tag for tag in tags if tag in feature_tags), "")
            if tag:
                names[tag].append(name)
            if tag == _CATEGORICAL_TAG:
                sizes.append(_read_table_size(feature, path))
                vocabularies.append(str(feature["intDomain"].get("name") or name))
                properties = feature["annotation"].get("extraMetadata") or [{}]
                if properties[0].get("is_list"):
                    multi_hot.append(name)
            elif HISTORY_TAG in feature_tags:
                properties = feature["annotation"]["extraMetadata"]
                if "columns" in properties[0]:  # only the first of a history's two columns has them
                    columns = tuple(properties[0]["columns"])
                    histories.append(StoredHistory(properties[0]["history"], columns))
            elif VECTOR_TAG in feature_tags:
                vectors.append(_read_vector(feature))
        for tag in (WEIGHT_TAG, LOG_Q_TAG):
            if len(names[tag]) > 1:
                raise SchemaError(
                    f"{path}: the columns {' and '.join(names[tag])} have the tag {tag}",
                    "remove the tag from all but one column",
                )
        if not names[_TARGET_TAG]:
            raise SchemaError(
                f"{path}: no label: no column has the tag {_TARGET_TAG}",
                "in a workflow of NVTabular, write `['clicked'] >> AddTags([Tags.TARGET])`; or run "
                "the ETL again",
            )
        if not names[_CATEGORICAL_TAG]:
            raise SchemaError(
                f"{path}: no categorical column: no column has the tag {_CATEGORICAL_TAG}",
                "in a workflow of NVTabular, write `[…] >> Categorify()`; or run the ETL again",
            )
        return cls(
            labels=tuple(names[_TARGET_TAG]),
            dense=tuple(names[_DENSE_TAG]),
            categorical=tuple(names[_CATEGORICAL_TAG]),
            table_sizes=tuple(sizes),
            multi_hot=tuple(multi_hot),
            weight="".join(names[WEIGHT_TAG]),
            histories=tuple(histories),
            vocabularies=tuple(vocabularies),
            vectors=tuple(vectors),
            log_q_correction="".join(names[LOG_Q_TAG]),
        )


def _read_table_size(feature: dict[str, Any], path: Path | str) -> int:
    """Return the rows of a categorical column's table. Raises SchemaError if it has no size."""
    size = int(feature.get("intDomain", {}).get("max", -1)) + 1
    if size < 1:
        raise SchemaError(
            f"{path}: column {feature['name']} has no table size (intDomain.max)",
            "write the largest id there; in a workflow of NVTabular, put Categorify after "
            "HashedCross, which sets no size",
        )
    return size


def _read_vector(feature: dict[str, Any]) -> StoredVectors:
    """Return the vector that a column points to. Raises SchemaError."""
    properties = feature["annotation"]["extraMetadata"][0]
    vector = StoredVectors(properties["vector"], properties["width"], properties["dtype"])
    if feature["name"] != vector.pointer:
        raise SchemaError(
            f"column {feature['name']!r:.60} points to vector {vector.name!r:.60}, but is not "
            f"called {vector.pointer!r:.60}",
            _AGAIN,
        )
    return vector


def _describe_column(name: str, kind: str, tags: list[str]) -> dict[str, Any]:
    """Return Merlin's JSON for a column of single values, without a domain."""
    properties = {
        "is_list": False,
        "is_ragged": False,
        "_dims": [[0.0, None]],
        "dtype_item_size": 32.0,
    }
    return {"name": name, "type": kind, "annotation": {"tag": tags, "extraMetadata": [properties]}}


def check_vocabularies(
    categorical: Sequence[str], vocabularies: Sequence[str], sizes: Sequence[int]
) -> None:
    """Check that columns that share a vocabulary have the same table size.

    Args:
        categorical: The columns.
        vocabularies: The vocabulary of each column; () if each has its own.
        sizes: The table size of each column.

    Raises:
        SchemaError: The sizes differ, or not every column has a vocabulary.
    """
    first: dict[str, tuple[str, int]] = {}  # by vocabulary: its first column, and the table size
    if len(vocabularies) not in (0, len(categorical)):
        raise SchemaError(f"{len(categorical)} columns, {len(vocabularies)} vocabularies")
    for name, vocabulary, size in zip(categorical, vocabularies, sizes, strict=False):
        other, rows = first.setdefault(vocabulary, (name, size))
        if size != rows:
            raise SchemaError(
                f"columns {other} and {name} share the vocabulary {vocabulary}, and so a table, "
                f"but have sizes of {rows} and {size} rows",
                "give both the same size",
            )


def suggest_embedding_dimension(size: int) -> int:
    """Return the embedding dimension that NVTabular suggests (its ``_emb_sz_rule``)."""
    return min(max(16, round(1.6 * size**0.56)), 512)
