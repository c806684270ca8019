"""Input formats, column types and single columns of a feature spec."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.derivations import Derivation
from nvt_torchrec.formats.feature_spec.events import Aggregate
from nvt_torchrec.formats.feature_spec.field_checks import check, check_registered, format_choices
from nvt_torchrec.formats.feature_spec.file_formats import INPUT_FORMATS
from nvt_torchrec.formats.feature_spec.raw_types import (
    CATEGORICAL_RAW_TYPES,
    DENSE_RAW_TYPES,
    RAW_TYPES,
)
from nvt_torchrec.formats.feature_spec.read_plan import AS_IT_IS, Reading
from nvt_torchrec.formats.feature_spec.transforms import TRANSFORMS

#: Ids that no value of the vocabulary has: 0 padding, 1 null, then out of vocabulary.
PADDING_ID = 0
NULL_ID = 1
FIRST_OOV_ID = 2

#: Columns in a word of a mask of missing values.
WORD_BITS = 64
DENSE_TRANSFORMS = tuple(TRANSFORMS)
#: Ids are int32.
MAX_HASH_BUCKETS = 2**31 - 1 - FIRST_OOV_ID
#: By setting of a vocabulary, the largest value; counts are 64-bit integers.
_MAXIMA = dict.fromkeys(("max_table_size", "num_buckets", "hash_buckets"), MAX_HASH_BUCKETS)
_MAXIMA["freq_threshold"] = 2**63 - 1

#: The largest ``max_line_kb``, 1 GiB: a block is less than 2 GiB.
MAX_LINE_KB = 1 << 20
MAX_DELIMITER = 8
MAX_SKIP_LINES = 1000
ENCODINGS = ("utf-8", "latin-1", "cp1252")  # cp1252: Western European Windows


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """The file format of a log.

    Attributes:
        format: One of :data:`INPUT_FORMATS`.
        header: Whether the first line names the columns; None: true for csv, false for tsv.
        delimiter: The ASCII characters between fields, mostly one; "" (the default): comma for csv,
            tab for tsv. Fields of csv may be quoted with ``"``, fields of tsv may not.
        list_separator: The ASCII character between the values of a multi-hot column in text.
        max_line_kb: The most KiB that a line of text may have; a longer line is an error.
        columns: Of text without a header, the names of the fields of a line, "" for those that
            nothing is read from; (): the columns of the spec in its order.
        encoding: Of text. A byte order mark is skipped.
        skip_lines: How many lines of each text file come before its header or first row.
        comment: Of text, how lines begin that are neither header nor row. Such lines before the
            header or the first row are skipped; "": there are none.
        skip_empty_lines: Of text and JSON, whether empty lines at the end of a file are skipped.
        decimal: The decimal point of numbers as text: "." or ",".
    """

    removed_keys: ClassVar = {"quoted_newlines": False}

    format: str = "tsv"
    header: bool | None = None
    delimiter: str = ""
    list_separator: str = "|"
    max_line_kb: int = 1024
    columns: tuple[str, ...] = ()
    encoding: str = "utf-8"
    skip_lines: int = 0
    comment: str = ""
    skip_empty_lines: bool = False
    decimal: str = "."

    def __post_init__(self) -> None:
        check_registered("format", self.format, INPUT_FORMATS)
        kind = INPUT_FORMATS[self.format]
        text = bool(kind.delimiter)
        quotes = kind.quoted
        separator = kind.delimiter
        if self.header is None:
            object.__setattr__(self, "header", quotes and not self.columns)
        object.__setattr__(self, "delimiter", self.delimiter or separator)
        names = [name for name in self.columns if name]
        comment = self.comment.isascii() and not set(self.comment) & set("\r\n")
        apart = self.list_separator != self.delimiter or (quotes and self.delimiter == ",")
        check(
            self,
            "",
            ("delimiter", quotes or self.delimiter == separator, 'set format = "csv" for it'),
            ("header", text or not self.header, f"remove it: {self.format} names its columns"),
            *(
                (
                    field,
                    not text or _is_separator(getattr(self, field), maximum),
                    _SEPARATOR % maximum,
                )
                for field, maximum in (("delimiter", MAX_DELIMITER), ("list_separator", 1))
            ),
            ("list_separator", apart, "it is the delimiter, too"),
            ("max_line_kb", 1 <= self.max_line_kb <= MAX_LINE_KB, f"from 1 to {MAX_LINE_KB}"),
            ("decimal", self.decimal in (".", ","), format_choices((".", ","))),
            ("encoding", self.encoding in ENCODINGS, format_choices(ENCODINGS)),
            ("skip_lines", 0 <= self.skip_lines <= MAX_SKIP_LINES, f"from 0 to {MAX_SKIP_LINES}"),
            ("comment", comment, 'give ASCII characters of one line, such as "#"'),
            ("columns", not (names and self.header), "the header names them: remove columns"),
            *(
                (field, text or getattr(self, field) == default, "remove it: only text has it")
                for field, default in _OF_TEXT.items()
                if field != "skip_empty_lines" or not kind.lines
            ),
            ("columns", len(set(names)) == len(names), "a name stands there twice"),
        )

    @property
    def line_limit(self) -> int:
        """Bytes that a line may have, without its end; a header line too."""
        return self.max_line_kb << 10

    @property
    def quoted(self) -> bool:
        """Whether fields of text may be quoted."""
        return INPUT_FORMATS[self.format].quoted


#: What only text has, and the defaults.
_OF_TEXT = {
    "columns": (), "skip_lines": 0, "encoding": "utf-8", "comment": "", "skip_empty_lines": False,
}  # fmt: skip
_SEPARATOR = (
    "give 1 to %d ASCII characters that cannot be part of a value: no digit, letter, quote, sign, "
    "dot or line end"
)


def _is_separator(value: str, maximum: int) -> bool:
    return (
        1 <= len(value) <= maximum
        and value.isascii()
        and not any(character.isalnum() or character in '"\r\n-+.' for character in value)
    )


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """A dense column, which holds numbers. ``fill`` replaces missing values.

    ``transform`` is one of ``DENSE_TRANSFORMS``; "" stands for that of the spec. ``reading`` says
    how the column is read, ``derive`` how it is computed from what is read, if it is. A column with
    an ``aggregate`` is not read: it is computed from the events before the row. One with a
    ``table`` is read from the table of that name, of the row with the same key.
    """

    name: str
    fill: float = 0
    raw: str = "int32"
    transform: str = ""
    reading: Reading = AS_IT_IS
    derive: Derivation | None = None
    aggregate: Aggregate | None = None
    table: str = ""

    def __post_init__(self) -> None:
        where = f"column {self.name}: "
        _check_sources(self, "dense")
        check(
            self,
            where,
            ("transform", self.transform in ("", *TRANSFORMS), format_choices(TRANSFORMS)),
            ("raw", self.raw in DENSE_RAW_TYPES, format_choices(DENSE_RAW_TYPES)),
        )
        kind = RAW_TYPES[self.raw]
        whole = isinstance(self.fill, int) and kind.contains(self.fill)
        check(self, where, ("fill", whole or not kind.is_whole, "give a 32-bit integer"))


@dataclasses.dataclass(frozen=True)
class CategoricalColumn:
    """A categorical column and the policy of its vocabulary.

    Each row holds a category, or with ``multi_hot`` a list of them. For the numbers of the policy,
    0 means no bound. ``vocabulary`` names the vocabulary, "" is the column's own. Columns that
    share a vocabulary have the same raw type and policy, and the same value has the same id in all
    of them. The name may be that of another column, whose vocabulary is then shared. A column with
    a ``table`` is read from the table of that name, see :class:`DenseColumn`.
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
    table: str = ""

    #: The raw types that its values may have.
    raw_types: ClassVar[tuple[str, ...]] = CATEGORICAL_RAW_TYPES

    def __post_init__(self) -> None:
        _check_sources(self, "categorical")
        bounds = self.freq_threshold or self.max_table_size
        hashed_only = not (bounds or self.num_buckets or self.vocabulary)
        spreads_rare = bounds or not self.num_buckets
        one_bound = not (self.freq_threshold and self.max_table_size)
        room = not 0 < self.max_table_size < self.reserved_ids
        check(
            self,
            f"column {self.name}: ",
            ("raw", self.raw in self.raw_types, format_choices(self.raw_types)),
            *(
                (field, 0 <= value <= _MAXIMA[field], f"from 0 to {_MAXIMA[field]}")
                for field, value in self.policy.items()
            ),
            ("multi_hot", not (self.derive and self.multi_hot), "a derived column has one value"),
            ("hash_buckets", hashed_only or not self.hash_buckets, _NO_VOCABULARY),
            ("freq_threshold", one_bound, "Categorify takes it or max_table_size: remove one"),
            ("num_buckets", spreads_rare, "it only spreads rare values; set max_table_size, too"),
            ("max_table_size", room, f"{self.reserved_ids} ids are reserved: null, padding, oov"),
        )

    @property
    def vocabulary_name(self) -> str:
        """The name of the vocabulary, this column's own or a shared one."""
        return self.vocabulary or self.name

    @property
    def policy(self) -> dict[str, int]:
        """The settings that bound the vocabulary."""
        names = ("freq_threshold", "max_table_size", "num_buckets", "hash_buckets")
        return {name: getattr(self, name) for name in names}

    @property
    def oov_ids(self) -> int:
        """The number of out-of-vocabulary ids; ``hash_buckets`` gives all values such an id."""
        return self.hash_buckets or self.num_buckets or 1

    @property
    def reserved_ids(self) -> int:
        """The first id of the vocabulary, after the ids of padding, null and out of vocabulary."""
        return FIRST_OOV_ID + self.oov_ids


