"""Which column is the label, which of its values are positive, and what is known only with it."""

from __future__ import annotations

import re
from typing import Any

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.sample import SampledFile, spec_name
from nvt_torchrec.etl.guess.values import Profile

_GENERIC = re.compile(r"labels?|targets?|y", re.IGNORECASE)
#: What people do with what they are shown: never known when it is shown.
_EVENTS = re.compile(
    r"((is|has|was|did)_?|label_)?(clicks?|clicked|clk|conversions?|convert(ed)?|purchased?|buys?|"
    r"bought|ordered|cart|add_?to_?cart|fav(ou?rited?)?|(dis)?liked?s?|follow(ed)?|forward(ed)?|"
    r"comment(ed)?|shared?|hate|subscri(ption|bed?)|install(ed|s)?|deposit|churn(ed)?|fraud|"
    r"attribution|booking|booked|survived|responded|(long|valid|effective)_view|profile_enter)"
    r"(_?(bool|flag|label))?",
    re.IGNORECASE,
)
#: Of columns that may as well be features.
_PERHAPS = re.compile(
    r"(is_?)?(class|outcome|response|income|default(.payment.*)?|action|behaviou?r)", re.IGNORECASE
)
#: What is measured after something was shown.
_OUTCOMES = re.compile(
    r"(play(ing)?|watch(ing)?|dwell|stay|read(ing)?|comment_stay|profile_stay)_?"
    r"(times?(_ms)?|duration|ratio|percentage|seconds|ms)|impressions?|ratings?|overall",
    re.IGNORECASE,
)
_OF_EVENT = r"_?(id|timestamp|time|ts|at|date|pos|nb|amount|value|delay)(_?ms)?"
_RATING_NAMES = re.compile(r"(^|_)(ratings?|stars|score|grade|overall)$", re.IGNORECASE)
_WEIGHTS = re.compile(
    r"((sample|instance|row|case|importance|example)[_ ]?)?weights?|fnlwgt|"
    r"(.*_)?propensity(_score)?",
    re.IGNORECASE,
)
_TRUE = ("1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos", "won", "success")
_BINARY = {"0", "1", "0.0", "1.0"}
#: Texts that a label has at most.
_MOST_TEXTS = 20


def without_type(name: str) -> str:
    """Return a name without what RecBole's files add: ``rating:float`` becomes ``rating``."""
    return re.sub(r":(token|float)(_seq)?$", "", name)


def choose_labels(sample: SampledFile, path: str, label: str) -> tuple[list[int], list[str]]:
    """Return the positions of the labels, the main one first, and names that could be labels too.

    Args:
        sample: The rows.
        path: Names the file in errors.
        label: The name of the main label's column, or its number from 1 on; "": find it.

    Raises:
        BadInputError: There is no such column, or none looks like a label.
    """
    columns = sample.columns
    scores = [_label_score(column, j, sample) for j, column in enumerate(columns)]
    if label:
        best = _given_label(columns, path, label)
    else:
        best = max(range(len(scores)), key=lambda j: (scores[j], _ones(columns[j]), -j))
        if not scores[best]:
            raise BadInputError(
                f"{path}: no column looks like a label: none has two values",
                "name it with --label, by its name or, from 1 on, its number",
            )
    others = [j for j, score in enumerate(scores) if score >= 20 and j != best]
    further = [j for j in others if _is_event(columns[j]) and len(_canonical(columns[j])) == 2]
    possible = [columns[j].name or f"column {j + 1}" for j in others if j not in further]
    return [best, *further], sorted(possible, key=lambda name: not _PERHAPS.fullmatch(name))[:5]


def _given_label(columns: list[Profile], path: str, label: str) -> int:
    names = [column.name for column in columns]
    if label in names:
        return names.index(label)
    if label.isdigit() and 1 <= int(label) <= len(columns):
        return int(label) - 1
    known = ", ".join(filter(None, names[:20])) or f"1 to {len(columns)}"
    raise BadInputError(f"{path}: no column {label!r} for the label", f"it has {known}")


def why_no_feature(column: Profile, labels: list[Profile]) -> str:
    """Return why a column that could be read must not be a feature; "" if it may be one."""
    name = without_type(column.name)
    if _is_event(column) or _OUTCOMES.fullmatch(name):
        return "looks like a label, or is known only with it"
    for label in labels:
        stem = re.escape(without_type(label.name))
        if stem and re.fullmatch(stem + _OF_EVENT, name, re.IGNORECASE):
            return f"known only with the label {label.name}"
    if _WEIGHTS.fullmatch(name):
        return "looks like the weight of a row, which no feature is; [weight] takes it"
    return ""


def _is_event(column: Profile) -> bool:
    name = without_type(column.name)
    return bool(_GENERIC.fullmatch(name) or _EVENTS.fullmatch(name))


