"""How columns and labels are read from a file."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from nvt_torchrec.base.number_text import NumberRules
from nvt_torchrec.formats.feature_spec.field_checks import check

#: The largest number of ``nulls``; each is compared with every value of a column of numbers.
_MAX_NULLS = 1000


@dataclasses.dataclass(frozen=True)
class Reading:
    """The columns of the file that a column is read from, and how their text is read.

    Attributes:
        sources: The columns of the file; () for the one with the column's name.
        nulls: Texts that mean a missing value, in addition to the empty one.
        trim: Whether spaces and tabs around a value are removed.
        lenient: Whether numbers may also be written as ``+5``, and integers as ``260.0``.
    """

    removed_keys: ClassVar = {"thousands": "", "unit": ""}

    sources: tuple[str, ...] = ()
    nulls: tuple[str, ...] = ()
    trim: bool = False
    lenient: bool = False

    def __post_init__(self) -> None:
        check(
            self,
            "",
            ("sources", all(self.sources), "give the name of a column of the file"),
            ("nulls", not set("".join(self.nulls)) & set("\r\n"), "give texts without line breaks"),
            ("nulls", len(self.nulls) <= _MAX_NULLS, f"give at most {_MAX_NULLS} texts"),
        )


#: Reads a column by its own name, with no texts for missing values but the empty one.
AS_IT_IS = Reading()


@dataclasses.dataclass(frozen=True)
class LabelRule:
    """A label and how it is read. A missing label is an error unless ``negative`` contains "".

    Without ``positive`` and ``threshold``, values are 0 and 1, also written 0.0 and 1.0.

    Attributes:
        name: The label's column in the output.
        source: The column of the file, "" for the same name. Several labels may share one.
        positive: The texts that mean 1; any other text means 0.
        negative: With ``positive``, the texts that mean 0; any other text is then malformed.
        threshold: Numbers of at least this mean 1, others 0.
        trim: Whether spaces and tabs around a value are removed.
        value: 1 for a log without the column, all of whose rows have label 1, while rows with
            label 0 are drawn (:mod:`.negatives`); else None.
    """

    name: str
    source: str = ""
    positive: tuple[str, ...] = ()
    negative: tuple[str, ...] = ()
    threshold: float | None = None
    trim: bool = False
    value: int | None = None

    def __post_init__(self) -> None:
        is_read = self.source or self.positive or self.threshold is not None
        check(
            self,
            f"label {self.name}: ",
            ("value", self.value in (None, 1), "give 1, or remove it"),
            (
                "value",
                self.value is None or not is_read,
                "remove it, or remove from, positive and threshold",
            ),
            ("positive", all(self.positive), 'give texts, such as ["yes", "true"]'),
            ("threshold", self.threshold is None or not self.positive, "remove it or positive"),
            ("negative", self.positive or not self.negative, "add positive"),
            (
                "negative",
                not set(self.positive) & set(self.negative),
                "remove the texts that are in positive, too",
            ),
        )

    @property
    def column(self) -> str:
        """The column of the file."""
        return self.source or self.name


@dataclasses.dataclass(frozen=True)
class Read(NumberRules):
    """One column of the file, read as values of one raw type.

    Attributes:
        source: The name of the column in the file.
        raw: The raw type, a key of ``RAW_TYPES``.
        multi_hot: Whether its values are lists.
        nulls: See :class:`Reading`, also for ``trim`` and ``lenient``.
        time_format: The format of times, for raw type time.
        label: The rule of the label, for raw type label.
        width: The length of lists that are vectors; 0 for lists of any length.
        maximum: The largest absolute value of a vector's numbers.
    """

    source: str
    raw: str
    multi_hot: bool = False
    nulls: tuple[str, ...] = ()
    trim: bool = False
    time_format: str = ""
    label: LabelRule = LabelRule("")
    width: int = 0
    maximum: float = math.inf


@dataclasses.dataclass(frozen=True)
class ReadPlan:
    """The columns to read from a file. All attributes but the first are indices in ``reads``.

    Attributes:
        reads: The reads; a column that is read in several ways has several.
        labels: Each label, the main one first; None for a label that is constant or comes from
            another file. () without labels.
        weight: The weight; None without one.
        key: The column that splits the rows; None without one.
        dense: The sources of each dense column; () for aggregates and columns of tables.
        categorical: The sources of each categorical column; () for columns of tables.
        times: The time of an event and, if the spec names one, the time at which it is known.
            Without labels, only the time of the row, which may be missing. () without events.
        groups: The columns of each key: of :attr:`FeatureSpec.row_keys` if the rows are events,
            else of :attr:`FeatureSpec.groups`.
        amounts: The columns whose numbers are aggregated; () for rows to score.
        tables: The columns of the key of each joined table.
        join_time: The time of a row, if a table has versions; else None.
        negatives: The item and the user, if negatives are drawn for the rows; else ().
        negative_time: The time of a row, if negatives are drawn and the spec names it; else None.
        label_keys: The columns of the key of each label from another file.
        label_time: The time of a row, if a label comes from another file; else None.
    """

    reads: tuple[Read, ...]
    labels: tuple[int | None, ...]
    weight: int | None
    key: int | None
    dense: tuple[tuple[int, ...], ...]
    categorical: tuple[tuple[int, ...], ...]
    times: tuple[int, ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()
    amounts: tuple[int, ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()
    join_time: int | None = None
    negatives: tuple[int, ...] = ()
    negative_time: int | None = None
    label_keys: tuple[tuple[int, ...], ...] = ()
    label_time: int | None = None
