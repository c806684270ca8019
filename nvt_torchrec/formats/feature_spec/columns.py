"""The input format and the dense and categorical columns of a feature spec."""

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

#: Reserved ids, which no value of the vocabulary has. The out-of-vocabulary ids begin at 2; there
#: are one or more, see :attr:`CategoricalColumn.oov_ids`.
PADDING_ID = 0
NULL_ID = 1
FIRST_OOV_ID = 2

#: The number of columns per word of a bit mask of missing values.
WORD_BITS = 64
DENSE_TRANSFORMS = tuple(TRANSFORMS)
#: Ids are int32.
MAX_HASH_BUCKETS = 2**31 - 1 - FIRST_OOV_ID
#: The largest value of each setting of a vocabulary; counts are 64-bit integers.
_MAXIMA = dict.fromkeys(("max_table_size", "num_buckets", "hash_buckets"), MAX_HASH_BUCKETS)
_MAXIMA["freq_threshold"] = 2**63 - 1

#: The largest ``max_line_kb``, 1 GiB, because a block must be smaller than 2 GiB.
MAX_LINE_KB = 1 << 20
MAX_DELIMITER = 8
MAX_SKIP_LINES = 1000
ENCODINGS = ("utf-8", "latin-1", "cp1252")  # cp1252: Western European Windows


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """The file format of a log.

    Attributes:
        format: One of :data:`INPUT_FORMATS`.
        header: Whether the first line of text names the columns; None for the default: true for csv
            without ``columns``, else false.
        delimiter: The ASCII characters between fields, usually one; "" for the default, a comma for
            csv and a tab for tsv. Fields of csv may be quoted with ``"``, fields of tsv may not.
        list_separator: The ASCII character between the values of a multi-hot column in text.
        max_line_kb: The largest length of a line of text in KiB; a longer line is an error.
        columns: The names of the fields of a line of text without a header, "" for fields that are
            ignored; () if the fields are the columns of the spec in their order.
        encoding: The encoding of text. A byte order mark is skipped.
        skip_lines: The number of lines of each text file before its header or first row.
        comment: The beginning of comment lines in text. Comment lines before the header or the
            first row are skipped; "" if there are none.
        skip_empty_lines: Whether empty lines at the end of a file of text or JSON are skipped.
        decimal: The decimal point of numbers in text: "." or ",".
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
        if self.header is None:
            object.__setattr__(self, "header", kind.quoted and not self.columns)
        object.__setattr__(self, "delimiter", self.delimiter or kind.delimiter)
        names = [name for name in self.columns if name]
        # The comma of csv may also separate lists, because fields with lists can be quoted.
        differ = self.list_separator != self.delimiter or (kind.quoted and self.delimiter == ",")
        is_text = bool(kind.delimiter)
        if is_text:
            self._check_delimiter()
        else:
            self._check_text_fields()
        check(
            self,
            "",
            (
                "list_separator",
                _is_separator(self.list_separator, 1),
                _SEPARATOR % "one ASCII character",
            ),
            ("list_separator", differ, "give another character than the delimiter"),
            ("max_line_kb", 1 <= self.max_line_kb <= MAX_LINE_KB, f"from 1 to {MAX_LINE_KB}"),
            ("decimal", self.decimal in (".", ","), format_choices((".", ","))),
            ("encoding", self.encoding in ENCODINGS, format_choices(ENCODINGS)),
            ("skip_lines", 0 <= self.skip_lines <= MAX_SKIP_LINES, f"from 0 to {MAX_SKIP_LINES}"),
            (
                "comment",
                self.comment.isascii() and not set(self.comment) & set("\r\n"),
                'give ASCII characters of one line, such as "#"',
            ),
            ("columns", not (names and self.header), "remove columns: the header names them"),
            ("columns", len(set(names)) == len(names), "list each name once"),
        )

    def _check_delimiter(self) -> None:
        """Check the delimiter of text."""
        kind = INPUT_FORMATS[self.format]
        check(
            self,
            "",
            ("delimiter", kind.quoted or self.delimiter == kind.delimiter, _USE_CSV),
            (
                "delimiter",
                _is_separator(self.delimiter, MAX_DELIMITER),
                _SEPARATOR % f"1 to {MAX_DELIMITER} ASCII characters",
            ),
        )

    def _check_text_fields(self) -> None:
        """Check that the fields that describe text have their defaults for another format."""
        kind = INPUT_FORMATS[self.format]
        check(
            self,
            "",
            ("delimiter", self.delimiter == kind.delimiter, _USE_CSV),
            ("header", not self.header, f"remove it: {self.format} names its columns"),
        )
        for field, default in _TEXT_DEFAULTS.items():
            if field == "skip_empty_lines" and kind.lines:
                continue  # JSON has lines, too
            is_default = getattr(self, field) == default
            check(self, "", (field, is_default, "remove it: only text has it"))

    @property
    def line_limit(self) -> int:
        """The largest length in bytes of a line or a header line, without its line break."""
        return self.max_line_kb << 10

    @property
    def quoted(self) -> bool:
        """Whether fields of text may be quoted."""
        return INPUT_FORMATS[self.format].quoted


_USE_CSV = 'set format = "csv" to choose a delimiter'
#: The defaults of the fields that only text has.
_TEXT_DEFAULTS = {
    "columns": (), "skip_lines": 0, "encoding": "utf-8", "comment": "", "skip_empty_lines": False,
}  # fmt: skip
_SEPARATOR = (
    "give %s that cannot be part of a value: no digit, letter, quote, sign, dot or line break"
)


def _is_separator(value: str, maximum: int) -> bool:
    return (
        1 <= len(value) <= maximum
        and value.isascii()
        and not any(character.isalnum() or character in '"\r\n-+.' for character in value)
    )


@dataclasses.dataclass(frozen=True)
class DenseColumn:
    """A dense column, which holds numbers.

    Attributes:
        name: The name of the column in the output.
        fill: The replacement for missing values.
        raw: The raw type, one of ``DENSE_RAW_TYPES``.
        transform: One of ``DENSE_TRANSFORMS``; "" for the spec's ``dense_transform``.
        reading: Which columns of the file are read, and how.
        derive: How the column is computed from those; None if it is read as it is.
        aggregate: How the column is computed from the events before a row, instead of being read;
            None for other columns.
        table: The table that holds the column, joined by its key; "" if the log holds it.
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

    Columns that share a vocabulary must have the same raw type and policy; a value then has the
    same id in all of them.

    Attributes:
        name: The name of the column in the output.
        raw: The raw type, one of ``CATEGORICAL_RAW_TYPES``.
        freq_threshold: Values with a smaller count are out of vocabulary; 0 for no bound.
        max_table_size: The largest number of ids, the reserved ones included; 0 for no bound.
        num_buckets: The number of out-of-vocabulary ids, by hash; 0 for one id.
        multi_hot: Whether each row holds a list of categories instead of one.
        vocabulary: The name of a shared vocabulary, which may be the name of another column; "" for
            the column's own.
        hash_buckets: The number of ids, by hash, of a column without a vocabulary; 0 for others.
        reading: Which columns of the file are read, and how.
        derive: How the column is computed from those; None if it is read as it is.
        table: The table that holds the column, joined by its key; "" if the log holds it.
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

    #: The raw types that its values can have.
    raw_types: ClassVar[tuple[str, ...]] = CATEGORICAL_RAW_TYPES

    def __post_init__(self) -> None:
        _check_sources(self, "categorical")
        is_bounded = self.freq_threshold or self.max_table_size
        hashed_only = not (is_bounded or self.num_buckets or self.vocabulary)
        spreads_rare = is_bounded or not self.num_buckets
        one_bound = not (self.freq_threshold and self.max_table_size)
        has_room = not 0 < self.max_table_size < self.reserved_ids
        where = f"column {self.name}: "
        check(self, where, ("raw", self.raw in self.raw_types, format_choices(self.raw_types)))
        for field, value in self.policy.items():
            maximum = _MAXIMA[field]
            remedy = f"give an integer from 0 to {maximum}"
            check(self, where, (field, 0 <= value <= maximum, remedy))
        check(
            self,
            where,
            (
                "multi_hot",
                not (self.derive and self.multi_hot),
                "remove it: a derived column holds one value per row",
            ),
            ("hash_buckets", hashed_only or not self.hash_buckets, _NO_VOCABULARY),
            ("freq_threshold", one_bound, "remove it or max_table_size: Categorify takes only one"),
            (
                "num_buckets",
                spreads_rare,
                "set max_table_size or freq_threshold, too: it spreads the rare values",
            ),
            (
                "max_table_size",
                has_room,
                f"give more than {self.reserved_ids - 1}: {self.reserved_ids} ids are reserved for "
                "padding, null and out of vocabulary",
            ),
        )

    @property
    def vocabulary_name(self) -> str:
        """The name of the vocabulary, the column's own or a shared one."""
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
        """The number of reserved ids, and so the first id of the vocabulary."""
        return FIRST_OOV_ID + self.oov_ids


