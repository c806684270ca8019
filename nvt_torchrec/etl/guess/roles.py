"""Which columns are the label, the time, features, or nothing to learn from."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.label_choice import choose_labels, label_rule, read_labels
from nvt_torchrec.etl.guess.names import is_called, is_code
from nvt_torchrec.etl.guess.outcomes import find_outcomes, find_time
from nvt_torchrec.etl.guess.sample import SampledFile, spec_name, unique_names
from nvt_torchrec.etl.guess.split_choice import SplitChoice, choose_split, find_split_column
from nvt_torchrec.etl.guess.values import Profile

#: Rows from which on it means something that all values are different.
_ENOUGH_ROWS = 100
#: Named integers up to such a number are quantities.
_LARGE = 1_000_000
#: Integers of so few values may be quantities or classes: they become both.
_MAX_CLASSES = 20
#: What stands behind the name of a number's category.
_ALSO = "_category"
#: In fewer days each weekday is there once or twice, so that it stands for a date.
_MIN_WEEKDAY_DAYS = 21
#: Buckets of values that never stop coming.
_BUCKETS = 100_000
#: Microseconds of a minute.
_MINUTE = 60_000_000
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR
#: The name of what is derived of a time, where the time's own column is called like it.
_NAMES_IN_FULL = {"hour": "hour_of_day", "weekday": "day_of_week"}
#: Criteo's logs have the label, so many counts and 26 categories.
_CRITEO_COUNTS = 13
#: What values of a kind are called in comments.
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
        name: The name in the spec.
        kind: "dense", "categorical" or "vector".
        options: The keys of its block, but ``names``.
        why: The comment.
        source: The column of the file.
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
        labels: The keys of each ``[[label]]`` with a comment, the main one first.
        close: The columns of which each could be the main label, that one first; [] without doubt.
        split: How the rows are split.
        time: The column that says when a row happened, if there is one.
        features: The columns of the spec, dense ones first.
        unread: The columns of the file that are not read, each with the reason.
        names: Of text without a header, the names of all columns of the file.
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
        sample: The rows.
        path: Names the file in errors.
        label: The name of the label's column, or its number from 1 on; "": find it.
        outcomes: Whether columns that give the label away are left out, as a log has them; False
            where somebody has chosen the features.

    Raises:
        BadInputError: No column looks like a label, or none is left for features.
    """
    split_index = find_split_column(sample)
    choice = choose_labels(_hide_column(sample, split_index), path, label)
    criteo = _is_criteo(sample, choice.indices[0])
    columns = (
        sample.columns if sample.named else _name_columns(sample.columns, choice.indices[0], criteo)
    )
    label_columns = [columns[j] for j in choice.indices]
    labels, truth = [], {}
    for j, column in zip(choice.indices, label_columns, strict=True):
        name = f", {column.name}" if sample.named else ""
        rule, why = label_rule(column, f"{path}: column {j + 1}{name}")
        truth[rule["name"]] = read_labels(column, rule)
        labels.append((rule, why))
    if choice.possible:
        rule, why = labels[0]
        labels[0] = (rule, f"{why}; also possible: {', '.join(choice.possible)}")
    used = {*choice.indices, split_index}
    rest = {j: column for j, column in enumerate(columns) if j not in used}
    given_away = {}
    if outcomes and not criteo:
        given_away = find_outcomes(list(rest.values()), label_columns, truth)
    features: list[Feature] = []
    unread: dict[str, str] = {}
    for j, column in rest.items():
        made: list[Feature] | str
        if criteo:
            made = [_make_criteo_feature(column, j)]
        elif column.name in given_away:
            made = given_away[column.name]
        else:
            made = choose_features(column, sample)
        if isinstance(made, str):
            unread[column.name or f"column {j + 1}"] = made
        else:
            features += made
    if not any(feature.kind == "categorical" for feature in features):
        sources = {feature.source for feature in features}
        read = [column for column in rest.values() if column.source in sources]
        features = _find_categories(read, features, path)
    # Dense ones first, as in a spec; the categories of numbers that are dense as well come last.
    dense = {feature.name for feature in features if feature.kind == "dense"}
    features.sort(key=lambda f: (f.kind != "dense", f.name.removesuffix(_ALSO) in dense))
    features = rename_features(features, [rule["name"] for rule, _ in labels])
    time = find_time([column for column in rest.values() if column.name not in given_away])
    split_column = None if split_index is None else columns[split_index]
    split = choose_split(sample, split_column, time, label_columns)
    names = [column.name for column in columns]
    return Guess(labels, choice.close, split, time, features, unread, names)


def rename_features(features: list[Feature], taken: list[str]) -> list[Feature]:
    """Return features with names that a spec can have, each another one.

    Args:
        features: The features.
        taken: Names that other columns have, all of them different.
    """
    names = unique_names([*taken, *(spec_name(feature.name) for feature in features)])
    renamed = []
    for feature, name in zip(features, names[len(taken) :], strict=True):
        renamed.append(dataclasses.replace(feature, name=name))
    return renamed


def _hide_column(sample: SampledFile, index: int | None) -> SampledFile:
    """Return the sample in which a column is empty, so that it is taken for nothing."""
    columns = list(sample.columns)
    if index is not None:
        columns[index] = dataclasses.replace(columns[index], kind="empty")
    return dataclasses.replace(sample, columns=columns)


