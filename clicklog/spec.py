"""The feature spec: which columns a raw click log has, what they hold, and what becomes of them.

A spec is a TOML file::

    [label]
    name = "label"

    [[dense]]                     # integers; missing values become `fill`
    names = "int_{0..12}"
    fill = 0

    [[categorical]]               # categories; missing values keep an id of their own
    names = ["cat_0", "cat_1"]
    raw = "hex32"                 # up to 8 hexadecimal digits: unsigned 32 bit, held in int64
    freq_threshold = 5            # optional: rarer values count as out of vocabulary
    max_table_size = 40000000     # optional: rows of the table, reserved ids included
    num_buckets = 10              # optional, with one of the two: ids for hashed rare values

The columns of a raw row come in the order label, dense, categorical.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from clicklog.errors import SettingsError

#: How dense columns are transformed; see :mod:`workflows.graph` for the formulas.
DENSE_TRANSFORMS = ("log_normalize", "log", "normalize")

#: Ids that no value of the vocabulary gets: 0 padding, 1 null, then out of vocabulary.
PADDING_ID, NULL_ID, FIRST_OOV_ID = 0, 1, 2

RAW_TYPES = ("hex32",)
#: Columns of a kind: their missing values are bits of a 64-bit mask.
MAX_COLUMNS = 64


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """A count. ``fill`` replaces missing values."""

    name: str
    fill: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.fill, int):
            raise SettingsError(f"column {self.name}: fill = {self.fill!r}", "give an integer")


@dataclasses.dataclass(frozen=True)
class CategoricalColumn:
    """A category and the policy of its vocabulary; 0 means no bound."""

    name: str
    raw: str = "hex32"
    freq_threshold: int = 0
    max_table_size: int = 0
    num_buckets: int = 0

    def __post_init__(self) -> None:
        if self.raw not in RAW_TYPES:
            raise SettingsError(
                f"column {self.name}: raw = {self.raw!r}", f"one of {', '.join(RAW_TYPES)}"
            )
        for field in ("freq_threshold", "max_table_size", "num_buckets"):
            if getattr(self, field) < 0:
                raise SettingsError(f"column {self.name}: {field} = {getattr(self, field)} < 0")
        if self.freq_threshold and self.max_table_size:
            raise SettingsError(
                f"column {self.name}: both freq_threshold and max_table_size are set",
                "NVTabular's Categorify takes one of them",
            )
        if self.num_buckets and not (self.freq_threshold or self.max_table_size):
            raise SettingsError(
                f"column {self.name}: num_buckets = {self.num_buckets} without a cap",
                "it only spreads rare values over more ids; set max_table_size to cap the table",
            )
        if self.max_table_size and self.max_table_size < self.reserved_ids:
            raise SettingsError(
                f"column {self.name}: max_table_size = {self.max_table_size} leaves no room",
                f"{self.reserved_ids} ids are reserved for padding, null and out of vocabulary",
            )

    @property
    def oov_ids(self) -> int:
        """How many ids out-of-vocabulary values share."""
        return self.num_buckets or 1

    @property
    def reserved_ids(self) -> int:
        """The first id of the vocabulary: padding, null and the out-of-vocabulary ids go before."""
        return FIRST_OOV_ID + self.oov_ids


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """The columns of a raw log in file order, and the transform of the dense ones."""

    label: str
    dense: tuple[DenseColumn, ...]
    categorical: tuple[CategoricalColumn, ...]
    dense_transform: str = "log_normalize"

    def __post_init__(self) -> None:
        if self.dense_transform not in DENSE_TRANSFORMS:
            raise SettingsError(
                f"dense transform {self.dense_transform!r} is unknown",
                f"one of {', '.join(DENSE_TRANSFORMS)}",
            )
        if not self.categorical:
            raise SettingsError("the spec has no categorical column", "add a [[categorical]] block")
        for kind in ("dense", "categorical"):
            count = len(getattr(self, kind))
            if count > MAX_COLUMNS:
                raise SettingsError(
                    f"the spec has {count} {kind} columns", f"up to {MAX_COLUMNS} are read"
                )
        names = self.columns
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SettingsError(f"column names used twice: {', '.join(twice)}")

    @property
    def columns(self) -> list[str]:
        """All column names in the order of the file."""
        return [self.label, *self.dense_names, *self.categorical_names]

    @property
    def dense_names(self) -> list[str]:
        """Names of the dense columns."""
        return [column.name for column in self.dense]

    @property
    def categorical_names(self) -> list[str]:
        """Names of the categorical columns."""
        return [column.name for column in self.categorical]

    def with_policy(self, **policy: int) -> FeatureSpec:
        """The same spec with vocabulary settings (``freq_threshold=…`` …) on every column."""
        columns = tuple(dataclasses.replace(column, **policy) for column in self.categorical)
        return dataclasses.replace(self, categorical=columns)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; :meth:`from_dict` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> FeatureSpec:
        """Inverse of :meth:`to_dict`."""
        return cls(
            label=value["label"],
            dense=tuple(DenseColumn(**column) for column in value["dense"]),
            categorical=tuple(CategoricalColumn(**column) for column in value["categorical"]),
            dense_transform=value["dense_transform"],
        )


def load_spec(path: Path | str | None = None) -> FeatureSpec:
    """Read a feature spec; without a path the built-in one of the Criteo log.

    Raises:
        SettingsError: the file is missing, is no TOML, or has an unknown or contradictory key.
    """
    source = Path(path) if path else resources.files("clicklog") / "criteo.toml"
    try:
        value = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{source}: not a feature spec: {error}") from error
    _check_keys(value, {"label", "dense", "categorical", "dense_transform"}, str(source))
    try:
        return FeatureSpec(
            label=value.get("label", {}).get("name", "label"),
            dense=_columns(value.get("dense", []), DenseColumn, str(source)),
            categorical=_columns(value.get("categorical", []), CategoricalColumn, str(source)),
            dense_transform=value.get("dense_transform", "log_normalize"),
        )
    except SettingsError as error:
        raise SettingsError(f"{source}: {error.what}", error.remedy) from None
    except (AttributeError, TypeError) as error:
        raise SettingsError(f"{source}: not a feature spec: {error}") from error


def _columns(blocks: list[dict], kind: type, source: str) -> tuple:
    allowed = {field.name for field in dataclasses.fields(kind)} - {"name"} | {"names"}
    columns = []
    for block in blocks:
        _check_keys(block, allowed, source)
        options = {key: value for key, value in block.items() if key != "names"}
        names = block.get("names", [])
        names = _expand(names) if isinstance(names, str) else names
        columns += [kind(name=name, **options) for name in names]
    return tuple(columns)


def _expand(pattern: str) -> list[str]:
    """``"int_{0..12}"`` → int_0 … int_12; a name without braces is itself."""
    match = re.fullmatch(r"(.*)\{(\d+)\.\.(\d+)\}(.*)", pattern)
    if not match:
        return [pattern]
    head, first, last, tail = match.groups()
    return [f"{head}{i}{tail}" for i in range(int(first), int(last) + 1)]


def _check_keys(value: dict, allowed: set[str], source: str) -> None:
    for key in value:
        if key not in allowed:
            close = difflib.get_close_matches(key, allowed, n=1)
            hint = (
                f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(allowed))}"
            )
            raise SettingsError(f"{source}: unknown key {key!r}", hint)
