"""Write synthetic rows of specs that say how columns are read: rules, labels, derived columns.

Each rule of the spec is used by some of the values that it allows: null texts, spaces, ``+5`` and
``260.0``, grouped digits, line breaks in quotes. They change no value. Rows are formatted one value
at a time, which is slower than :mod:`clicklog.synthetic.write` for plain specs.
"""

from __future__ import annotations

import datetime
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from clicklog.spec.columns import CategoricalColumn
from clicklog.spec.feature_spec import FeatureSpec
from clicklog.spec.labels import LabelRule
from clicklog.spec.reading import Read
from clicklog.spec.times import EPOCHS, ISO, time_text
from clicklog.synthetic.any_spec import ItemLists, SpecRows
from clicklog.synthetic.model import MISSING_COUNT, MISSING_VALUE, zipf_ranks
from clicklog.synthetic.sources import (
    HUNDREDTHS,
    NUMBER,
    TIME,
    Source,
    day_begin,
    draw_times,
    sources_of,
)

_EPOCH = datetime.datetime(1970, 1, 1)
#: Keys by which rows are split and that are no features.
_KEYS = 1000
_NEGATIVE = "no"

Values = list[Any]


def prefix_of(column: CategoricalColumn) -> str:
    """Return what the strings of a vocabulary begin with; 8 hexadecimal digits follow."""
    return re.sub("[^0-9A-Za-z]", "", column.vocabulary_name)


def format_rows_of_sources(rows: SpecRows, spec: FeatureSpec, days: int) -> bytes:
    """Format the rows as text in the spec's encoding, each with its line break."""
    columns = source_values(rows, spec, days, text=True)
    unread = [f"x{i}" for i in range(len(rows))]
    fields = [columns.get(name, unread) for name in spec.file_columns(label=True)]
    quote = quoter(spec)
    delimiter = spec.input.delimiter
    lines = (delimiter.join(map(quote, row)) for row in zip(*fields, strict=True))
    return "".join(f"{line}\n" for line in lines).encode(spec.input.encoding)


def first_lines(spec: FeatureSpec) -> bytes:
    """Return the lines before the first row."""
    head = [f"synthetic log, line {i + 1}" for i in range(spec.input.skip_lines)]
    if spec.input.header:
        names = spec.file_columns(label=True)
        head.append(spec.input.delimiter.join(map(quoter(spec), names)))
    return "".join(f"{line}\n" for line in head).encode(spec.input.encoding)


def quoter(spec: FeatureSpec) -> Callable[[str], str]:
    """Return a function that quotes a field if it must be."""
    if spec.input.format != "csv":
        return str
    special = {spec.input.delimiter[0], '"', "\n"}

    def quote(text: str) -> str:
        if special.isdisjoint(text):
            return text
        return '"' + text.replace('"', '""') + '"'

    return quote


def table_of_sources(rows: SpecRows, spec: FeatureSpec, days: int) -> pa.Table:
    """Return the rows as typed columns, for parquet."""
    columns = source_values(rows, spec, days, text=False)
    types = _types(spec)
    return pa.table({name: pa.array(columns[name], types[name]) for name in columns})


def source_values(rows: SpecRows, spec: FeatureSpec, days: int, *, text: bool) -> dict[str, Values]:
    """Return the columns that are read, by name: fields of text, or values with None."""
    plan = spec.read_plan(label=True)
    found: dict[str, Values] = {}
    for source in sources_of(spec):
        values = _values(rows.sources[source.name], source, spec, text=text)
        found[source.name] = _as_fields(values, source, spec) if text else values
    labels = [rows.label, *(rows.further[name] for name in spec.labels[1:])]
    for rule, label in zip(spec.label_rules or (LabelRule(spec.label),), labels, strict=True):
        if rule.column not in found:  # labels of one column follow from the first of them
            values = _label_values(rule, label.tolist(), spec.input.decimal if text else "")
            found[rule.column] = _spaced(values) if text and rule.trim else values
    if spec.weight and spec.weight not in found:
        weights = [
            0.5 + round(draw * HUNDREDTHS) / HUNDREDTHS for draw in rows.further[spec.weight]
        ]
        point = spec.input.decimal
        texts = [f"{weight:.2f}".replace(".", point) for weight in weights] if text else []
        found[spec.weight] = texts if text else weights
    if plan.key is not None and plan.reads[plan.key].source not in found:
        name = plan.reads[plan.key].source
        found[name] = _key_values(rows, plan.reads[plan.key], spec, days, text=text)
    return found


def _types(spec: FeatureSpec) -> dict[str, pa.DataType]:
    """Return the types of the columns of parquet."""
    types: dict[str, pa.DataType] = {}
    for source in sources_of(spec):
        if source.kind == TIME:
            types[source.name] = _time_type(source.time_format)
        elif source.kind == NUMBER:
            types[source.name] = pa.float64() if source.hundredths else pa.int64()
        else:
            one = _category_type(source, spec)
            types[source.name] = pa.list_(one) if source.reads[0].multi_hot else one
    for rule in spec.label_rules or (LabelRule(spec.label),):
        own = pa.string() if rule.positive else pa.float64()
        types[rule.column] = own if rule.positive or rule.threshold is not None else pa.int8()
    for read in spec.read_plan(label=True).reads:
        if read.source not in types:
            other = pa.float64() if read.raw == "weight" else pa.string()
            own = _time_type(read.time_format) if read.raw == "time" else other
            types[read.source] = own
    return types


