"""Which columns are the label, the time, features, or nothing to learn from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.label_choice import choose_labels, label_rule, labels_of_rows
from nvt_torchrec.etl.guess.names import is_called, is_code
from nvt_torchrec.etl.guess.outcomes import find_outcomes, find_time
from nvt_torchrec.etl.guess.sample import SampledFile, spec_name, unique_names
from nvt_torchrec.etl.guess.split_choice import SplitChoice, choose_split, find_split_column
from nvt_torchrec.etl.guess.values import Profile

#: Rows from which on it means something that all values are different.
_ENOUGH_ROWS = 100
#: Named integers up to such a number are quantities.
_LARGE = 1_000_000
#: Integers of so few values may be quantities or classes: they become both, the latter with this
#: behind its name.
_FEW, _ALSO = 20, "_category"
#: In fewer days each weekday is there once or twice, so that it stands for a date.
_WEEKDAYS_FROM = 21
#: Buckets of values that never stop coming.
_BUCKETS = 100_000
#: Microseconds.
_MINUTE, _HOUR, _DAY = 60_000_000, 3_600_000_000, 86_400_000_000
_WORDS = {
    "hex32": "hexadecimal",
    "int": "integers",
    "bigint": "integers of more than 53 bits",
    "bool": "booleans",
}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A column of the spec.

    Attributes:
        name: in the spec.
        kind: "dense", "categorical" or "vector".
        options: the keys of its block, but ``names``.
        why: the comment.
        source: the column of the file.
    """

    name: str
    kind: str
    options: dict[str, Any]
    why: str
    source: str


@dataclasses.dataclass(frozen=True)
class Guess:
    """What becomes of the columns of a file.

    Attributes:
        labels: the keys of each ``[[label]]`` with a comment, the main one first.
        close: the columns of which each could be the main label, that one first; [] without doubt.
        split: how the rows are split.
        time: the column that says when a row happened, if there is one.
        features: the columns of the spec, dense ones first.
        unread: the columns of the file that are not read, each with the reason.
        names: of text without a header, the names of all columns of the file.
    """

    labels: list[tuple[dict[str, Any], str]]
    close: list[str]
    split: SplitChoice
    time: Profile | None
    features: list[Feature]
    unread: dict[str, str]
    names: list[str]


def assign(sample: SampledFile, path: str, label: str = "", *, outcomes: bool = True) -> Guess:
    """Decide what becomes of each column.

    Args:
        sample: the rows.
        path: names the file in errors.
        label: the name of the label's column, or its number from 1 on; "": find it.
        outcomes: whether columns that give the label away are left out, as a log has them; False
            where somebody has chosen the features.

    Raises:
        BadInputError: no column looks like a label, or none is left for features.
    """
    split_index = find_split_column(sample)
    choice = choose_labels(_hide_column(sample, split_index), path, label)
    criteo = _is_criteo(sample, choice.indices[0])
    columns = sample.columns if sample.named else _named(sample.columns, choice.indices[0], criteo)
    label_columns = [columns[j] for j in choice.indices]
    labels, truth = [], {}
    for j, column in zip(choice.indices, label_columns, strict=True):
        name = f", {column.name}" if sample.named else ""
        rule, why = label_rule(column, f"{path}: column {j + 1}{name}")
        truth[rule["name"]] = labels_of_rows(column, rule)
        labels.append((rule, why))
    if choice.possible:
        rule, why = labels[0]
        labels[0] = (rule, f"{why}; also possible: {', '.join(choice.possible)}")
    used = {*choice.indices, split_index}
    rest = {j: column for j, column in enumerate(columns) if j not in used}
    given_away = {}
    if outcomes and not criteo:
        given_away = find_outcomes([*rest.values()], label_columns, truth)
    features: list[Feature] = []
    unread: dict[str, str] = {}
    for j, column in rest.items():
        made: list[Feature] | str
        if criteo:
            count = _feature(column, "dense", {}, "a count")
            hashed = _feature(column, "categorical", {"raw": "hex32"}, "hexadecimal")
            made = [count if j < 14 else hashed]
        else:
            made = given_away.get(column.name) or choose_features(column, sample)
        if isinstance(made, str):
            unread[column.name or f"column {j + 1}"] = made
        else:
            features += made
    if not any(feature.kind == "categorical" for feature in features):
        read = {feature.source for feature in features}
        features = _find_categories([c for c in rest.values() if c.source in read], features, path)
    # as in a spec; the categories of numbers that are dense as well come last
    dense = {feature.name for feature in features if feature.kind == "dense"}
    features.sort(key=lambda f: (f.kind != "dense", f.name.removesuffix(_ALSO) in dense))
    # each has another name, one that a spec can have
    taken = [rule["name"] for rule, _ in labels]
    names = unique_names([*taken, *(spec_name(feature.name) for feature in features)])[len(taken) :]
    features = [
        dataclasses.replace(feature, name=name)
        for feature, name in zip(features, names, strict=True)
    ]
    time = find_time([column for column in rest.values() if column.name not in given_away])
    split_column = None if split_index is None else columns[split_index]
    split = choose_split(sample, split_column, time, label_columns)
    names = [column.name for column in columns]
    return Guess(labels, choice.close, split, time, features, unread, names)


