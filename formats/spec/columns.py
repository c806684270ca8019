"""Input formats, column types and single columns of a feature spec."""

from __future__ import annotations

import dataclasses
from typing import Any

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.spec.raw_types import CATEGORICAL_RAW_TYPES, DENSE_RAW_TYPES, RAW_TYPES
from nvt_torchrec.formats.spec.reading import AS_IT_IS, Derivation, Reading
from nvt_torchrec.formats.spec.transforms import TRANSFORMS

#: Ids that no value of the vocabulary has: 0 padding, 1 null, then out of vocabulary.
PADDING_ID, NULL_ID, FIRST_OOV_ID = 0, 1, 2

DENSE_TRANSFORMS = tuple(TRANSFORMS)
INPUT_FORMATS = ("tsv", "csv", "parquet")
#: Ids are int32.
MAX_HASH_BUCKETS = 2**31 - 1 - FIRST_OOV_ID

#: The largest ``max_line_kb``, 1 GiB: a block is less than 2 GiB.
MAX_LINE_KB = 1 << 20
MAX_DELIMITER, MAX_SKIP_LINES = 8, 1000
ENCODINGS = ("utf-8", "latin-1")


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """The file format of a log.

    Attributes:
        format: one of :data:`INPUT_FORMATS`.
        header: whether the first line names the columns; None: true for csv, false for tsv.
        delimiter: the ASCII characters between fields, mostly one; "" (the default): comma for csv,
            tab for tsv. Fields of csv may be quoted with ``"``, fields of tsv may not.
        list_separator: the ASCII character between the values of a multi-hot column in text.
        max_line_kb: the most KiB that a line of text may have; a longer line is a malformed row.
        columns: of text without a header, the names of the fields of a line, "" for those that
            nothing is read from; (): the columns of the spec in its order.
        encoding: of text. A byte order mark is skipped.
        skip_lines: how many lines of each text file come before its header or first row.
        quoted_newlines: csv only: whether quoted fields may contain line breaks.
        comment: of text, how lines begin that are neither header nor row. Such lines before the
            header or the first row are skipped; "": there are none.
        skip_empty_lines: of text, whether empty lines at the end of a file are skipped.
        decimal: the decimal point of numbers as text: "." or ",".
    """

    format: str = "tsv"
    header: bool | None = None
    delimiter: str = ""
    list_separator: str = "|"
    max_line_kb: int = 1024
    columns: tuple[str, ...] = ()
    encoding: str = "utf-8"
    skip_lines: int = 0
    quoted_newlines: bool = False
    comment: str = ""
    skip_empty_lines: bool = False
    decimal: str = "."

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
            object.__setattr__(self, "header", self.format == "csv" and not self.columns)
        object.__setattr__(self, "delimiter", self.delimiter or self._default_delimiter)
        for field, most in (("delimiter", MAX_DELIMITER), ("list_separator", 1)):
            value = getattr(self, field)
            if self.format != "parquet" and not _is_separator(value, most):
                raise SettingsError(
                    f"{field} = {value!r}",
                    f"give {'one' if most == 1 else f'1 to {most}'} ASCII characters that cannot "
                    "be part of a value: no digit, letter, quote, sign, dot or line end",
                )
        if not isinstance(self.max_line_kb, int) or not 1 <= self.max_line_kb <= MAX_LINE_KB:
            raise SettingsError(f"max_line_kb = {self.max_line_kb!r}", f"from 1 to {MAX_LINE_KB}")
        if self.delimiter == self.list_separator:
            raise SettingsError(f"delimiter and list_separator are both {self.delimiter!r}")
        if self.decimal not in (".", ","):
            raise SettingsError(f"decimal = {self.decimal!r}", 'give "." or ","')
        self._check_text()

    def _check_text(self) -> None:
        """Check what only text has."""
        if self.encoding not in ENCODINGS:
            raise SettingsError(f"encoding = {self.encoding!r}", f"one of {', '.join(ENCODINGS)}")
        if not _is_int(self.skip_lines) or not 0 <= self.skip_lines <= MAX_SKIP_LINES:
            raise SettingsError(f"skip_lines = {self.skip_lines!r}", f"from 0 to {MAX_SKIP_LINES}")
        for field in ("quoted_newlines", "skip_empty_lines"):
            if not isinstance(getattr(self, field), bool):
                raise SettingsError(
                    f"{field} = {getattr(self, field)!r}", "give true or false, without quotes"
                )
        if self.quoted_newlines and self.format != "csv":
            raise SettingsError(
                f"quoted_newlines with format = {self.format!r}", 'only format = "csv" has quotes'
            )
        if self.quoted_newlines and len(self.delimiter) > 1:
            raise SettingsError(
                f"quoted_newlines with delimiter = {self.delimiter!r}",
                "line breaks in quotes are read only with a delimiter of one character",
            )
        if (
            not isinstance(self.comment, str)
            or not self.comment.isascii()
            or any(character in "\r\n" for character in self.comment)
        ):
            raise SettingsError(
                f"comment = {self.comment!r}", 'give ASCII characters of one line, such as "#"'
            )
        if self.columns and self.header:
            raise SettingsError(
                "both header = true and columns", "name the columns in one way: remove columns"
            )
        if self.format == "parquet":
            for field in ("columns", "skip_lines", "encoding", "comment", "skip_empty_lines"):
                if getattr(self, field) != type(self).__dataclass_fields__[field].default:
                    raise SettingsError(f"{field} with parquet", "remove it: only text has it")
        twice = sorted({name for name in self.columns if name and self.columns.count(name) > 1})
        if twice or not all(isinstance(name, str) for name in self.columns):
            raise SettingsError(
                f"columns = {list(self.columns)!r:.80}", f"names used twice: {', '.join(twice)}"
            )

    @property
    def _default_delimiter(self) -> str:
        return {"tsv": "\t", "csv": ",", "parquet": ""}[self.format]


