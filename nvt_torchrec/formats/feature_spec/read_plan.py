"""How columns and labels are read from the file."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from nvt_torchrec.base.number_text import NumberRules
from nvt_torchrec.formats.feature_spec.field_checks import check

#: Of ``nulls``: each takes a comparison of every value of a column of numbers.
_MAX_NULLS = 1000


@dataclasses.dataclass(frozen=True)
class Reading:
    """From which columns of the file a column is read, and which texts are its values.

    Attributes:
        sources: Names of columns of the file; (): the column's own name.
        nulls: Texts that mean a missing value, besides the empty one.
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
            ("nulls", not set("".join(self.nulls)) & set("\r\n"), "a value has no line breaks"),
            ("nulls", len(self.nulls) <= _MAX_NULLS, f"give at most {_MAX_NULLS} texts"),
        )


#: A column is read under its own name, and every text is a value.
AS_IT_IS = Reading()


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
        value: 1: the log has no such column, as each of its rows is one with label 1; the others
            are drawn (:mod:`.negatives`).
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
            ("value", self.value in (None, 1), "give 1, or leave it out"),
            ("value", self.value is None or not is_read, "remove it, or from and what is 1"),
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
class Read(NumberRules):
    """One column of the file, read as values of one raw type.

    Attributes:
        source: The name of the column in the file.
        raw: A key of ``RAW_TYPES``.
        multi_hot: Whether its values are lists.
        nulls: See :class:`Reading`; so are trim and lenient.
        time_format: Of raw type time.
        label: Of raw type label, the rule.
        width: Of the lists of a vector, how many values each has; 0 for any number.
        maximum: The largest size of a value of a vector.
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
    """What is read from the file, each column once for each way of reading it.

    Attributes:
        reads: The columns to read.
        labels: The index in ``reads`` of each label, the main one first, None of one that all
            rows have or that is from another file; () without labels.
        weight: That of the weight; None if there is none.
        key: That of the column by which rows are split; None if there is none.
        times: Those of the time of an event and, of a spec that names one, of the time from which
            it is known. Without labels, that of the time of a row, which may lack; () of a spec
            without events.
        groups: Those of the columns of the key of each group of events; of rows that are events,
            of each of :attr:`FeatureSpec.event_keys`.
        amounts: Those of the columns whose numbers aggregates are of; () of rows to score.
        tables: Those of the columns of the key of each table that has columns.
        join_time: That of the time of a row, if a table has versions; else None.
        negatives: Those of the item and of the user of rows that negatives are drawn for; () of
            other rows.
        negative_time: That of the time of these rows; None if the spec names none.
        label_keys: Those of the columns of the key of each label from another file.
        label_time: That of the time of a row, if there are such labels; else None.
        dense: Those of the sources of each dense column; () for an aggregate and for a column of
            a table.
        categorical: Those of the sources of each categorical column; likewise.
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
