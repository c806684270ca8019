"""The feature spec: the columns of a raw click log, their types and their transforms.

A spec is a TOML file::

    [input]                       # optional
    format = "csv"                # tsv (default), csv or parquet
    header = true                 # the first line names the columns; default: csv true, tsv false
    delimiter = ";"               # csv only; default ","
    list_separator = "|"          # text only: between the values of a multi-hot column
    max_line_kb = 1024            # text only: a longer line is a malformed row

    [label]
    name = "label"

    [[dense]]                     # numbers; missing values become `fill`
    names = "int_{0..12}"
    raw = "int32"                 # or "float"
    fill = 0

    [[categorical]]               # categories; missing values have an id of their own
    names = ["cat_0", "cat_1"]
    raw = "hex32"                 # up to 8 hexadecimal digits; or "int", or "string" (UTF-8)
    multi_hot = false             # true: a list of values in each row
    vocabulary = "cats"           # optional: columns with the same name here share ids
    freq_threshold = 5            # optional: rarer values count as out of vocabulary
    max_table_size = 40000000     # optional: rows of the table, reserved ids included
    num_buckets = 10              # optional, with either of them: ids for hashed rare values
    hash_buckets = 1000           # instead of the three: no vocabulary, ids by hash alone

Without a header, the columns of a text file come in the order label, dense, categorical. With one,
and in parquet, they are found by name; further columns are ignored.
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
from clicklog.files.validation import parse
from clicklog.spec.columns import (
    FIRST_OOV_ID,
    NULL_ID,
    PADDING_ID,
    CategoricalColumn,
    DenseColumn,
    InputFormat,
)

__all__ = [
    "DENSE_TRANSFORMS",
    "FIRST_OOV_ID",
    "NULL_ID",
    "PADDING_ID",
    "POLICIES",
    "CategoricalColumn",
    "DenseColumn",
    "FeatureSpec",
    "InputFormat",
    "load_spec",
    "shipped_specs",
]

#: How dense columns are transformed; see :mod:`workflows.nodes` for the formulas.
DENSE_TRANSFORMS = ("log_normalize", "log", "normalize")

#: The most dense and the most categorical columns: missing values are bits of a 64-bit mask.
MAX_COLUMNS = 64
_MOST_NAMES = 1000  # of a range; the columns are counted after it is expanded

#: NVIDIA DLRM's presets (frequency limits of 2, 3 and 15) and MLPerf's cap, by name.
POLICIES = {
    "nvidia-2": {"freq_threshold": 2, "max_table_size": 0},
    "nvidia-3": {"freq_threshold": 3, "max_table_size": 0},
    "nvidia-15": {"freq_threshold": 15, "max_table_size": 0},
    "mlperf-40m": {"freq_threshold": 0, "max_table_size": 40_000_000},
}
DEFAULT_SPEC = "criteo_1tb"


@dataclasses.dataclass(frozen=True)
class FeatureSpec:
    """The columns of a raw log in file order, the transform of the dense ones, the file format."""

    label: str
    dense: tuple[DenseColumn, ...]
    categorical: tuple[CategoricalColumn, ...]
    dense_transform: str = "log_normalize"
    input: InputFormat = dataclasses.field(default_factory=InputFormat)

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
                    f"the spec has {count} {kind} columns", f"use at most {MAX_COLUMNS}"
                )
        names = self.columns
        for name in names:
            _check_name(name)
        for name in self.vocabularies:
            _check_name(name)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SettingsError(f"column names used twice: {', '.join(twice)}")
        for name, columns in self.vocabularies.items():
            _check_shared(name, columns)
            if name in names and name not in {column.name for column in columns}:
                raise SettingsError(
                    f"the vocabulary {name!r} of column {columns[0].name} has the name of another "
                    "column, which does not share it",
                    "choose another name",
                )

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

    @property
    def vocabularies(self) -> dict[str, tuple[CategoricalColumn, ...]]:
        """The columns of each vocabulary, in spec order; hashed columns have empty ones."""
        groups: dict[str, tuple[CategoricalColumn, ...]] = {}
        for column in self.categorical:
            name = column.vocabulary_name
            groups[name] = (*groups.get(name, ()), column)
        return groups

    @property
    def is_criteo_format(self) -> bool:
        """Whether the files are in Criteo's format, for which there is a faster parser.

        They are tab-separated without a header; dense columns are int32, categorical columns hold
        one hex32 value in each row.
        """
        return (
            self.input.format == "tsv"
            and not self.input.header
            and all(column.raw == "int32" for column in self.dense)
            and all(column.raw == "hex32" and not column.multi_hot for column in self.categorical)
        )

    def with_policy(self, **policy: int) -> FeatureSpec:
        """Return the spec with vocabulary settings (``freq_threshold=…`` …) on every vocabulary.

        Hashed columns have no vocabulary and are left unchanged.
        """
        columns = tuple(
            column if column.hash_buckets else dataclasses.replace(column, **policy)  # type: ignore[arg-type]
            for column in self.categorical
        )
        return dataclasses.replace(self, categorical=columns)

    def with_policy_named(self, name: str) -> FeatureSpec:
        """Return the spec with a policy of :data:`POLICIES`. Raises :class:`SettingsError`."""
        if name not in POLICIES:
            raise SettingsError(f"policy {name!r} is unknown", _known(name, POLICIES))
        return self.with_policy(**POLICIES[name])

    def to_dict(self) -> dict[str, Any]:
        """Return a form for JSON, which :meth:`from_dict` reads."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> FeatureSpec:
        """Inverse of :meth:`to_dict`. Raises :class:`BadInputError`."""
        return parse(cls, value, "a feature spec")