def _is_separator(value: Any, most: int) -> bool:
    if not isinstance(value, str) or not 1 <= len(value) <= most or not value.isascii():
        return False
    return not any(character.isalnum() or character in '"\r\n-+.' for character in value)


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """A dense column, which holds numbers. ``fill`` replaces missing values.

    ``transform`` is one of ``DENSE_TRANSFORMS``; "" stands for that of the spec. ``reading`` says
    how the column is read, ``derive`` how it is computed from what is read, if it is.
    """

    name: str
    fill: float = 0
    raw: str = "int32"
    transform: str = ""
    reading: Reading = AS_IT_IS
    derive: Derivation | None = None

    def __post_init__(self) -> None:
        if self.transform and self.transform not in DENSE_TRANSFORMS:
            raise SettingsError(
                f"column {self.name}: transform = {self.transform!r}",
                f"one of {', '.join(DENSE_TRANSFORMS)}",
            )
        _check_sources(self, "dense")
        if self.raw not in DENSE_RAW_TYPES:
            raise SettingsError(
                f"column {self.name}: raw = {self.raw!r}", f"one of {', '.join(DENSE_RAW_TYPES)}"
            )
        wanted = RAW_TYPES[self.raw].fill_error(self.fill)
        if wanted:
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
    reading: Reading = AS_IT_IS
    derive: Derivation | None = None

    def __post_init__(self) -> None:
        _check_sources(self, "categorical")
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
        if self.derive and self.multi_hot:
            raise SettingsError(
                f"column {self.name}: derive with multi_hot", "a derived column has one value a row"
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


def _check_sources(column: DenseColumn | CategoricalColumn, kind: str) -> None:
    sources = column.reading.sources or (column.name,)
    if column.derive:
        column.derive.check(column.name, kind, column.raw, sources)
    elif len(sources) != 1:
        raise SettingsError(
            f"column {column.name}: from = {list(sources)} without derive",
            'name one column, or add derive = "cross"',
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
