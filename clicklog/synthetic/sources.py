"""What the columns of a file are from which a spec reads its features, and the features of them.

A source is drawn as numbers, as times, or as codes of categories, whatever is read from it: a
feature that is derived from several sources, or shares one with others, is a function of what was
drawn, so that its effect on the click is there for a model to learn.
"""

from __future__ import annotations

import dataclasses
import datetime

import numpy as np

from clicklog.derive.columns import derive
from clicklog.errors import SettingsError
from clicklog.spec.columns import CategoricalColumn, DenseColumn
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.spec.reading import Read
from clicklog.spec.times import EPOCHS, parse_iso
from clicklog.synthetic.model import MISSING_COUNT, MISSING_VALUE

NUMBER, TIME, CATEGORY = "number", "time", "category"
#: Numbers of the raw type float are drawn in hundredths, as prices are.
HUNDREDTHS = 100
_DAY = 86_400_000_000
#: The day of the first file, unless the split says another one.
_FIRST_DAY = datetime.datetime(2014, 10, 21, tzinfo=datetime.UTC)
#: How many days before a row a time may be from which an age is counted. ``%y`` begins in 1969.
_OLDEST, _OLDEST_SHORT_YEAR = 36_500, 16_000
_MIX = 0x9E3779B1
#: Number of values of derived columns, but for buckets and crosses.
_SIZES = {"hour": 24, "weekday": 7, "day": 31, "month": 12, "log_square": 60}


@dataclasses.dataclass(frozen=True)
class Source:
    """A column of a file from which features are read.

    Attributes:
        name: its name in the file.
        kind: NUMBER, TIME or CATEGORY.
        reads: how it is read.
        hundredths: whether numbers have two decimals; all columns that read it are floats then.
        column: of a category, the position of the column that holds its values; -1 if only derived
            columns read it. Of others, that of the first column that reads it.
        past: whether ages are counted from it.
        required: whether it is never missing: rows are split by it.
    """

    name: str
    kind: str
    reads: tuple[Read, ...]
    hundredths: bool
    column: int
    past: bool
    required: bool

    @property
    def time_format(self) -> str:
        """The format of times."""
        return next(read.time_format for read in self.reads if read.raw == "time")


def sources_of(spec: FeatureSpec) -> list[Source]:
    """Return the sources of a spec's features, in the order in which columns read them."""
    plan = spec.read_plan(label=True)
    key = None if plan.key is None else plan.reads[plan.key].source
    trained = {plan.reads[index].source for index in plan.labels}
    first: dict[str, int] = {}
    past = set()
    for kind in ("dense", "categorical"):
        for j, column in enumerate(getattr(spec, kind)):
            names = column.reading.sources or (column.name,)
            for name in names:
                first.setdefault(name, j)
            if column.derive is not None and column.derive.kind == "age":
                past.add(names[-1])
    both = sorted(trained & set(first))
    if both:
        raise SettingsError(
            f"column {both[0]} is both a label and a feature",
            "synthetic logs need labels in columns of their own",
        )
    reads = spec.read_plan(label=False).reads
    found = []
    for name, j in first.items():
        own = tuple(read for read in reads if read.source == name)
        raw = {read.raw for read in own}
        kind = TIME if "time" in raw else NUMBER if raw & {"int32", "float"} else CATEGORY
        whole = raw <= {"float", "string"} and "float" in raw
        if kind == CATEGORY:
            direct = (
                c.derive is None and (c.reading.sources or (c.name,)) == (name,)
                for c in spec.categorical
            )
            j = next((place for place, one in enumerate(direct) if one), -1)
        found.append(Source(name, kind, own, whole, j, name in past, name == key))
    return found


def size_of(column: CategoricalColumn, sizes: dict[str, int]) -> int:
    """Return the number of values of a derived column; ``sizes`` are those of the sources."""
    assert column.derive is not None
    if column.derive.kind == "bucket":
        return len(column.derive.boundaries) + 1
    if column.derive.kind == "cross":
        first, second = (sizes.get(name, HUNDREDTHS) for name in column.reading.sources)
        return first * second
    return _SIZES[column.derive.kind]


def day_begin(spec: FeatureSpec, days: int, day: int) -> int:
    """Return the time at which a day begins; the last one is that from which on rows are test."""
    first = int(_FIRST_DAY.timestamp()) * 1_000_000
    if spec.split.test_from:
        first = parse_iso(spec.split.test_from, "test_from") // _DAY * _DAY - (days - 1) * _DAY
    return first + day * _DAY


def times_of(source: Source, uniform: np.ndarray, begin: int, missing: np.ndarray) -> np.ndarray:
    """Draw times of a day, or before it, as exactly as the file's format writes them."""
    return draw_times(uniform, source.time_format, begin, missing, past=source.past)


def draw_times(
    uniform: np.ndarray, time_format: str, begin: int, missing: np.ndarray, *, past: bool = False
) -> np.ndarray:
    """Draw times, int64 [n] of microseconds; ``MISSING_VALUE`` where missing."""
    if past:
        oldest = _OLDEST_SHORT_YEAR if "%y" in time_format else _OLDEST
        times = begin - (oldest * uniform).astype(np.int64) * _DAY
    else:
        times = begin + (uniform * _DAY).astype(np.int64)
    unit = np.datetime64(1, _finest(time_format)).dtype
    times = times.astype("M8[us]").astype(unit).astype("M8[us]").astype(np.int64)
    return np.where(missing, MISSING_VALUE, times)


def _finest(time_format: str) -> str:
    """Return NumPy's unit of the finest part of a time that a format writes."""
    if time_format in EPOCHS:
        return {"epoch_s": "s", "epoch_ms": "ms", "epoch_us": "us"}[time_format]
    parts = {"f": "us", "S": "s", "M": "m", "H": "h", "d": "D", "m": "M"}
    found = [unit for part, unit in parts.items() if f"%{part}" in time_format]
    return (found or ["Y"])[0] if time_format else "s"


def dense_feature(column: DenseColumn, drawn: dict[str, np.ndarray], sources: dict[str, Source]):
    """Return a dense column of what was drawn; floats in hundredths."""
    names = column.reading.sources or (column.name,)
    values = [drawn[name] for name in names]
    if column.derive is not None:
        missing = np.any([value == MISSING_VALUE for value in values], axis=0)
        age = derive(column.derive, values, missing)
        return np.where(missing, MISSING_COUNT, np.rint(age * HUNDREDTHS).astype(np.int64))
    if column.raw == "float" and not sources[names[0]].hundredths:
        return np.where(values[0] == MISSING_COUNT, MISSING_COUNT, values[0] * HUNDREDTHS)
    return values[0]


def categorical_feature(column: CategoricalColumn, drawn: dict, sources: dict[str, Source]):
    """Return the codes of a categorical column of what was drawn."""
    names = column.reading.sources or (column.name,)
    values = [drawn[name] for name in names]
    if column.derive is None and sources[names[0]].kind != NUMBER:
        return values[0]
    absent = [
        value == (MISSING_COUNT if sources[name].kind == NUMBER else MISSING_VALUE)
        for name, value in zip(names, values, strict=True)
    ]
    missing = np.any(absent, axis=0)
    if column.derive is None:
        codes = values[0]
    elif column.derive.kind == "cross":
        codes = (values[0] * _MIX + values[1]) & 0xFFFFFFFF
    else:
        number = sources[names[0]].kind == NUMBER
        factor = HUNDREDTHS if sources[names[0]].hundredths else 1
        given = values[0] / factor if number else values[0]
        codes = derive(column.derive, [given], missing)
    return np.where(missing, MISSING_VALUE, codes)