def _check_name(name: str) -> None:
    """Check a name of a column or vocabulary, which is used in names of files."""
    good = isinstance(name, str) and name.isprintable() and "/" not in name
    if not good or not name or name.startswith("."):
        raise SettingsError(
            f"{name!r} cannot be the name of a column or a vocabulary",
            "use printable characters, no '/', and no '.' at the beginning",
        )


def _check_shared(vocabulary: str, columns: tuple[CategoricalColumn, ...]) -> None:
    first = columns[0]
    for column in columns[1:]:
        if (column.raw, column.policy) != (first.raw, first.policy):
            raise SettingsError(
                f"columns {first.name} and {column.name} share the vocabulary {vocabulary!r}, "
                "but their raw types or policies differ",
                "give them the same raw, freq_threshold, max_table_size and num_buckets",
            )


def shipped_specs() -> dict[str, Any]:
    """Return the specs that come with this package, by name; paths may be inside an archive."""
    folder = resources.files("clicklog.spec.presets")  # data only: nothing is imported from there
    files = (file for file in folder.iterdir() if file.name.endswith(".toml"))
    return {file.name.removesuffix(".toml"): file for file in sorted(files, key=lambda f: f.name)}


def load_spec(path: Path | str | None = None) -> FeatureSpec:
    """Read a feature spec: a TOML file, or one of the shipped specs by name; Criteo's by default.

    Raises:
        SettingsError: the file is missing or not TOML, or has an unknown or contradictory key.
    """
    source = _source(path or DEFAULT_SPEC)
    try:
        value = tomllib.loads(source.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # not TOML, or not UTF-8
        raise SettingsError(f"{source}: not a feature spec: {error}") from error
    _check_keys(value, {"label", "dense", "categorical", "dense_transform", "input"}, str(source))
    try:
        _check_keys(value.get("input", {}), _fields(InputFormat), str(source))
        _check_keys(value.get("label", {}), {"name"}, str(source))
        return FeatureSpec(
            label=value.get("label", {}).get("name", "label"),
            dense=_columns(value.get("dense", []), DenseColumn, str(source)),
            categorical=_columns(value.get("categorical", []), CategoricalColumn, str(source)),
            dense_transform=value.get("dense_transform", "log_normalize"),
            input=InputFormat(**value.get("input", {})),
        )
    except SettingsError as error:
        what = error.what.removeprefix(f"{source}: ")
        raise SettingsError(f"{source}: {what}", error.remedy) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise SettingsError(f"{source}: not a feature spec: {error}") from error


def _source(path: Path | str) -> Any:
    """Return the file of a spec; a name of a shipped spec contains no "/" and no "."."""
    if isinstance(path, Path) or "/" in path or "." in path or Path(path).is_file():
        return Path(path)
    shipped = shipped_specs()
    if path not in shipped:
        raise SettingsError(
            f"spec {path!r}: not a feature spec: neither a file nor the name of a shipped spec",
            _known(path, shipped),
        )
    return shipped[path]


def _columns(blocks: list[dict], kind: type, source: str) -> tuple:
    allowed = _fields(kind) - {"name"} | {"names"}
    if not isinstance(blocks, list):
        raise SettingsError(
            f"{source}: columns in single brackets", "write [[dense]] and [[categorical]]"
        )
    columns = []
    for block in blocks:
        _check_keys(block, allowed, source)
        options = {key: value for key, value in block.items() if key != "names"}
        names = block.get("names", [])
        names = _expand(names) if isinstance(names, str) else names
        if not names:  # otherwise a forgotten column goes unnoticed until training is done
            raise SettingsError(
                f"{source}: a block of columns without names: {block}", 'add names = "…" or a list'
            )
        columns += [kind(name=name, **options) for name in names]
    return tuple(columns)


def _expand(pattern: str) -> list[str]:
    """``"int_{0..12}"`` → int_0 … int_12; a name without braces is itself."""
    if not re.search("[{}]", pattern):
        return [pattern]
    match = re.fullmatch(r"([^{}]*)\{(\d+)\.\.(\d+)\}([^{}]*)", pattern)
    if not match or int(match[3]) < int(match[2]):
        raise SettingsError(
            f"names = {pattern!r} is not a range of names",
            'write "int_{0..12}"; put names that contain braces into a list',
        )
    head, first, last, tail = match.groups()
    if int(last) - int(first) >= _MOST_NAMES:
        raise SettingsError(f"names = {pattern!r:.60}", f"use at most {MAX_COLUMNS} columns")
    return [f"{head}{i}{tail}" for i in range(int(first), int(last) + 1)]


def _fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _check_keys(value: Any, allowed: set[str], source: str) -> None:
    if not isinstance(value, dict):
        raise SettingsError(
            f"{source}: not a feature spec: {value!r:.60} instead of a table",
            f"write a table with {', '.join(sorted(allowed))}",
        )
    for key in value:
        if key not in allowed:
            raise SettingsError(f"{source}: unknown key {key!r}", _known(key, allowed))


def _known(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(sorted(known))}"