def _time_type(time_format: str) -> pa.DataType:
    if time_format == ISO:
        return pa.timestamp("us")
    return pa.int64() if time_format in EPOCHS else pa.string()


def _category_type(source: Source, spec: FeatureSpec) -> pa.DataType:
    raw = spec.categorical[source.column].raw if source.column >= 0 else "string"
    return {"int": pa.int64(), "hex32": pa.uint32(), "string": pa.string()}[raw]


def _values(drawn: Any, source: Source, spec: FeatureSpec, *, text: bool) -> Values:
    """Return what was drawn for a source; None where it is missing."""
    if source.kind == TIME:
        return [
            None if time == MISSING_VALUE else _time(time, source.time_format, text=text)
            for time in drawn.tolist()
        ]
    if source.kind == NUMBER:
        factor = HUNDREDTHS if source.hundredths else 1
        return [
            None if number == MISSING_COUNT else number / factor if factor > 1 else number
            for number in drawn.tolist()
        ]
    show = _category(source, spec, text=text)
    if isinstance(drawn, ItemLists):
        items = list(map(show, drawn.codes.tolist()))
        ends = drawn.offsets.tolist()
        lists = [items[a:b] or None for a, b in itertools.pairwise(ends)]
        separator = spec.input.list_separator
        return [one and separator.join(map(str, one)) for one in lists] if text else lists
    return [None if code == MISSING_VALUE else show(code) for code in drawn.tolist()]


def _category(source: Source, spec: FeatureSpec, *, text: bool) -> Callable[[int], Any]:
    column = spec.categorical[source.column] if source.column >= 0 else None
    raw = column.raw if column else "string"
    if raw == "int":
        return int
    if raw == "hex32":
        return "{:08x}".format if text else int
    prefix = prefix_of(column) if column else source.name
    if spec.input.encoding == "latin-1":
        prefix += "é"
    if spec.input.quoted_newlines and text:
        return lambda code: f"{prefix}{chr(10) if code % 16 == 0 else ''}{code:08x}"
    return lambda code: f"{prefix}{code:08x}"


def _time(time: int, time_format: str, *, text: bool) -> Any:
    if time_format in EPOCHS:
        number = time // EPOCHS[time_format]
        return str(number) if text else number
    if time_format != ISO:
        return time_text(time, time_format)
    moment = _EPOCH + datetime.timedelta(microseconds=time)
    return moment.isoformat(" ") if text else moment


def _as_fields(values: Values, source: Source, spec: FeatureSpec) -> list[str]:
    """Write values as fields, in all the forms that the rules of every column allow."""
    reads = source.reads
    nulls = [text for text in reads[0].nulls if all(text in read.nulls for read in reads)]
    empty = ["", *nulls]
    missing = [empty[i % len(empty)] for i in range(len(values))]
    fields = list(map(_written(source), values, range(len(values))))
    fields = [null if field is None else field for null, field in zip(missing, fields, strict=True)]
    return _spaced(fields) if all(read.trim for read in reads) else fields


def _written(source: Source) -> Callable[[Any, int], str | None]:
    numeric = source.kind == NUMBER and all(read.raw != "string" for read in source.reads)
    lenient = numeric and _all(source.reads, "lenient")
    separator = source.reads[0].thousands if numeric and _all(source.reads, "thousands") else ""
    point = "," if any(read.decimal == "," for read in source.reads) else "."

    def write(value: Any, row: int) -> str | None:
        if value is None or source.kind != NUMBER:
            return value if value is None else str(value)
        text = f"{value:.2f}".replace(".", point) if source.hundredths else str(value)
        if separator and row % 2 and value >= 1000:
            grouped = f"{value:,.2f}" if source.hundredths else f"{value:,}"
            return grouped.translate({ord(","): separator, ord("."): point})
        if lenient and row % 5 == 0:
            return f"+{text}"
        return f"{value}{point}0" if lenient and row % 5 == 1 and not source.hundredths else text

    return write


def _all(reads: Sequence[Read], rule: str) -> bool:
    return len({getattr(read, rule) for read in reads}) == 1 and bool(getattr(reads[0], rule))


def _spaced(fields: list[str]) -> list[str]:
    return [f" {field}" if i % 3 == 0 else field for i, field in enumerate(fields)]


def _label_values(rule: LabelRule, labels: list[int], point: str) -> Values:
    """Return what a rule reads as labels: texts with a decimal point, or values if it is ""."""
    if rule.positive:
        others = rule.negative or (_NEGATIVE,)
        return [
            rule.positive[i % len(rule.positive)] if label else others[i % len(others)]
            for i, label in enumerate(labels)
        ]
    if rule.threshold is None:
        return list(map(str, labels)) if point else labels
    least = float(rule.threshold)
    numbers = [
        least + (i % 2) / 2 if label else least - (1 + i % 2) / 2 for i, label in enumerate(labels)
    ]
    return [f"{number:g}".replace(".", point) for number in numbers] if point else numbers


def _key_values(rows: SpecRows, read: Read, spec: FeatureSpec, days: int, *, text: bool) -> Values:
    """Return what only the split reads: times of the day, or one of some keys."""
    uniform = rows.further[read.source]
    if read.raw != "time":
        return [f"k{rank}" for rank in zipf_ranks(uniform, _KEYS).tolist()]
    never = np.zeros(len(uniform), bool)
    times = draw_times(uniform, read.time_format, day_begin(spec, days, rows.day), never)
    return [_time(time, read.time_format, text=text) for time in times.tolist()]