@dataclasses.dataclass(frozen=True)
class VectorValues(CategoricalColumn):
    """The values of a vector while the files of its table are read; no spec of a log has one.

    They are lists of numbers, and have no vocabulary.

    Attributes:
        width: How many numbers each list has.
        maximum: The largest size of a number.
    """

    raw: str = "float"
    multi_hot: bool = True
    width: int = 0
    maximum: float = math.inf

    raw_types: ClassVar[tuple[str, ...]] = ("float",)


_NO_VOCABULARY = (
    "it does without a vocabulary: remove freq_threshold, max_table_size, num_buckets and "
    "vocabulary, or hash_buckets"
)


def _check_sources(column: DenseColumn | CategoricalColumn, kind: str) -> None:
    sources = column.reading.sources or (column.name,)
    if column.derive:
        column.derive.check(column.name, kind, column.raw, sources)
    elif len(sources) != 1:
        raise SettingsError(
            f"column {column.name}: from = {list(sources)} without derive",
            'name one column, or add derive = "cross"',
        )


def check_names(
    names: Sequence[str], vocabularies: Mapping[str, Sequence[CategoricalColumn]]
) -> None:
    """Check the names of the columns of a spec and of its vocabularies.

    Args:
        names: Of all columns of the output.
        vocabularies: The columns of each vocabulary.

    Raises:
        SettingsError: A name cannot be one or is there twice, or columns that share a vocabulary
            differ.
    """
    for name in (*names, *vocabularies):
        check_name(name)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"column names used twice: {', '.join(twice)}")
    for name, columns in vocabularies.items():
        _check_shared_vocabulary(name, columns)
        if name in names and name not in {column.name for column in columns}:
            raise SettingsError(
                f"the vocabulary {name!r} of column {columns[0].name} has the name of another "
                "column, which does not share it",
                "choose another name",
            )


def check_name(name: str) -> None:
    """Check a name of a column, a vector or a vocabulary, which is used in names of files."""
    good = isinstance(name, str) and name.isprintable() and "/" not in name
    if not good or not name or name.startswith("."):
        raise SettingsError(
            f"{name!r} cannot be the name of a column or a vocabulary",
            "use printable characters, no '/', and no '.' at the beginning",
        )


def _check_shared_vocabulary(vocabulary: str, columns: Sequence[CategoricalColumn]) -> None:
    """Check that columns that share a vocabulary have the same raw type and policy."""
    first = columns[0]
    for column in columns[1:]:
        if (column.raw, column.policy) != (first.raw, first.policy):
            raise SettingsError(
                f"columns {first.name} and {column.name} share the vocabulary {vocabulary!r}, "
                "but their raw types or policies differ",
                "give them the same raw, freq_threshold, max_table_size and num_buckets",
            )
