"""Derived columns: one class for each way to compute a column from others, in a registry.

Readers derive columns for each block, and inference for each request. After that a derived column
is like any column of the file. Each value depends on its own row only. To add a derivation, add a
class and its line in :data:`DERIVATIONS`, here or in your own program.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import strings
from nvt_torchrec.formats.feature_spec.field_checks import check, check_registered
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.raw_types.time import check_time_format, parse_iso

#: Microseconds of an hour and of a day.
HOUR = 3_600_000_000
DAY = 24 * HOUR
#: The weekday of 1970-01-01, a Thursday; Monday is 0.
_FIRST_WEEKDAY = 3
#: :class:`LogSquare` takes the logarithm of larger numbers only, so that 0, 1 and 2 stay distinct.
MIN_LOGARITHM = 2
CROSS_SEPARATOR = "\x1f"
#: The values [n] of a column, of the dtype of its raw type.
Values: TypeAlias = np.ndarray | pa.StringArray
#: An ``onnx_ir.Value``; the package is optional, so it is not imported here.
OnnxValue: TypeAlias = Any


class DerivedValue(abc.ABC):
    """Base class of the ways to compute a column from columns of the file.

    Attributes:
        name: The value of ``derive`` in a spec.
        column: The kind of the derived column: dense or categorical.
        gives: The raw type of the derived column.
        reads: The raw type that the sources are read as.
        counts: The allowed numbers of sources.
        keys: Those of the keys ``reference`` and ``boundaries`` that it takes.
    """

    name: ClassVar[str]
    column: ClassVar[str] = "categorical"
    gives: ClassVar[str] = "int"
    reads: ClassVar[str] = "time"
    counts: ClassVar[tuple[int, ...]] = (1,)
    keys: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """Return the values [n]; the caller ignores those of rows where a source is missing.

        Args:
            sources: The values [n] of each source, with the raw type's placeholder where they are
                missing. Times are int64 microseconds since 1970.
            how: The settings of the derivation in the spec.
        """

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """Build the same computation in an ONNX graph, and return its result.

        Args:
            graph: A ``Graph`` of :mod:`inference.export.onnx_operators`.
            sources: The graph's values for the sources.
            how: The settings of the derivation in the spec.

        Raises:
            NotImplementedError: ONNX's operators cannot compute it, so the column is not exported.
        """
        raise NotImplementedError


class _PartOfTime(DerivedValue):
    """A part of a time that repeats after a period, such as the hour of the day.

    Attributes:
        unit: The microseconds for which the part stays the same.
        period: The number of units in a period.
    """

    unit: ClassVar[int]
    period: ClassVar[int]

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """See :meth:`DerivedValue.compute_onnx`."""
        (times,) = sources
        # ONNX's Div rounds toward zero, which is wrong for times before 1970.
        units = graph.Div(graph.Sub(times, graph.Mod(times, self.unit)), self.unit)
        parts = self.compute([np.arange(self.period) * self.unit], how)
        return graph.Gather(parts, graph.Mod(units, self.period))


class Hour(_PartOfTime):
    """The hour of a time, 0 to 23."""

    name = "hour"
    unit = HOUR
    period = 24

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        return sources[0] // HOUR % 24  # NumPy rounds down, also for times before 1970


class Weekday(_PartOfTime):
    """0 for Monday to 6 for Sunday."""

    name = "weekday"
    unit = DAY
    period = 7

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        return (sources[0] // DAY + _FIRST_WEEKDAY) % 7


class Age(DerivedValue):
    """The days from a time to the reference, or from the second source to the first."""

    name = "age"
    column = "dense"
    gives = "float"
    counts = (1, 2)
    keys = ("reference",)

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        end = parse_iso(how.reference, "reference") if len(sources) == 1 else sources[0]
        return (end - sources[-1]) / DAY

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """See :meth:`DerivedValue.compute_onnx`."""
        end = parse_iso(how.reference, "reference") if len(sources) == 1 else sources[0]
        return graph.Div(graph.convert(graph.Sub(end, sources[-1]), "DOUBLE"), float(DAY))


class Bucket(DerivedValue):
    """The number of boundaries that are at most the value."""

    name = "bucket"
    reads = "float"
    keys = ("boundaries",)

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        return np.searchsorted(np.array(how.boundaries, np.float64), sources[0], side="right")

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """See :meth:`DerivedValue.compute_onnx`."""
        numbers = graph.Unsqueeze(sources[0], [1])
        reached = graph.GreaterOrEqual(numbers, np.array(how.boundaries, float))
        return graph.ReduceSum(graph.convert(reached, "INT64"), [1], keepdims=0)


class LogSquare(DerivedValue):
    """⌊(ln x)²⌋ for numbers above 2; smaller numbers lose their fraction.

    The winners of the Criteo challenge turned integers into categories in this way (github.com/
    ycjuan/kaggle-2014-criteo), and so does FuxiCTR's ``convert_to_bucket``, which BARS uses for
    Criteo_x4. The winners marked large numbers, so that ⌊(ln 3)²⌋ = 1 differs from 1; FuxiCTR and
    this class do not. Numbers below the minimum of raw type int become that minimum.
    """

    name = "log_square"
    reads = "float"

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        numbers = sources[0]
        large = numbers > MIN_LOGARITHM
        plain = np.maximum(np.trunc(np.where(large, 0, numbers)), RAW_TYPES["int"].minimum)
        return np.where(large, np.floor(np.log(np.where(large, numbers, 1.0)) ** 2), plain)

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """See :meth:`DerivedValue.compute_onnx`."""
        numbers = sources[0]
        large = graph.Greater(numbers, float(MIN_LOGARITHM))
        logarithm = graph.Log(graph.Where(large, numbers, 1.0))
        whole = graph.Mul(graph.Floor(graph.Abs(numbers)), graph.Sign(numbers))
        plain = graph.Max(whole, float(RAW_TYPES["int"].minimum))
        squares = graph.Floor(graph.Mul(logarithm, logarithm))
        return graph.convert(graph.Where(large, squares, plain), "INT64")


class Cross(DerivedValue):
    """The strings of two columns, joined by :data:`CROSS_SEPARATOR`."""

    name = "cross"
    gives = "string"
    reads = "string"
    counts = (2,)

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        return pc.binary_join_element_wise(*sources, strings([CROSS_SEPARATOR])[0])

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """See :meth:`DerivedValue.compute_onnx`."""
        return graph.StringConcat(graph.StringConcat(sources[0], CROSS_SEPARATOR), sources[1])


#: The derivations by name.
DERIVATIONS: dict[str, DerivedValue] = {
    kind.name: kind for kind in (Hour(), Weekday(), Age(), Bucket(), LogSquare(), Cross())
}


@dataclasses.dataclass(frozen=True)
class Derivation:
    """How the value of a column is computed; missing where a source is missing.

    Attributes:
        kind: A name in :data:`DERIVATIONS`.
        time_format: The format of sources that are times, see :func:`check_time_format`. Parquet's
            timestamps need none.
        reference: For an age with one source, the time until which it is counted, as ISO 8601.
        boundaries: For buckets, increasing numbers.
    """

    kind: str
    time_format: str = ""
    reference: str = ""
    boundaries: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_registered("derive", self.kind, DERIVATIONS)
        where = f"derive = {self.kind!r} with "
        reads_times = self.reads == "time"
        keys = DERIVATIONS[self.kind].keys
        takes_boundaries = "boundaries" in keys
        increasing = all(a < b for a, b in itertools.pairwise(self.boundaries))
        check(
            self,
            where,
            ("time_format", reads_times or not self.time_format, "remove it"),
            ("reference", "reference" in keys or not self.reference, "remove it"),
            ("boundaries", takes_boundaries or not self.boundaries, "remove it"),
            (
                "boundaries",
                self.boundaries or not takes_boundaries,
                "give increasing numbers, such as [18, 25, 40]",
            ),
            ("boundaries", increasing, "give increasing numbers, such as [18, 25, 40]"),
        )
        if reads_times:
            check_time_format(self.time_format, where)
        if self.reference:
            parse_iso(self.reference, "reference")

    @property
    def gives(self) -> str:
        """The raw type of the derived column."""
        return DERIVATIONS[self.kind].gives

    @property
    def reads(self) -> str:
        """The raw type that the sources are read as."""
        return DERIVATIONS[self.kind].reads

    def check(self, column: str, kind: str, raw: str, sources: tuple[str, ...]) -> None:
        """Raise :class:`SettingsError` unless the derivation suits a column.

        Args:
            column: The name of the column.
            kind: The kind of the column, "dense" or "categorical".
            raw: The raw type of the column.
            sources: The columns of the file that it is derived from.
        """
        derived = DERIVATIONS[self.kind]
        from_example = 'from = "name"' if derived.counts[0] == 1 else 'from = ["one", "other"]'
        has_end = "reference" not in derived.keys or (len(sources) == 1) == bool(self.reference)
        check(
            self,
            f"column {column}: ",
            ("kind", kind == derived.column, f"write [[{derived.column}]] instead of [[{kind}]]"),
            ("kind", raw == derived.gives, f"remove raw = {raw!r}: it is {derived.gives}"),
            (
                "kind",
                len(sources) in derived.counts,
                f"write {from_example}, not {len(sources)} columns",
            ),
            ("reference", has_end, 'give a time, or two columns, from = ["event", "birth"]'),
        )
