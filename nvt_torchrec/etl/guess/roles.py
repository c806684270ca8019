"""Assign roles to the columns of a log: labels, time, features, or unread."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.label_choice import choose_labels, make_label_rule, read_labels
from nvt_torchrec.etl.guess.names import is_called, is_code
from nvt_torchrec.etl.guess.outcomes import find_outcomes, find_time
from nvt_torchrec.etl.guess.sample import SampledFile, make_spec_name, make_unique
from nvt_torchrec.etl.guess.split_choice import SplitChoice, choose_split, find_split_column
from nvt_torchrec.etl.guess.values import Profile

#: Minimum number of values to draw conclusions from how many of them are distinct.
_ENOUGH_ROWS = 100
#: Integers in a column with a name are quantities if they are smaller than this.
_MIN_ID = 1_000_000
#: Integers with at most this many distinct values may be quantities or classes: they become both.
_MAX_CLASSES = 20
#: Suffix of the name of the category that is made from a number.
_CATEGORY_SUFFIX = "_category"
#: In fewer days each weekday occurs only once or twice, so that it stands for a date.
_MIN_WEEKDAY_DAYS = 21
#: Hash buckets of a column whose values rarely recur.
_BUCKETS = 100_000
#: Microseconds in a minute.
_MINUTE = 60_000_000
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR
#: Names of derived columns if the column of the time itself is called hour or weekday.
_NAMES_IN_FULL = {"hour": "hour_of_day", "weekday": "day_of_week"}
#: Criteo's logs have the label, this many counts, and 26 categories.
_CRITEO_COUNTS = 13
#: Names of kinds of values in comments.
_KIND_NAMES = {
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
        options: The keys of its block, without ``names``.
        why: The comment.
        source: The column in the file.
    """

    name: str
    kind: str
    options: dict[str, Any]
    why: str
    source: str


@dataclasses.dataclass(frozen=True)
class Guess:
    """The roles of the columns of a file.

    Attributes:
        labels: The keys of each ``[[label]]`` with its comment, the main label first.
        label_candidates: The columns that could equally be the main label, the chosen one first; []
            if there is no doubt.
        split: How the rows are split.
        time: The column with the time of a row, or None.
        features: The columns of the spec, dense ones first.
        unread: The columns of the file that are not read, each with the reason.
        names: The names of all columns of the file, made up if it has no header.
    """

    labels: list[tuple[dict[str, Any], str]]
    label_candidates: list[str]
    split: SplitChoice
    time: Profile | None
    features: list[Feature]
    unread: dict[str, str]
    names: list[str]


def assign_roles(
    sample: SampledFile, path: str, label: str = "", *, outcomes: bool = True
) -> Guess:
    """Decide the role of each column.

    Args:
        sample: The sample of the log.
        path: Names the file in errors.
        label: The name of the label's column, or its number from 1; "" to find it.
        outcomes: Whether to leave out columns that give the label away, which raw logs often have;
            False if somebody has chosen the features.

    Raises:
        BadInputError: No column looks like a label, or no column is left for features.
    """
    split_index = find_split_column(sample)
    choice = choose_labels(_hide_column(sample, split_index), path, label)
    criteo = _is_criteo(sample, choice.indices[0])
    columns = sample.columns
    if not sample.named:
        columns = _name_columns(columns, choice.indices[0], criteo)
    label_columns = [columns[j] for j in choice.indices]
    labels = []
    truth = {}
    for j, column in zip(choice.indices, label_columns, strict=True):
        name = f", {column.name}" if sample.named else ""
        rule, why = make_label_rule(column, f"{path}: column {j + 1}{name}")
        truth[rule["name"]] = read_labels(column, rule)
        labels.append((rule, why))
    if choice.alternatives:
        rule, why = labels[0]
        labels[0] = (rule, f"{why}; also possible: {', '.join(choice.alternatives)}")
    used = {*choice.indices, split_index}
    rest = {j: column for j, column in enumerate(columns) if j not in used}
    given_away = {}
    if outcomes and not criteo:
        given_away = find_outcomes(list(rest.values()), label_columns, truth)
    features: list[Feature] = []
    unread: dict[str, str] = {}
    for j, column in rest.items():
        chosen: list[Feature] | str
        if criteo:
            chosen = [_make_criteo_feature(column, j)]
        elif column.name in given_away:
            chosen = given_away[column.name]
        else:
            chosen = choose_features(column, sample)
        if isinstance(chosen, str):
            unread[column.name or f"column {j + 1}"] = chosen
        else:
            features += chosen
    if not any(feature.kind == "categorical" for feature in features):
        sources = {feature.source for feature in features}
        read = [column for column in rest.values() if column.source in sources]
        features = _find_categories(read, features, path)
    # Dense columns first, as in a spec; the categories that are made from dense columns last.
    dense = {feature.name for feature in features if feature.kind == "dense"}
    features.sort(key=lambda f: (f.kind != "dense", f.name.removesuffix(_CATEGORY_SUFFIX) in dense))
    features = rename_features(features, [rule["name"] for rule, _ in labels])
    time = find_time([column for column in rest.values() if column.name not in given_away])
    split_column = None if split_index is None else columns[split_index]
    split = choose_split(sample, split_column, time, label_columns)
    names = [column.name for column in columns]
    return Guess(labels, choice.candidates, split, time, features, unread, names)