def _label_score(column: Profile, j: int, sample: SampledFile) -> int:
    """How much a column looks like a label; 0: it is none."""
    name, event = without_type(column.name), _is_event(column)
    named = event or bool(_PERHAPS.fullmatch(name))
    if column.kind in ("empty", "time") or column.multi_hot or _WEIGHTS.fullmatch(name):
        return 0
    if len(_canonical(column)) == 2:
        at_an_end = j in (0, len(sample.columns) - 1)
        score = 20 + 30 * named + 10 * at_an_end + 10 * (set(column.counts) <= _BINARY)
        if event:
            click = bool(re.search("click|clk", name, re.IGNORECASE))
            score = 100 + 10 * bool(_GENERIC.fullmatch(name)) + 5 * click
    elif named and set(column.counts) <= _BINARY:
        score = 45  # a file that is sorted by its label
    elif _is_rating(column, sample.header):
        score = 40 if sample.header else 8
    elif event and column.kind == "int" and column.least == 0:
        score = 30  # counts
    elif named and column.kind == "string" and 3 <= column.distinct <= _MOST_TEXTS:
        score = 35
    elif _OUTCOMES.fullmatch(name) and column.kind in ("int", "float") and column.distinct > 2:
        score = 10 + 2 * name.lower().endswith("ratio")
    else:
        return 0
    return max(score - 15 * bool(column.missing), 1)


def _ones(column: Profile) -> int:
    return sum(often for text, often in column.counts.items() if _of(text) in _TRUE)


def _canonical(column: Profile) -> set[str]:
    """Return the values without differences in how they are written."""
    if column.distinct > 8:
        return set(column.counts)
    return set(map(_of, column.counts))


def _of(text: str) -> str:
    return text.casefold().removesuffix(".").removesuffix(".0")


def _is_rating(column: Profile, header: bool) -> bool:
    if column.kind not in ("int", "float") or not 3 <= column.distinct <= 11:
        return False
    if column.least < 0 or column.most > 10 or column.most < 3:
        return False
    return bool(_RATING_NAMES.search(without_type(column.name))) if header else True


def label_rule(column: Profile, path: str) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[label]`` and why.

    Raises:
        BadInputError: The column has too many values to be a label.
    """
    share = {text: often / max(column.present, 1) for text, often in column.counts.items()}
    extra = f"; {column.missing} rows have none and are malformed" if column.missing else ""
    rule: dict[str, Any] = {"name": spec_name(column.name)}
    if rule["name"] != column.name:
        rule["from"] = column.name
    if column.trim:
        rule["trim"] = True
    if set(share) <= _BINARY:
        ones = share.get("1", 0) + share.get("1.0", 0)
        return rule, f"0 and 1, {ones:.1%} are 1{extra}"
    rarest = min(share, key=lambda text: (share[text], text), default="")
    if len(_canonical(column)) == 2:
        positive = {text for text in share if _of(text) in _TRUE}
        if not positive or len(positive) == len(share):
            positive = {text for text in share if _of(text) == _of(rarest)}
        rule["positive"] = sorted(positive)
        rule["negative"] = sorted(share.keys() - positive)
        part = sum(share[text] for text in positive)
        return rule, f"two values, {part:.1%} are {' or '.join(sorted(positive))}{extra}"
    if column.kind in ("int", "float") and column.distinct > 1:
        threshold = _threshold(column)
        part = sum(o for text, o in share.items() if column.number(text) >= threshold)
        rule["threshold"] = threshold
        return rule, (
            f"numbers from {column.least:g} to {column.most:g}, of which {part:.1%} are at least "
            f"{threshold:g}: choose the threshold{extra}"
        )
    if column.kind == "string" and 1 < column.distinct <= _MOST_TEXTS and not column.multi_hot:
        rule["positive"] = [rarest]
        others = ", ".join(f"{text} {part:.1%}" for text, part in share.items() if text != rarest)
        return rule, (
            f"{column.distinct} values: {rarest}, the rarest with {share[rarest]:.1%}, is 1, all "
            f"others 0; choose: {others}{extra}"
        )
    raise BadInputError(
        f"{path}: column {column.name or '?'} cannot be a label: it has {column.distinct} values",
        "name another one with --label",
    )


def _threshold(column: Profile) -> float:
    """Return from which number on a label is 1.

    Of events it is 1; of few numbers the smallest in the upper half of the range, 4 for ratings up
    to 5; of many the number that a quarter of the rows reach.
    """
    if _EVENTS.fullmatch(without_type(column.name)) and column.least == 0:
        return 1
    numbers = sorted(map(column.number, column.counts.elements()))
    number = next((each for each in numbers if each >= 0.75 * column.most), numbers[-1])
    if column.distinct > 11:
        number = numbers[len(numbers) * 3 // 4]
    return int(number) if number == int(number) else number
