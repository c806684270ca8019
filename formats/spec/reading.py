"""How the columns of a spec are read from the file, and how features are derived from them."""

from __future__ import annotations

import dataclasses
import itertools

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.spec.labels import LabelRule
from nvt_torchrec.formats.spec.limits import is_finite_number
from nvt_torchrec.formats.spec.times import check_time_format, parse_iso


@dataclasses.dataclass(frozen=True)
class Reading:
    """From which columns of the file a column is read, and which texts are its values.

    Attributes:
        sources: names of columns of the file; (): the column's own name.
        nulls: texts that mean a missing value, besides the empty one.
        trim: whether spaces and tabs around a value are removed.
        lenient: whether numbers may also be written as ``+5``, and integers as ``260.0``.
        thousands: the character that groups the digits of numbers, which is removed; "" for none.
    """

    sources: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    trim: bool = False
    lenient: bool = False
    thousands: str = ""

    def __post_init__(self) -> None:
        for field in ("sources", "nulls"):
            values = getattr(self, field)
            if not all(isinstance(value, str) for value in values):
                raise SettingsError(f"{field} = {list(values)!r}", "give a list of strings")
        if not all(self.sources):
            raise SettingsError('from = ""', "give the name of a column of the file")
        for field in ("trim", "lenient"):
            if not isinstance(getattr(self, field), bool):
                raise SettingsError(f"{field} = {getattr(self, field)!r}", "give true or false")
        if self.thousands not in ("", ",", ".", "'", " ", "_"):
            raise SettingsError(f"thousands = {self.thousands!r}", "give one of , . ' _ or a space")
        if any("\n" in text or "\r" in text for text in self.nulls):
            raise SettingsError(f"nulls = {list(self.nulls)!r}", "a value has no line breaks")


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
        kind: one of :data:`DERIVATIONS`.
        time_format: of the sources, where they are times; see :mod:`formats.spec.times`. Parquet's
            own times need none.
        reference: of an age with one source: the time from which it is counted backwards, as ISO
            8601. With two sources, the age is the time from the second to the first.
        boundaries: of buckets, increasing numbers.
    """

    kind: str
    time_format: str = ""
    reference: str = ""
    boundaries: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in DERIVATIONS:
            raise SettingsError(f"derive = {self.kind!r}", f"one of {', '.join(DERIVATIONS)}")
        if self.reads == "time":
            check_time_format(self.time_format, f"derive = {self.kind!r}")
        elif self.time_format:
            raise SettingsError(f"derive = {self.kind!r} with time_format", "leave it out")
        if self.reference and self.kind != "age":
            raise SettingsError(f"derive = {self.kind!r} with reference", "leave it out")
        if self.reference:
            parse_iso(self.reference, "reference")
        if (self.kind == "bucket") != bool(self.boundaries):
            raise SettingsError(
                f"derive = {self.kind!r}, boundaries = {list(self.boundaries)}",
                'boundaries belong to derive = "bucket", such as [18, 25, 40]',
            )
        numbers = all(map(is_finite_number, self.boundaries))
        if not numbers or any(a >= b for a, b in itertools.pairwise(self.boundaries)):
            raise SettingsError(
                f"boundaries = {list(self.boundaries)}", "give increasing, finite numbers"
            )

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
            column: the name of the column.
            kind: "dense" or "categorical".
            raw: the raw type of the column.
            sources: the columns of the file from which it is derived.
        """
        wanted, gives, _, counts = DERIVATIONS[self.kind]
        if kind != wanted:
            raise SettingsError(
                f"column {column}: derive = {self.kind!r} in [[{kind}]]", f"write [[{wanted}]]"
            )
        if raw != gives:
            raise SettingsError(
                f"column {column}: raw = {raw!r} with derive = {self.kind!r}",
                f"leave raw out: it is {gives}",
            )
        if len(sources) not in counts:
            raise SettingsError(
                f"column {column}: derive = {self.kind!r} from {len(sources)} columns",
                'write from = "name"' if counts[0] == 1 else 'write from = ["one", "other"]',
            )
        if self.kind == "age" and (len(sources) == 1) != bool(self.reference):
            raise SettingsError(
                f"column {column}: an age is counted to a reference or between two columns",
                'add reference = "2024-01-01", or from = ["event", "birth"]',
            )


@dataclasses.dataclass(frozen=True)
class Read:
    """One column of the file, read as values of one raw type.

    Attributes:
        source: the name of the column in the file.
        raw: a key of ``RAW_TYPES``.
        multi_hot: whether its values are lists.
        nulls: see :class:`Reading`; so are the next three.
        time_format: of raw type time.
        label: of raw type label, the rule.
        decimal: of numbers as text, the decimal point.
    """

    source: str
    raw: str
    multi_hot: bool = False
    nulls: tuple[str, ...] = ()
    trim: bool = False
    lenient: bool = False
    thousands: str = ""
    time_format: str = ""
    label: LabelRule | None = None
    decimal: str = "."


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """What is read from the file, each column once for each way of reading it.

    Attributes:
        reads: the columns to read.
        labels: the index in ``reads`` of each label, the main one first; () without labels.
        weight: that of the weight; None if there is none.
        key: that of the column by which rows are split; None if there is none.
        dense: those of the sources of each dense column.
        categorical: those of the sources of each categorical column.
    """

    reads: tuple[Read, ...]
    labels: tuple[int, ...]
    weight: int | None
    key: int | None
    dense: tuple[tuple[int, ...], ...]
    categorical: tuple[tuple[int, ...], ...]