def rename_features(features: list[Feature], taken: list[str]) -> list[Feature]:
    """Return features with distinct names that are valid in a spec.

    Args:
        features: The features.
        taken: The distinct names of other columns.
    """
    names = make_unique([*taken, *(make_spec_name(feature.name) for feature in features)])
    renamed = []
    for feature, name in zip(features, names[len(taken) :], strict=True):
        renamed.append(dataclasses.replace(feature, name=name))
    return renamed


def _hide_column(sample: SampledFile, index: int | None) -> SampledFile:
    """Return the sample with one column marked as empty, so that it gets no role."""
    columns = list(sample.columns)
    if index is not None:
        columns[index] = dataclasses.replace(columns[index], kind="empty")
    return dataclasses.replace(sample, columns=columns)


def _is_criteo(sample: SampledFile, label: int) -> bool:
    """Return True if the columns are those of Criteo's logs, all of whose 13 counts are dense."""
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
    """Return the feature of a column of Criteo's logs, by its position."""
    if index <= _CRITEO_COUNTS:
        return _make_feature(column, "dense", {}, "a count")
    return _make_feature(column, "categorical", {"raw": "hex32"}, "hexadecimal")


def _name_columns(columns: list[Profile], label: int, criteo: bool) -> list[Profile]:
    """Name the columns of a file without a header."""
    seen: Counter[str] = Counter()
    named = []
    for j, column in enumerate(columns):
        if j == label:
            named.append(dataclasses.replace(column, name="label"))
            continue
        kind = column.kind if column.kind in ("int", "float", "time", "empty") else "cat"
        if criteo:
            kind = "int" if j <= _CRITEO_COUNTS else "cat"
        elif column.multi_hot or (kind == "int" and _choose_form(column, named=False) == "id"):
            kind = "cat"
        named.append(dataclasses.replace(column, name=f"{kind}_{seen[kind]}"))
        seen[kind] += 1
    return named


def choose_features(column: Profile, sample: SampledFile) -> list[Feature] | str:
    """Return the features that are made from a column, or the reason why it is not read."""
    if not column.name:
        return "it has no name"
    if column.kind == "empty":
        return column.unread or "no values in the rows that were read"
    if column.kind == "time":
        return _derive_times(column, sample)
    if _identifies_rows(column):
        return "all values are distinct, so nothing can be learned from them"
    if column.distinct == 1 and column.rows > 1 and not column.missing:
        return f"always {next(iter(column.counts))!r:.40}"
    form = _choose_form(column, named=sample.named)
    if form == "both":
        name = f"{column.name}{_CATEGORY_SUFFIX}"
        category = dataclasses.replace(_make_categorical(column), name=name)
        return [_make_dense(column), category]
    return [_make_dense(column) if form == "number" else _make_categorical(column)]


def _identifies_rows(column: Profile) -> bool:
    """Return True if a column has a different value in each row, and is not a quantity."""
    if column.present < _ENOUGH_ROWS or column.distinct < column.present:
        return False
    if column.multi_hot or column.kind == "float":
        return False
    if column.kind != "int" or is_code(column.name):
        return True
    return bool(np.all(np.diff(column.numbers) > 0))  # row numbers


