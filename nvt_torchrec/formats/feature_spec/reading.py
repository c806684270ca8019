"""How columns and labels are read from the file, and how features are derived from columns."""

from __future__ import annotations

import dataclasses
import itertools

from nvt_torchrec.formats.feature_spec.checks import check, one_of
from nvt_torchrec.formats.feature_spec.times import check_time_format, parse_iso


@dataclasses.dataclass(frozen=True)
class Reading:
    """From which columns of the file a column is read, and which texts are its values.

    Attributes:
        sources: Names of columns of the file; (): the column's own name.
        nulls: Texts that mean a missing value, besides the empty one.
        trim: Whether spaces and tabs around a value are removed.
        lenient: Whether numbers may also be written as ``+5``, and integers as ``260.0``.
        thousands: The character that groups the digits of numbers, which is removed; "" for none.
    """

    sources: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    trim: bool = False
    lenient: bool = False
    thousands: str = ""

    def __post_init__(self) -> None:
        check(
            self,
            "",
            ("sources", all(self.sources), "give the name of a column of the file"),
            ("thousands", self.thousands in ("", *_GROUPING), "give one of , . ' _ or a space"),
            ("nulls", not set("".join(self.nulls)) & set("\r\n"), "a value has no line breaks"),
        )


_GROUPING = (",", ".", "'", " ", "_")
#: A column is read under its own name, and every text is a value.
AS_IT_IS = Reading()

#: By name: the kind of column that a derivation gives, its raw type, the raw type as which the
#: sources are read, and how many there may be.
DERIVATIONS: dict[str, tuple[str, str, str, tuple[int, ...]]] = {
    "hour": ("categorical", "int", "time", (1,)),  # 0–23
    "weekday": ("categorical", "int", "time", (1,)),  # 0 is Monday
    "day": ("categorical", "int", "time", (1,)),  # of the month, 1–31
    "month": ("categorical", "int", "time", (1,)),  # 1–12
    "age": ("dense", "float", "time", (1, 2)),  # days from the (second) source to the reference
    "bucket": ("categorical", "int", "float", (1,)),  # how many boundaries are not above the value
    "log_square": ("categorical", "int", "float", (1,)),  # ⌊(ln x)²⌋ above 2, else x rounded to 0
    "cross": ("categorical", "string", "string", (2,)),  # both texts, with CROSS_SEPARATOR between
}
CROSS_SEPARATOR = "\x1f"


@dataclasses.dataclass(frozen=True)
class Derivation:
    """How the value of a column is computed; missing where a source is missing.

    Attributes:
        kind: One of :data:`DERIVATIONS`.
        time_format: Of the sources, where they are times; see :mod:`formats.feature_spec.times`.
            Parquet's own times need none.
        reference: Of an age with one source: the time from which it is counted backwards, as ISO
            8601. With two sources, the age is the time from the second to the first.
        boundaries: Of buckets, increasing numbers.
    """

    kind: str
    time_format: str = ""
    reference: str = ""
    boundaries: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check(self, "", ("kind", self.kind in DERIVATIONS, one_of(DERIVATIONS)))
        where, times = f"derive = {self.kind!r} with ", self.reads == "time"
        bucket = self.kind == "bucket"
        increasing = all(a < b for a, b in itertools.pairwise(self.boundaries))
        check(
            self,
            where,
            ("time_format", times or not self.time_format, "leave it out"),
            ("reference", self.kind == "age" or not self.reference, "leave it out"),
            ("boundaries", bucket == bool(self.boundaries), 'they belong to derive = "bucket"'),
            ("boundaries", increasing, "give increasing numbers, such as [18, 25, 40]"),
        )
        if times:
            check_time_format(self.time_format, where)
        if self.reference:
            parse_iso(self.reference, "reference")

    @property
    def gives(self) -> str:
        """The raw type of the derived column."""
        return DERIVATIONS[self.kind][1]

    @property
    def reads(self) -> str:
        """The raw type as which the sources are read."""
        return DERIVATIONS[self.kind][2]

    def check(self, column: str, kind: str, raw: str, sources: tuple[str, ...]) -> None:
        """Raise :class:`SettingsError` unless it suits a column.

        Args:
            column: The name of the column.
            kind: "dense" or "categorical".
            raw: The raw type of the column.
            sources: The columns of the file from which it is derived.
        """
        wanted, gives, _, counts = DERIVATIONS[self.kind]
        age = self.kind != "age" or (len(sources) == 1) == bool(self.reference)
        names = 'from = "name"' if counts[0] == 1 else 'from = ["one", "other"]'
        check(
            self,
            f"column {column}: ",
            ("kind", kind == wanted, f"write [[{wanted}]] instead of [[{kind}]]"),
            ("kind", raw == gives, f"leave raw = {raw!r} out: it is {gives}"),
            ("kind", len(sources) in counts, f"write {names}, not {len(sources)} columns"),
            ("reference", age, 'give a time, or two columns, from = ["event", "birth"]'),
        )


@dataclasses.dataclass(frozen=True)
class LabelRule:
    """A label and how it is read; a label may be missing only if ``negative`` has "".

    Without ``positive`` and ``threshold``, values are 0 and 1, also written 0.0 and 1.0.

    Attributes:
        name: Of the label's column in the output.
        source: The column of the file, "" for the same name. Several labels may share one.
        positive: Texts that are 1. Any other text is 0.
        negative: With ``positive``, the texts that are 0; any other text is then malformed.
        threshold: Numbers that are at least this are 1, others 0.
        trim: Whether spaces and tabs around a value are removed.
    """

    name: str
    source: str = ""
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    threshold: float | None = None
    trim: bool = False

    def __post_init__(self) -> None:
        check(
            self,
            f"label {self.name}: ",
            ("positive", all(self.positive), 'give texts, such as ["yes", "true"]'),
            ("threshold", self.threshold is None or not self.positive, "remove it or positive"),
            ("negative", self.positive or not self.negative, "add positive"),
            ("negative", not set(self.positive) & set(self.negative), "a text is in both"),
        )

    @property
    def column(self) -> str:
        """The column of the file."""
        return self.source or self.name


@dataclasses.dataclass(frozen=True)
class Read:
    """One column of the file, read as values of one raw type.

    Attributes:
        source: The name of the column in the file.
        raw: A key of ``RAW_TYPES``.
        multi_hot: Whether its values are lists.
        nulls: See :class:`Reading`; so are the next three.
        time_format: Of raw type time.
        label: Of raw type label, the rule.
        decimal: Of numbers as text, the decimal point.
    """

    source: str
    raw: str
    multi_hot: bool = False
    nulls: tuple[str, ...] = ()
    trim: bool = False
    lenient: bool = False
    thousands: str = ""
    time_format: str = ""
    label: LabelRule = LabelRule("")
    decimal: str = "."


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """What is read from the file, each column once for each way of reading it.

    Attributes:
        reads: The columns to read.
        labels: The index in ``reads`` of each label, the main one first; () without labels.
        weight: That of the weight; None if there is none.
        key: That of the column by which rows are split; None if there is none.
        dense: Those of the sources of each dense column.
        categorical: Those of the sources of each categorical column.
    """

    reads: tuple[Read, ...]
    labels: tuple[int, ...]
    weight: int | None
    key: int | None
    dense: tuple[tuple[int, ...], ...]
    categorical: tuple[tuple[int, ...], ...]
