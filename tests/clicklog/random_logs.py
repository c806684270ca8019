"""Random specs with all that a spec can say about reading, and texts of logs for them."""

from __future__ import annotations

import dataclasses
import datetime

from hypothesis import strategies as st

from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS, Derivation
from nvt_torchrec.formats.feature_spec.read_plan import LabelRule, Reading
from nvt_torchrec.formats.feature_spec.split import BY_DAYS, Split

TIME_FORMATS = (
    "", "%Y-%m-%d %H:%M:%S", "%y%m%d%H", "%d/%m/%Y", "%b %d, %Y %H:%M",
    "epoch_s", "epoch_ms", "epoch_us",
)  # fmt: skip
_NULLS = ("?", "NA", "\\N", "-1", "null")
#: Of each kind of source: the raw types that its texts suit.
_RAW = {
    "integer": ("int32", "float", "int", "string"),
    "number": ("float", "string"),
    "hex": ("hex32", "string"),
    "word": ("string",),
    "time": ("string",),
    "words": ("string",),
    "integers": ("int",),
    "hexes": ("hex32",),
}
_LISTS = ("words", "integers", "hexes")
_WRONG = """- +1 1_0 0x1 nan inf -Infinity 1e999 3.5e38 e5 1e 1e+ . -. 1.2.3 1.5.0 123456789 + //
a//b 1/ 1/x 2147483648 -2147483649 9007199254740993 99999999999999999999999999999 2014-02-30 ٣ x"""
#: Derivations of one column that become categories, by what they read.
_NUMERIC, OF_TIME = (
    [name for name, kind in DERIVATIONS.items() if (kind.reads, kind.gives) == (reads, "int")]
    for reads in ("float", "time")
)


@dataclasses.dataclass(frozen=True)
class Source:
    """A column of a file.

    Attributes:
        name: its name.
        kind: what its texts are.
        reading: how all columns read it.
        time_format: of times.
    """

    name: str
    kind: str
    reading: Reading
    time_format: str = ""


@dataclasses.dataclass(frozen=True)
class RandomLog:
    """A spec, and what the fields of a line hold.

    Attributes:
        spec: the spec.
        sources: by name, the sources of features.
        names: the names of the fields of a line, "" for those that hold anything.
    """

    spec: FeatureSpec
    sources: dict[str, Source]
    names: list[str]


@st.composite
def random_logs(draw: st.DrawFn, *, formats: tuple[str, ...] = ("csv", "tsv")) -> RandomLog:
    """Specs of up to six sources, each read by up to three columns, or by 70."""
    kinds = draw(st.lists(st.sampled_from(tuple(_RAW)), min_size=1, max_size=6))
    sources = {f"s{i}": draw(_sources(f"s{i}", kind)) for i, kind in enumerate(kinds)}
    dense: list[DenseColumn] = []
    categorical: list[CategoricalColumn] = []
    for source in sources.values():
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            _add(draw, source, sources, dense, categorical)
    if not categorical:
        plain = next(iter(sources.values()))
        categorical.append(CategoricalColumn("c", raw="string", reading=_from(plain)))
    if draw(st.integers(0, 9)) == 0:  # more columns than the bits of a word
        last = categorical[-1]
        categorical += [dataclasses.replace(last, name=f"more_{i}") for i in range(70)]
    rules = draw(_labels(sources))
    used = [name for name in sources if any(name in _sources_of(c) for c in (*dense, *categorical))]
    names = [*used, *dict.fromkeys(rule.column for rule in rules if rule.column not in sources)]
    weight = "weight" if draw(st.booleans()) else ""
    split = draw(_splits({name: sources[name] for name in used}))
    names += [weight] * bool(weight) + [split.column] * (split.column not in ("", *names))
    names += draw(st.lists(st.just(""), max_size=2))
    names = draw(st.permutations(names))
    kind = draw(st.sampled_from(formats))
    header = draw(st.booleans()) and "" not in names
    options = {}
    if kind == "csv":
        options["delimiter"] = draw(st.sampled_from([",", ";", "::", " | "]))
        options["list_separator"] = "/"
    if kind != "parquet" and options.get("delimiter") != ",":
        options["decimal"] = draw(st.sampled_from([".", ","]))
    text = kind != "parquet"
    return RandomLog(
        FeatureSpec(
            rules[0].name,
            tuple(dense),
            tuple(categorical),
            input=InputFormat(
                kind,
                header=header if text else None,
                columns=tuple(names) if text and not header else (),
                **options,
            ),
            label_rules=tuple(rules),
            weight=weight,
            split=split,
        ),
        {name: sources[name] for name in used},
        names,
    )