def _choose_form(column: Profile, *, named: bool) -> str:
    """Return whether values are used as an "id", as a "number" or, in doubt, as "both".

    Most counts and amounts are small compared to their range; ids are spread evenly over it.
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
    if not len(positive) or np.mean(positive % 10 == 0) > 0.5:  # round amounts
        return "number"
    if positive[len(positive) // 2] <= 0.2 * positive[-1]:
        return "number"
    if named:
        return "id" if positive[-1] >= _MIN_ID else "number"
    if column.distinct > 100:
        return "id"
    return "both" if positive[0] <= 1 and column.mean_count >= 1.5 else "number"


def _make_feature(
    column: Profile, kind: str, options: dict[str, Any], why: str, name: str = ""
) -> Feature:
    """Return a feature; add the number of distinct and missing values to its comment."""
    why += f", {column.distinct:,} distinct" if column.distinct != 1 else ", one value"
    if column.missing:
        why += f", {column.missing / column.rows:.1%} missing"
    return Feature(name or column.name, kind, options, why, column.source)


def _make_dense(column: Profile) -> Feature:
    """Return the dense feature of a column of numbers."""
    is_integer = column.kind == "int" and not column.floating and column.fits("int32")
    options: dict[str, Any] = {} if is_integer else {"raw": "float"}
    options |= column.reading
    minimum = column.numbers.min()
    maximum = column.numbers.max()
    if minimum < -2 or maximum <= 1:  # the default transform, a logarithm, would flatten them
        options["transform"] = "normalize"
    return _make_feature(column, "dense", options, f"numbers from {minimum:g} to {maximum:g}")


def _make_categorical(column: Profile) -> Feature:
    """Return the categorical feature of a column, hashed if its values rarely recur."""
    raw = column.kind
    kind = _KIND_NAMES.get(raw, "strings")
    options: dict[str, Any] = {"raw": raw, **column.reading}
    if raw in ("bigint", "string"):
        kept = {key: value for key, value in column.reading.items() if key in ("nulls", "trim")}
        options = {"raw": "string", **kept}
    if column.multi_hot:
        options["multi_hot"] = True
        kind = f"lists of {kind}"
    elif column.present >= _ENOUGH_ROWS:
        if column.mean_count < 1 / 0.9:
            options["hash_buckets"] = _BUCKETS
            kind += ", most occur only once: hashed"
        elif column.mean_count < 1 / 0.4:
            options["freq_threshold"] = 2
            kind += ", many occur only once"
    return _make_feature(column, "categorical", options, kind)


def _derive_times(column: Profile, sample: SampledFile) -> list[Feature] | str:
    """Return the features of a time, or the reason why it has none.

    They are the hour and the weekday of a time, the weekday of a date, or the age of a birth date.
    """
    options: dict[str, Any] = {"time_format": column.time_format} if column.time_format else {}
    options |= column.reading
    times = column.numbers
    first = times.min()
    last = times.max()
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
        # A constant derived column is useless, unless later rows may have other hours or weekdays.
        if sample.whole and not sample.days and not np.ptp(derived):
            continue
        name = f"{column.name}_{kind}"
        if kind == column.name:  # as in Avazu's column "hour", which is a time
            name = _NAMES_IN_FULL[kind]
        keys = {"derive": kind, **options}
        features.append(_make_feature(column, "categorical", keys, why, name))
    return features or f"{why}, and always the same hour"


def _find_categories(columns: list[Profile], dense: list[Feature], path: str) -> list[Feature]:
    """Return features with at least one category, given columns whose features are all dense.

    If no name tells an id, as in a log with columns ``u``, ``i`` and ``r``, the values decide, as
    in a file without a header. If they show no id either, the quartile of a number becomes a
    category.

    Args:
        columns: The columns of the features.
        dense: The features.
        path: Names the file in errors.

    Raises:
        BadInputError: There is no number to make a category from.
    """
    ids = []
    for column in columns:
        if column.kind == "int" and _choose_form(column, named=False) == "id":
            ids.append(column)
    if ids:
        id_sources = {column.source for column in ids}
        kept = [feature for feature in dense if feature.source not in id_sources]
        return kept + [_make_categorical(column) for column in ids]
    numbers = [column for column in columns if column.is_number and column.distinct > 1]
    if not numbers:
        raise BadInputError(
            f"{path}: no column can be categorical",
            "a spec needs at least one categorical column: add one to the log",
        )
    column = numbers[0]
    values = column.sorted_numbers()
    quartiles = {float(values[len(values) * k // 4]) for k in (1, 2, 3)}
    options = {**column.reading, "derive": "bucket", "boundaries": sorted(quartiles)}
    why = f"the quartile of {column.name}, as a spec needs at least one categorical column"
    name = f"{column.name}_bucket"
    return [*dense, Feature(name, "categorical", options, why, column.source)]