def _hide_column(sample: SampledFile, index: int | None) -> SampledFile:
    """Return the sample in which a column is empty, so that it is taken for nothing."""
    columns = [
        dataclasses.replace(column, kind="empty") if j == index else column
        for j, column in enumerate(sample.columns)
    ]
    return dataclasses.replace(sample, columns=columns)


def _is_criteo(sample: SampledFile, label: int) -> bool:
    """Whether the columns are those of Criteo's logs: then all 13 counts are dense."""
    kinds = [column.kind for column in sample.columns]
    return (
        not sample.named
        and not sample.input.get("format")
        and (label, len(kinds)) == (0, 40)
        and set(kinds[1:14]) <= {"int", "empty"}
        and kinds[14:].count("hex32") >= 13
    )


def _named(columns: list[Profile], label: int, criteo: bool) -> list[Profile]:
    """Give names to the columns of a file without a header."""
    seen: Counter[str] = Counter()
    result = []
    for j, column in enumerate(columns):
        kind = column.kind if column.kind in ("int", "float", "time", "empty") else "cat"
        if criteo:
            kind = "int" if j < 14 else "cat"
        elif column.multi_hot or (kind == "int" and _way(column, named=False) == "id"):
            kind = "cat"
        name = "label" if j == label else f"{kind}_{seen[kind]}"
        seen[kind] += j != label
        result.append(dataclasses.replace(column, name=name))
    return result


def choose_features(column: Profile, sample: SampledFile) -> list[Feature] | str:
    """Return what becomes of a column, or the reason why nothing does."""
    if not column.name:
        return "it has no name"
    if column.kind == "empty":
        return column.unread or "no values in the rows that were read"
    if column.kind == "time":
        return _derive_times(column, sample)
    if _names_rows(column):
        return "all values are distinct, so nothing can be learned from them"
    if column.distinct == 1 and column.rows > 1 and not column.missing:
        return f"always {next(iter(column.counts))!r:.40}"
    way = _way(column, named=sample.named)
    if way == "both":
        category = dataclasses.replace(_categorical(column), name=f"{column.name}{_ALSO}")
        return [_dense(column), category]
    return [_dense(column) if way == "number" else _categorical(column)]


def _names_rows(column: Profile) -> bool:
    """Whether a column has another value in each row, and is no quantity."""
    if column.present < _ENOUGH_ROWS or column.distinct < column.present:
        return False
    if column.multi_hot or column.kind == "float":
        return False
    if column.kind != "int" or is_code(column.name):
        return True
    return bool(np.all(np.diff(column.numbers) > 0))


