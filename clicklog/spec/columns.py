"""Input formats, column types and single columns of a feature spec."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from clicklog.errors import SettingsError
from clicklog.spec.raw_types import CATEGORICAL_RAW_TYPES, DENSE_RAW_TYPES, RAW_TYPES

#: Ids that no value of the vocabulary has: 0 padding, 1 null, then out of vocabulary.
PADDING_ID, NULL_ID, FIRST_OOV_ID = 0, 1, 2

INPUT_FORMATS = ("tsv", "csv", "parquet")
#: Ids are int32.
MAX_HASH_BUCKETS = 2**31 - 1 - FIRST_OOV_ID

#: The largest ``max_line_kb``, 1 GiB: a block is less than 2 GiB.
MAX_LINE_KB = 1 << 20


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """The file format of a log.

    Attributes:
        format: one of :data:`INPUT_FORMATS`.
        header: whether the first line names the columns; None: true for csv, false for tsv.
        delimiter: the ASCII character between fields; "" (the default): comma for csv, tab for tsv.
            Fields of csv may be quoted with ``"``, fields of tsv may not.
        list_separator: the ASCII character between the values of a multi-hot column in text.
        max_line_kb: the most KiB that a line of text may have; a longer line is a malformed row.
    """

    format: str = "tsv"
    header: bool | None = None
    delimiter: str = ""
    list_separator: str = "|"
    max_line_kb: int = 1024

    def __post_init__(self) -> None:
        if self.format not in INPUT_FORMATS:
            raise SettingsError(
                f"input format {self.format!r} is unknown", f"one of {', '.join(INPUT_FORMATS)}"
            )
        if self.delimiter and self.format != "csv" and self.delimiter != self._default_delimiter:
            raise SettingsError(
                f"delimiter = {self.delimiter!r} with format = {self.format!r}",
                'set format = "csv", which takes any delimiter',
            )
        if self.header and self.format == "parquet":
            raise SettingsError("header = true with parquet", "parquet names its columns itself")
        if self.header not in (None, True, False):  # TOML's strings are true, "false" too
            raise SettingsError(f"header = {self.header!r}", "give true or false, without quotes")
        if self.header is None:
            object.__setattr__(self, "header", self.format == "csv")
        object.__setattr__(self, "delimiter", self.delimiter or self._default_delimiter)
        for field in ("delimiter", "list_separator"):
            value = getattr(self, field)
            if self.format != "parquet" and not _is_separator(value):
                raise SettingsError(
                    f"{field} = {value!r}",
                    "give one ASCII character that cannot be part of a value: not a digit, letter, "
                    "quote, sign, dot or line end",
                )
        if not isinstance(self.max_line_kb, int) or not 1 <= self.max_line_kb <= MAX_LINE_KB:
            raise SettingsError(f"max_line_kb = {self.max_line_kb!r}", f"from 1 to {MAX_LINE_KB}")
        if self.delimiter == self.list_separator:
            raise SettingsError(f"delimiter and list_separator are both {self.delimiter!r}")

    @property
    def _default_delimiter(self) -> str:
        return {"tsv": "\t", "csv": ",", "parquet": ""}[self.format]


def _is_separator(value: Any) -> bool:
    one = isinstance(value, str) and len(value) == 1
    return one and value.isascii() and not value.isalnum() and value not in '"\r\n-+.'


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """A dense column, which holds numbers. ``fill`` replaces missing values."""

    name: str
    fill: float = 0
    raw: str = "int32"

    def __post_init__(self) -> None:
        if self.raw not in DENSE_RAW_TYPES:
            raise SettingsError(
                f"column {self.name}: raw = {self.raw!r}", f"one of {', '.join(DENSE_RAW_TYPES)}"
            )
        if self.raw == "int32":
            fits = _is_int(self.fill) and RAW_TYPES["int32"].contains(self.fill)
            wanted = "a 32-bit integer"
        else:
            fits = isinstance(self.fill, float) or _is_int(self.fill)
            fits = fits and abs(self.fill) <= sys.float_info.max
            wanted = "a finite number"
        if not fits:
            raise SettingsError(f"column {self.name}: fill = {self.fill!r}", f"give {wanted}")


@dataclasses.dataclass(frozen=True)
class CategoricalColumn:
    """A categorical column and the policy of its vocabulary.

    Each row holds a category, or with ``multi_hot`` a list of them. For the numbers of the policy,
    0 means no bound. ``vocabulary`` names the vocabulary, "" is the column's own. Columns that
    share a vocabulary have the same raw type and policy, and the same value has the same id in all
    of them. The name may be that of another column, whose vocabulary is then shared.
    """

    name: str
    raw: str = "hex32"
    freq_threshold: int = 0
    max_table_size: int = 0
    num_buckets: int = 0
    multi_hot: bool = False
    vocabulary: str = ""
    hash_buckets: int = 0

    def __post_init__(self) -> None:
        if self.raw not in CATEGORICAL_RAW_TYPES:
            raise SettingsError(
                f"column {self.name}: raw = {self.raw!r}",
                f"one of {', '.join(CATEGORICAL_RAW_TYPES)}",
            )
        for field in ("freq_threshold", "max_table_size", "num_buckets", "hash_buckets"):
            if not _is_int(getattr(self, field)):
                raise SettingsError(
                    f"column {self.name}: {field} = {getattr(self, field)!r}", "give an integer"
                )
            if getattr(self, field) < 0:
                raise SettingsError(f"column {self.name}: {field} = {getattr(self, field)} < 0")
            most, why = MAX_HASH_BUCKETS, "ids are 32-bit integers"
            if field == "freq_threshold":
                most, why = 2**63 - 1, "counts are 64-bit integers"
            if getattr(self, field) > most:
                raise SettingsError(
                    f"column {self.name}: {field} = {getattr(self, field)}",
                    f"at most {most}: {why}",
                )
        for field, kind in (("multi_hot", bool), ("vocabulary", str)):
            if not isinstance(getattr(self, field), kind):
                raise SettingsError(
                    f"column {self.name}: {field} = {getattr(self, field)!r}",
                    f"give a {kind.__name__}",
                )
        if self.hash_buckets:
            self._check_hashed()
        if self.freq_threshold and self.max_table_size:
            raise SettingsError(
                f"column {self.name}: both freq_threshold and max_table_size are set",
                "NVTabular's Categorify takes one of them",
            )
        if self.num_buckets and not (self.freq_threshold or self.max_table_size):
            raise SettingsError(
                f"column {self.name}: num_buckets = {self.num_buckets} without a cap",
                "it only spreads rare values over more ids; set max_table_size to cap the table, "
                "or hash_buckets to hash every value",
            )
        if self.max_table_size and self.max_table_size < self.reserved_ids:
            raise SettingsError(
                f"column {self.name}: max_table_size = {self.max_table_size} leaves no room",
                f"{self.reserved_ids} ids are reserved for padding, null and out of vocabulary",
            )

    def _check_hashed(self) -> None:
        for field in ("freq_threshold", "max_table_size", "num_buckets", "vocabulary"):
            if getattr(self, field):
                raise SettingsError(
                    f"column {self.name}: hash_buckets and {field} are both set",
                    "hash_buckets does without a vocabulary; remove one of the two",
                )

    @property
    def vocabulary_name(self) -> str:
        """The name of the vocabulary, this column's own or a shared one."""
        return self.vocabulary or self.name

    @property
    def policy(self) -> dict[str, int]:
        """The settings that bound the vocabulary."""
        return {
            "freq_threshold": self.freq_threshold,
            "max_table_size": self.max_table_size,
            "num_buckets": self.num_buckets,
            "hash_buckets": self.hash_buckets,
        }

    @property
    def oov_ids(self) -> int:
        """The number of out-of-vocabulary ids; ``hash_buckets`` gives all values such an id."""
        return self.hash_buckets or self.num_buckets or 1

    @property
    def reserved_ids(self) -> int:
        """The first id of the vocabulary, after the ids of padding, null and out of vocabulary."""
        return FIRST_OOV_ID + self.oov_ids


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
