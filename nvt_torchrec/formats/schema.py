"""The schema beside the parquet: which columns are label, dense and categorical, and table sizes.

Written as ``.merlin/schema.json`` in the form Merlin reads (``merlin.io.Dataset(path).schema``:
names, tags, dtypes, ``embedding_sizes``), and read back here without importing Merlin.
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

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_FILE = Path(".merlin") / "schema.json"
#: The tag of the column with the weights of the rows; Merlin has no tag of its own for it.
WEIGHT_TAG = "sample_weight"
#: The tag of the columns that point to a history's events.
HISTORY_TAG = "history"
#: The tags of what each schema needs, and how NVTabular gives them.
_TAGS = {
    "label": ("target", "`['clicked'] >> AddTags([Tags.TARGET])`"),
    "categorical column": ("categorical", "`[…] >> Categorify()`"),
}
#: Rows of a table, at most: ids are int32.
LARGEST_TABLE = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class TableSchema:
    """Columns of the training parquet, in order, and the rows each embedding table needs.

    Attributes:
        labels: Names of the labels' columns (float32), the main one first; a text is one label.
        dense: Names of the dense columns (float32).
        categorical: Names of the id columns (int32).
        table_sizes: Per categorical column, 1 + its largest possible id.
        multi_hot: The categorical columns that hold a list of ids in each row (list<int32>).
        weight: Name of the column with the weights of the rows (float32); "" for none.
        histories: The histories, each with two more columns (int32); see
            :mod:`nvt_torchrec.formats.histories`.
        vocabularies: Per categorical column, the name of its vocabulary: columns of one name share
            ids, and an embedding table; (): each has its own.
    """

    labels: tuple[str, ...]
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    table_sizes: tuple[int, ...]
    multi_hot: tuple[str, ...] = ()
    weight: str = ""
    histories: tuple[StoredHistory, ...] = ()
    vocabularies: tuple[str, ...] = ()

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
                    "hash or number the ids into a smaller table",
                )
        check_vocabularies(self.categorical, self.vocabularies, self.table_sizes)
        unknown = set(self.multi_hot) - set(self.categorical)
        if unknown:
            raise SchemaError(f"multi-hot columns {sorted(unknown)} are not categorical columns")
        for history in self.histories:
            single = set(self.categorical) - {*self.multi_hot}
            if other := [name for name in history.columns if name not in single]:
                raise SchemaError(
                    f"history {history.name}: column {other[0]} is no categorical column with one "
                    "id in each row",
                    "a history takes the vocabulary and the table of such a column",
                )
        names = [*self.columns, *(name for h in self.histories for name in h.features)]
        if self.histories and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise SchemaError(f"two columns are called {twice}", "rename the history")

    @property
    def columns(self) -> list[str]:
        """All columns in the order of the parquet files."""
        return [*self.floats, *self.integers]

    @property
    def integers(self) -> list[str]:
        """The columns of int32 and of its lists, which come last: ids, pointers to histories."""
        pointers = (name for history in self.histories for name in history.pointers)
        return [*self.categorical, *pointers]

    @property
    def features(self) -> dict[str, str]:
        """The keys of a batch's ids, see :func:`.histories.list_features`."""
        return list_features(self.categorical, self.histories)

    @property
    def label(self) -> str:
        """The main label's column."""
        return self.labels[0]

    @property
    def floats(self) -> list[str]:
        """The float32 columns, which come first: labels, weight, dense."""
        return [*self.labels, *([self.weight] if self.weight else []), *self.dense]

    @functools.cached_property
    def arrow(self) -> pa.Schema:
        """Schema of the parquet: floats float32, ids int32 or lists of int32; no nulls."""
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
        targets = ["target", "binary_classification"]
        features = [_feature(name, "FLOAT", targets) for name in self.labels]
        if self.weight:
            features.append(_feature(self.weight, "FLOAT", [WEIGHT_TAG]))
        features += [_feature(name, "FLOAT", ["continuous"]) for name in self.dense]
        vocabularies = self.vocabularies or self.categorical
        columns = zip(self.categorical, self.table_sizes, vocabularies, strict=True)
        for name, size, domain in columns:
            feature = _feature(name, "INT", ["categorical"])
            feature["intDomain"] = {"name": domain, "max": str(size - 1), "isCategorical": True}
            properties = feature["annotation"]["extraMetadata"][0]
            if name in self.multi_hot:  # a second dimension without bounds: how Merlin says ragged
                properties |= {"is_list": True, "is_ragged": True, "_dims": [[0.0, None]] * 2}
            properties["embedding_sizes"] = {
                "cardinality": size,
                "dimension": embedding_dimension(size),
            }
            features.append(feature)
        for history in self.histories:
            of_key, of_events = (_feature(name, "INT", [HISTORY_TAG]) for name in history.pointers)
            properties = of_key["annotation"]["extraMetadata"][0]
            properties |= {"history": history.name, "columns": list(history.columns)}
            features += [of_key, of_events]
        return {"feature": features}

    @classmethod
    def read(cls, directory: Path | str) -> TableSchema:
        """Read ``directory/.merlin/schema.json``; of splits that NVTabular wrote, that of train.

        Raises:
            BadInputError: There is none, or it is damaged.
            SchemaError: It has no label, or a categorical column without a table size.
        """
        path = Path(directory) / SCHEMA_FILE
        of_train = Path(directory) / "train" / SCHEMA_FILE
        if not path.exists() and of_train.exists():
            path = of_train
        again = "copy it again, or run the ETL again"
        value = read_json(path, "the schema that the ETL writes beside the parquet files", again)
        try:
            return cls.from_dict(value, path)
        except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
            raise BadInputError(
                f"{path}: damaged, or not a schema of Merlin: {error!r}", again
            ) from error

    @classmethod
    def from_dict(cls, value: Any, path: Path | str) -> TableSchema:
        """Make a schema of Merlin's JSON; ``path`` is named in errors.

        Raises:
            SchemaError: It has no label, or a categorical column without a table size.
            AttributeError, LookupError, TypeError, ValueError, OverflowError: It is no schema.
        """
        names: dict[str, list[str]] = {
            tag: [] for tag in ("target", WEIGHT_TAG, "continuous", "categorical")
        }
        seen, sizes, multi_hot, histories, vocabularies = set(), [], [], [], []
        for feature in value.get("feature", []):
            tags, name = feature.get("annotation", {}).get("tag", []), feature["name"]
            if not isinstance(name, str) or name in seen:
                raise ValueError(f"column name {name!r:.60} is not text or occurs twice")
            seen.add(name)
            tag = next((tag for tag in names if tag in tags), "")
            if tag:
                names[tag].append(name)
            if tag == "categorical":
                domain = feature.get("intDomain", {})
                size = int(domain.get("max", -1)) + 1
                if size < 1:
                    raise SchemaError(
                        f"{path}: column {name} has no table size (intDomain.max)",
                        "write it there, the largest id; in a workflow of NVTabular, HashedCross "
                        "says none: put Categorify after it",
                    )
                sizes.append(size)
                vocabularies.append(str(domain.get("name") or name))
                properties = feature["annotation"].get("extraMetadata") or [{}]
                if properties[0].get("is_list"):
                    multi_hot.append(name)
            elif HISTORY_TAG in tags and "columns" in feature["annotation"]["extraMetadata"][0]:
                properties = feature["annotation"]["extraMetadata"][0]
                histories.append(StoredHistory(properties["history"], (*properties["columns"],)))
        labels, weights, dense, categorical = map(tuple, names.values())
        if len(weights) > 1:
            raise SchemaError(
                f"{path}: {' and '.join(weights)} are both tagged {WEIGHT_TAG}",
                "a row has one weight: remove the tag of one of them",
            )
        if not labels or not categorical:
            lacking = "categorical column" if labels else "label"
            raise SchemaError(
                f"{path}: no {lacking}: no column has the tag {_TAGS[lacking][0]}",
                f"in a workflow of NVTabular, write {_TAGS[lacking][1]}; or run the ETL again",
            )
        weight = "".join(weights)
        lists = tuple(multi_hot), weight, tuple(histories), tuple(vocabularies)
        return cls(labels, dense, categorical, tuple(sizes), *lists)


def _feature(name: str, kind: str, tags: list[str]) -> dict:
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
    """Check that columns of one vocabulary have tables of one size.

    Raises:
        SchemaError: They have not, or not every column has a vocabulary.
    """
    first: dict[str, tuple[str, int]] = {}
    if len(vocabularies) not in (0, len(categorical)):
        raise SchemaError(f"{len(categorical)} columns, {len(vocabularies)} vocabularies")
    for name, vocabulary, size in zip(categorical, vocabularies, sizes, strict=False):
        other, rows = first.setdefault(vocabulary, (name, size))
        if size != rows:
            raise SchemaError(
                f"columns {other} and {name} have the vocabulary {vocabulary}, so one table, and "
                f"sizes of {rows} and {size} rows",
                "give both the same size",
            )


def embedding_dimension(size: int) -> int:
    """NVTabular's suggestion of an embedding dimension (its ``_emb_sz_rule``)."""
    return min(max(16, round(1.6 * size**0.56)), 512)