def _way(column: Profile, *, named: bool) -> str:
    """Return whether values are each an "id", a "number" or, in doubt, "both".

    Counts and amounts are mostly small for their range; ids are spread evenly over it.
    """
    if column.declared in ("token", "token_seq"):
        return "id"
    if column.kind == "float" or column.declared == "float":
        return "number"
    if column.kind != "int" or column.multi_hot or (named and is_code(column.name)):
        return "id"
    if not column.fits("int32") or column.distinct <= 2:
        return "id"
    if column.distinct <= _FEW and column.present >= 1000:
        return "both"
    positive = np.sort(column.numbers[column.numbers >= 0])
    if not len(positive) or np.mean(positive % 10 == 0) > 0.5:
        return "number"
    if positive[len(positive) // 2] <= 0.2 * positive[-1]:
        return "number"
    if named:
        return "id" if positive[-1] >= _LARGE else "number"
    if column.distinct > 100:
        return "id"
    return "both" if positive[0] <= 1 and column.often >= 1.5 else "number"


def _feature(
    column: Profile, kind: str, options: dict[str, Any], why: str, name: str = ""
) -> Feature:
    why += f", {column.distinct:,} distinct" if column.distinct != 1 else ", one value"
    if column.missing:
        why += f", {column.missing / column.rows:.1%} missing"
    return Feature(name or column.name, kind, options, why, column.source)


def _dense(column: Profile) -> Feature:
    whole = column.kind == "int" and not column.floating and column.fits("int32")
    options: dict[str, Any] = {} if whole else {"raw": "float"}
    options |= column.reading
    minimum, maximum = column.numbers.min(), column.numbers.max()
    if minimum < -2 or maximum <= 1:  # a logarithm would flatten them
        options["transform"] = "normalize"
    return _feature(column, "dense", options, f"numbers from {minimum:g} to {maximum:g}")


def _categorical(column: Profile) -> Feature:
    raw, kind = column.kind, _WORDS.get(column.kind, "texts")
    options: dict[str, Any] = {"raw": raw, **column.reading}
    if raw in ("bigint", "string"):
        kept = {key: value for key, value in column.reading.items() if key in ("nulls", "trim")}
        options = {"raw": "string", **kept}
    if column.multi_hot:
        options["multi_hot"] = True
        kind = f"lists of {kind}"
    elif column.present >= _ENOUGH_ROWS:
        if column.often < 1 / 0.9:
            options["hash_buckets"] = _BUCKETS
            kind += ", most occur only once: hashed"
        elif column.often < 1 / 0.4:
            options["freq_threshold"] = 2
            kind += ", many occur only once"
    return _feature(column, "categorical", options, kind)


def _derive_times(column: Profile, sample: SampledFile) -> list[Feature] | str:
    """Return hour and weekday of a time; of a date the weekday; of a birth the age."""
    options: dict[str, Any] = {"time_format": column.time_format} if column.time_format else {}
    options |= column.reading
    times = column.numbers
    first, last = times.min(), times.max()
    dates = np.array([first, last]).astype("M8[us]").astype("M8[D]")
    why = f"times from {dates[0]} to {dates[1]}"
    if is_called(column.name, "birth"):
        age = {"raw": "float", "derive": "age", "reference": str(dates[1]), **options}
        return [_feature(column, "dense", age, why, f"{column.name}_age")]
    values = {"hour": times // _HOUR % 24, "weekday": times // _DAY % 7}
    if max((last - first) // _DAY, sample.day_files) < _WEEKDAYS_FROM:
        values.pop("weekday")
        why += "; no weekday, because they span less than three weeks"
    if not np.any(times % _DAY // _MINUTE):
        values.pop("hour")
    if sample.whole and not sample.days:
        values = {kind: seen for kind, seen in values.items() if np.ptp(seen)}
    names = {kind: f"{column.name}_{kind}" for kind in values} | {column.name: "hour_of_day"}
    return [
        _feature(column, "categorical", {"derive": kind, **options}, why, names[kind])
        for kind in values
    ] or f"{why}, and always the same hour"


def _find_categories(columns: list[Profile], dense: list[Feature], path: str) -> list[Feature]:
    """Return features with at least one category, given columns and their features, all dense.

    Where no name tells an id, as in a log of ``u``, ``i`` and ``r``, the values do, as in a file
    without a header; else the quarter in which a number is becomes a category.
    """
    ids = [c for c in columns if c.kind == "int" and _way(c, named=False) == "id"]
    if ids:
        known = {column.source for column in ids}
        return [f for f in dense if f.source not in known] + [_categorical(c) for c in ids]
    column = next((each for each in columns if each.is_number and each.distinct > 1), None)
    if column is None:
        raise BadInputError(
            f"{path}: no column can be categorical", "a spec needs at least one: add a column"
        )
    values = column.sorted_numbers()
    quarters = {float(values[len(values) * k // 4]) for k in (1, 2, 3)}
    options = {**column.reading, "derive": "bucket", "boundaries": sorted(quarters)}
    why = f"the quarter in which {column.name} is; at least one column is a category"
    name = f"{column.name}_bucket"
    return [*dense, Feature(name, "categorical", options, why, column.source)]