@st.composite
def _sources(draw: st.DrawFn, name: str, kind: str) -> Source:
    numeric = kind in ("integer", "number")
    reading = Reading(
        nulls=tuple(draw(st.lists(st.sampled_from(_NULLS), max_size=2, unique=True))),
        trim=draw(st.booleans()),
        lenient=numeric and draw(st.booleans()),
    )
    return Source(name, kind, reading, draw(st.sampled_from(TIME_FORMATS)))


def _from(*sources: Source) -> Reading:
    return dataclasses.replace(sources[0].reading, sources=tuple(item.name for item in sources))


def _sources_of(column: DenseColumn | CategoricalColumn) -> tuple[str, ...]:
    return column.reading.sources or (column.name,)


def _add(
    draw: st.DrawFn,
    source: Source,
    sources: dict[str, Source],
    dense: list[DenseColumn],
    categorical: list[CategoricalColumn],
) -> None:
    """Add a column that reads a source to the dense or the categorical ones."""
    name = f"f{len(dense) + len(categorical)}"
    plain = _from(source)
    raw = draw(st.sampled_from(_RAW[source.kind]))
    derived = draw(st.booleans())
    if derived and source.kind == "time":
        kind = draw(st.sampled_from((*OF_TIME, "age")))
        if kind == "age":
            others = [item for item in sources.values() if item.kind == "time"]
            others = [item for item in others if item.time_format == source.time_format]
            pair = draw(st.booleans())
            other = draw(st.sampled_from(others))
            how = Derivation("age", source.time_format, "" if pair else "2014-10-30")
            reading = _from(source, other) if pair else plain
            dense.append(DenseColumn(name, raw="float", reading=reading, derive=how))
            return
        how = Derivation(kind, source.time_format)
        categorical.append(CategoricalColumn(name, raw="int", reading=plain, derive=how))
    elif derived and source.kind in ("integer", "number"):
        kind = draw(st.sampled_from(_NUMERIC))
        how = Derivation(kind, boundaries=(-2.5, 0, 2, 40) if kind == "bucket" else ())
        categorical.append(CategoricalColumn(name, raw="int", reading=plain, derive=how))
    elif derived and source.kind not in _LISTS:
        others = [item for item in sources.values() if item.kind not in _LISTS]
        other = draw(st.sampled_from(others))
        reading = _from(source, other)
        how = Derivation("cross")
        categorical.append(CategoricalColumn(name, raw="string", reading=reading, derive=how))
    elif raw in ("int32", "float"):
        dense.append(DenseColumn(name, raw=raw, reading=plain))
    else:
        lists = source.kind in _LISTS
        categorical.append(CategoricalColumn(name, raw=raw, reading=plain, multi_hot=lists))


@st.composite
def _labels(draw: st.DrawFn, sources: dict[str, Source]) -> list[LabelRule]:
    plain = [
        LabelRule("label"),
        LabelRule("label", "income", positive=(">50K", ">50K."), trim=draw(st.booleans())),
        LabelRule("label", "income", positive=(">50K",), negative=("<=50K",), trim=True),
        LabelRule("label", "rating", threshold=3.5),
    ]
    rules = [draw(st.sampled_from(plain))]
    if draw(st.booleans()):
        rules.append(LabelRule("second", "rating", threshold=5))
    return rules