def _is_criteo(sample: SampledFile, label: int) -> bool:
    """Return whether the columns are those of Criteo's logs: then all 13 counts are dense."""
    kinds = [column.kind for column in sample.columns]
    first_category = 1 + _CRITEO_COUNTS
    return (
        not sample.named
        and not sample.input.get("format")
        and (label, len(kinds)) == (0, 40)
        and set(kinds[1:first_category]) <= {"int", "empty"}
        and kinds[first_category:].count("hex32") >= 13
    )


def _make_criteo_feature(column: Profile, index: int) -> Feature:
    if index <= _CRITEO_COUNTS:
        return _make_feature(column, "dense", {}, "a count")
    return _make_feature(column, "categorical", {"raw": "hex32"}, "hexadecimal")


def _name_columns(columns: list[Profile], label: int, criteo: bool) -> list[Profile]:
    """Give names to the columns of a file without a header."""
    seen: Counter[str] = Counter()
    named = []
    for j, column in enumerate(columns):
        if j == label:
            named.append(dataclasses.replace(column, name="label"))
            continue
        kind = column.kind if column.kind in ("int", "float", "time", "empty") else "cat"
        if criteo:
            kind = "int" if j <= _CRITEO_COUNTS else "cat"
        elif column.multi_hot or (kind == "int" and _choose_way(column, named=False) == "id"):
            kind = "cat"
        named.append(dataclasses.replace(column, name=f"{kind}_{seen[kind]}"))
        seen[kind] += 1
    return named


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
    way = _choose_way(column, named=sample.named)
    if way == "both":
        category = dataclasses.replace(_make_categorical(column), name=f"{column.name}{_ALSO}")
        return [_make_dense(column), category]
    return [_make_dense(column) if way == "number" else _make_categorical(column)]


def _names_rows(column: Profile) -> bool:
    """Return whether a column has another value in each row, and is no quantity."""
    if column.present < _ENOUGH_ROWS or column.distinct < column.present:
        return False
    if column.multi_hot or column.kind == "float":
        return False
    if column.kind != "int" or is_code(column.name):
        return True
    return bool(np.all(np.diff(column.numbers) > 0))


def _choose_way(column: Profile, *, named: bool) -> str:
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
    if column.distinct <= _MAX_CLASSES and column.present >= 1000:
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


def _make_feature(
    column: Profile, kind: str, options: dict[str, Any], why: str, name: str = ""
) -> Feature:
    why += f", {column.distinct:,} distinct" if column.distinct != 1 else ", one value"
    if column.missing:
        why += f", {column.missing / column.rows:.1%} missing"
    return Feature(name or column.name, kind, options, why, column.source)


def _make_dense(column: Profile) -> Feature:
    whole = column.kind == "int" and not column.floating and column.fits("int32")
    options: dict[str, Any] = {} if whole else {"raw": "float"}
    options |= column.reading
    minimum, maximum = column.numbers.min(), column.numbers.max()
    if minimum < -2 or maximum <= 1:  # a logarithm would flatten them
        options["transform"] = "normalize"
    return _make_feature(column, "dense", options, f"numbers from {minimum:g} to {maximum:g}")


def _make_categorical(column: Profile) -> Feature:
    raw = column.kind
    kind = _WORDS.get(raw, "texts")
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
    return _make_feature(column, "categorical", options, kind)


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
        return [_make_feature(column, "dense", age, why, f"{column.name}_age")]
    values = {"hour": times // _HOUR % 24, "weekday": times // _DAY % 7}
    if max((last - first) // _DAY, sample.day_files) < _MIN_WEEKDAY_DAYS:
        values.pop("weekday")
        why += "; no weekday, because they span less than three weeks"
    if not np.any(times % _DAY // _MINUTE):
        values.pop("hour")
    features = []
    for kind, derived in values.items():
        # Of a log that goes on, further rows may have other hours and weekdays.
        if sample.whole and not sample.days and not np.ptp(derived):
            continue
        name = f"{column.name}_{kind}"
        if kind == column.name:  # as in Avazu's column "hour", which is a time
            name = _NAMES_IN_FULL[kind]
        keys = {"derive": kind, **options}
        features.append(_make_feature(column, "categorical", keys, why, name))
    return features or f"{why}, and always the same hour"


def _find_categories(columns: list[Profile], dense: list[Feature], path: str) -> list[Feature]:
    """Return features with at least one category, given columns and their features, all dense.

    Where no name tells an id, as in a log of ``u``, ``i`` and ``r``, the values do, as in a file
    without a header; else the quarter in which a number is becomes a category.
    """
    ids = []
    for column in columns:
        if column.kind == "int" and _choose_way(column, named=False) == "id":
            ids.append(column)
    if ids:
        id_sources = {column.source for column in ids}
        kept = [feature for feature in dense if feature.source not in id_sources]
        return kept + [_make_categorical(column) for column in ids]
    numbers = [column for column in columns if column.is_number and column.distinct > 1]
    if not numbers:
        raise BadInputError(
            f"{path}: no column can be categorical", "a spec needs at least one: add a column"
        )
    column = numbers[0]
    values = column.sorted_numbers()
    quarters = {float(values[len(values) * k // 4]) for k in (1, 2, 3)}
    options = {**column.reading, "derive": "bucket", "boundaries": sorted(quarters)}
    why = f"the quarter in which {column.name} is; at least one column is a category"
    name = f"{column.name}_bucket"
    return [*dense, Feature(name, "categorical", options, why, column.source)]
