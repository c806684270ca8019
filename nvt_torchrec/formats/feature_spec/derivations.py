"""Derived columns: one class for each way to compute a column from others, in a registry.

Readers compute it for each block, and inference for each request, so that a derived column is like
one of the file for everything that follows. Each value depends on its own row only. To add a
derivation, add a class and its line in :data:`DERIVATIONS`, here or in a program of one's own.
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

#: Microseconds.
HOUR = 3_600_000_000
DAY = 24 * HOUR
#: 1970-01-01 was a Thursday, and Monday is 0.
_FIRST_WEEKDAY = 3
#: Above this, :class:`LogSquare` takes the logarithm, so that 0, 1 and 2 stay apart.
MIN_LOGARITHM = 2
CROSS_SEPARATOR = "\x1f"
#: The values [n] of a column, of the dtype of its raw type.
Values: TypeAlias = np.ndarray | pa.StringArray
#: An ``onnx_ir.Value``, whose package is not imported here.
OnnxValue: TypeAlias = Any


class DerivedValue(abc.ABC):
    """How a column is computed from columns of the file; a subclass is one way.

    Attributes:
        name: The value of ``derive`` in a spec.
        column: The kind of column that it gives: dense or categorical.
        gives: Its raw type.
        reads: The raw type as which the sources are read.
        counts: How many sources there may be.
        keys: Which of the keys ``reference`` and ``boundaries`` belong to it.
    """

    name: ClassVar[str]
    column: ClassVar[str] = "categorical"
    gives: ClassVar[str] = "int"
    reads: ClassVar[str] = "time"
    counts: ClassVar[tuple[int, ...]] = (1,)
    keys: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """Return the values [n]; where a source is missing, any.

        Args:
            sources: The values of the sources, where they are missing the raw type's placeholder.
                Times are microseconds since 1970, int64.
            how: The keys of the spec.
        """

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """Return the same of values of a ``Graph`` of :mod:`inference.export.onnx_operators`.

        Raises:
            NotImplementedError: No standard operators compute it; such a column is not exported.
        """
        raise NotImplementedError


class _PartOfTime(DerivedValue):
    """A part that returns after a period.

    Attributes:
        unit: The microseconds for which it stays the same.
        period: The number of units in a period.
    """

    unit: ClassVar[int]
    period: ClassVar[int]

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """See :meth:`DerivedValue.compute_onnx`."""
        (times,) = sources
        units = graph.Div(graph.Sub(times, graph.Mod(times, self.unit)), self.unit)  # rounded down
        parts = self.compute([np.arange(self.period) * self.unit], how)
        return graph.Gather(parts, graph.Mod(units, self.period))


class Hour(_PartOfTime):
    """The hour of a time, 0 to 23."""

    name = "hour"
    unit = HOUR
    period = 24

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        return sources[0] // HOUR % 24  # NumPy rounds down, also below 0


class Weekday(_PartOfTime):
    """0 for Monday to 6 for Sunday."""

    name = "weekday"
    unit = DAY
    period = 7

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        return (sources[0] // DAY + _FIRST_WEEKDAY) % 7


class Age(DerivedValue):
    """Days from a time to the reference, or from the second source to the first."""

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
    """How many of the boundaries are not above a number."""

    name = "bucket"
    reads = "float"
    keys = ("boundaries",)

    def compute(self, sources: Sequence[Values], how: Derivation) -> Values:
        """See :meth:`DerivedValue.compute`."""
        return np.searchsorted(np.array(how.boundaries, np.float64), sources[0], side="right")

    def compute_onnx(self, graph: Any, sources: Sequence[OnnxValue], how: Derivation) -> OnnxValue:
        """See :meth:`DerivedValue.compute_onnx`."""
        numbers = graph.Unsqueeze(sources[0], [1])
        above = graph.GreaterOrEqual(numbers, np.array(how.boundaries, float))
        return graph.ReduceSum(graph.convert(above, "INT64"), [1], keepdims=0)


class LogSquare(DerivedValue):
    """⌊(ln x)²⌋ of numbers above 2, and others without their fraction.

    So the winners of the Criteo challenge made categories of its integers (github.com/ycjuan/
    kaggle-2014-criteo), and so does FuxiCTR's ``convert_to_bucket``, with which BARS measures
    Criteo_x4. Unlike the winners, both keep no mark by which ⌊(ln 3)²⌋ = 1 differs from 1. Numbers
    below the least of raw type int count as that.
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
    """The texts of two columns, with :data:`CROSS_SEPARATOR` between them."""

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


#: By name.
DERIVATIONS: dict[str, DerivedValue] = {
    kind.name: kind for kind in (Hour(), Weekday(), Age(), Bucket(), LogSquare(), Cross())
}


@dataclasses.dataclass(frozen=True)
class Derivation:
    """How the value of a column is computed; missing where a source is missing.

    Attributes:
        kind: One of :data:`DERIVATIONS`.
        time_format: Of the sources, where they are times; see :func:`check_time_format`.
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
        check_registered("derive", self.kind, DERIVATIONS)
        where = f"derive = {self.kind!r} with "
        times = self.reads == "time"
        keys = DERIVATIONS[self.kind].keys
        increasing = all(a < b for a, b in itertools.pairwise(self.boundaries))
        check(
            self,
            where,
            ("time_format", times or not self.time_format, "leave it out"),
            ("reference", "reference" in keys or not self.reference, "leave it out"),
            (
                "boundaries",
                ("boundaries" in keys) == bool(self.boundaries),
                'they belong to derive = "bucket"',
            ),
            ("boundaries", increasing, "give increasing numbers, such as [18, 25, 40]"),
        )
        if times:
            check_time_format(self.time_format, where)
        if self.reference:
            parse_iso(self.reference, "reference")

    @property
    def gives(self) -> str:
        """The raw type of the derived column."""
        return DERIVATIONS[self.kind].gives

    @property
    def reads(self) -> str:
        """The raw type as which the sources are read."""
        return DERIVATIONS[self.kind].reads

    def check(self, column: str, kind: str, raw: str, sources: tuple[str, ...]) -> None:
        """Raise :class:`SettingsError` unless it suits a column.

        Args:
            column: The name of the column.
            kind: "dense" or "categorical".
            raw: The raw type of the column.
            sources: The columns of the file from which it is derived.
        """
        how = DERIVATIONS[self.kind]
        wanted = how.column
        gives = how.gives
        counts = how.counts
        age = "reference" not in how.keys or (len(sources) == 1) == bool(self.reference)
        names = 'from = "name"' if counts[0] == 1 else 'from = ["one", "other"]'
        check(
            self,
            f"column {column}: ",
            ("kind", kind == wanted, f"write [[{wanted}]] instead of [[{kind}]]"),
            ("kind", raw == gives, f"leave raw = {raw!r} out: it is {gives}"),
            ("kind", len(sources) in counts, f"write {names}, not {len(sources)} columns"),
            ("reference", age, 'give a time, or two columns, from = ["event", "birth"]'),
        )