@st.composite
def _splits(draw: st.DrawFn, sources: dict[str, Source]) -> Split:
    by = draw(st.sampled_from(["days", "column", "time"]))
    if by == "days":
        return BY_DAYS
    shares = {"valid": 0.1, "test": 0.2}
    column = draw(st.sampled_from(["key", *sources]))
    if by == "column":
        return Split("column", column=column, **shares)
    time = column in sources and sources[column].kind == "time"
    time_format = sources[column].time_format if time else "epoch_s"
    return Split("time", column=column if time else "key", time_format=time_format, **shares)


@st.composite
def random_rows(draw: st.DrawFn, log: RandomLog, *, maximum: int = 12) -> list[list[str]]:
    """Rows of fields in the order of ``log.names``; some of them are malformed."""
    fields = st.tuples(*(_field(name, log) for name in log.names)).map(list)
    rows = draw(st.lists(fields, max_size=maximum))
    for row in rows:
        if draw(st.integers(0, 9)) == 0:
            at = draw(st.integers(0, len(row) - 1))
            row[at] = draw(st.sampled_from(["x y", " 1", "1 ", *_WRONG.split()]))
    return rows


def _field(name: str, log: RandomLog) -> st.SearchStrategy[str]:
    if name in log.sources:
        source = log.sources[name]
        plain = source.reading
        texts = [st.just("")] if name != log.spec.split.column else []
        texts += [st.sampled_from(plain.nulls)] if plain.nulls else []
        values = _texts(source)
        if source.kind == "number":
            values = values.map(lambda text: text.replace(".", log.spec.input.decimal))
        field = st.one_of(*texts, *[values] * 4)
        return st.one_of(field, field.map(lambda text: f" {text}\t")) if plain.trim else field
    numbers = {
        "rating": st.integers(1, 10).map(lambda half: str(half / 2)),
        "weight": st.sampled_from(["1", "0.25", "3e2", " 7", "0", "1.1"]),
    }
    if name in numbers:
        return numbers[name].map(lambda text: text.replace(".", log.spec.input.decimal))
    return {
        "": st.sampled_from(["", "anything", "1"]),
        "label": st.sampled_from(["0", "1", "1.0"]),
        "income": st.sampled_from([">50K", ">50K.", "<=50K", " >50K", "other"]),
        "key": st.integers(0, 2_000_000_000).map(str),
    }[name]


def _texts(source: Source) -> st.SearchStrategy[str]:
    if source.kind == "time":
        return st.integers(-(10**9), 2 * 10**9).map(lambda s: time_text(s, source.time_format))
    if source.kind in _LISTS:
        items = {
            "words": st.sampled_from(["a", "b", "é", "NA"]),
            "integers": st.integers(-(2**53), 2**53).map(str),
            "hexes": st.integers(0, 2**32 - 1).map("{:x}".format),
        }[source.kind]
        return st.lists(items, min_size=1, max_size=3).map("/".join)
    if source.kind in ("integer", "number"):
        texts = [st.integers(-5, 60).map(str), st.integers(-(2**31), 2**31 - 1).map(str)]
        if source.kind == "number":
            texts.append(st.floats(-1e6, 1e6).map(repr))
            texts.append(st.sampled_from(["1.", ".5", "-0", "0.1E-3", "00012.50", "1e-400"]))
        if source.reading.lenient:
            texts += [st.integers(0, 99).map("+{}".format), st.integers(-9, 99).map("{}.0".format)]
        return st.one_of(*texts)
    if source.kind == "hex":
        return st.integers(0, 2**32 - 1).map("{:x}".format)
    text = st.characters(codec="utf-8", exclude_characters='\n\r"/\t')
    return st.sampled_from(["a", "b", "été", "日本", "A b", "0", "x"]) | st.text(text, min_size=1)


def time_text(seconds: int, time_format: str) -> str:
    """A time as a log writes it; seconds since 1970 UTC, also before."""
    if time_format.startswith("epoch"):
        return str(seconds * {"epoch_s": 1, "epoch_ms": 1000, "epoch_us": 10**6}[time_format])
    time = datetime.datetime(1970, 1, 1) + datetime.timedelta(seconds=seconds)
    return time.strftime(time_format) if time_format else time.isoformat(" ")