@dataclasses.dataclass(frozen=True)
class VectorValues(CategoricalColumn):
    """The lists of numbers of a vector, as a column of its table's files.

    It exists only while these files are read, never in the spec of a log, and has no vocabulary.

    Attributes:
        width: The length of each list.
        maximum: The largest absolute value of a number.
    """

    raw: str = "float"
    multi_hot: bool = True
    width: int = 0
    maximum: float = math.inf

    raw_types: ClassVar[tuple[str, ...]] = ("float",)


_NO_VOCABULARY = (
    "remove hash_buckets, or freq_threshold, max_table_size, num_buckets and vocabulary: hashed "
    "columns have no vocabulary"
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
    """Check the names of a spec's columns and vocabularies.

    Args:
        names: The names of all columns of the output.
        vocabularies: The columns of each vocabulary.

    Raises:
        SettingsError: A name is not allowed or not unique, or columns that share a vocabulary
            differ.
    """
    for name in (*names, *vocabularies):
        check_name(name)
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(
            f"column names used twice: {', '.join(twice)}",
            'rename a column; from = "…" names the column of the file that it is read from',
        )
    for name, columns in vocabularies.items():
        _check_shared_vocabulary(name, columns)
        if name in names and name not in {column.name for column in columns}:
            raise SettingsError(
                f"the vocabulary {name!r} of column {columns[0].name} has the name of another "
                "column, which does not share it",
                "choose another name for the vocabulary",
            )


def check_name(name: str) -> None:
    """Raise :class:`SettingsError` unless a name can be part of a file name."""
    is_text = isinstance(name, str) and name.isprintable() and "/" not in name
    if not is_text or not name or name.startswith("."):
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
