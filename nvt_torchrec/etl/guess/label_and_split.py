"""Which column is the label, what is known only with it, and which rows are for training."""

from __future__ import annotations

import datetime
import re
from typing import Any

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.auroc import TOO_GOOD, column_auroc
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.sample import SampledFile, spec_name
from nvt_torchrec.etl.guess.values import Profile

_GENERIC = re.compile(r"labels?|targets?|y", re.IGNORECASE)
#: What people do with what they are shown: never known when it is shown.
_EVENTS = re.compile(
    r"((is|has|was|did)_?|label_)?(clicks?|clicked|clk|conversions?|convert(ed)?|purchased?|buys?|"
    r"bought|ordered|cart|add_?to_?cart|fav(ou?rited?)?|(dis)?liked?s?|follow(ed)?|forward(ed)?|"
    r"comment(ed)?|shared?|hate|subscri(ption|bed?)|install(ed|s)?|deposit|churn(ed)?|fraud|"
    r"attribut(ion|ed)|booking|booked|survived|responded|(long|valid|effective)_view|profile_enter|"
    r"visit(ed)?|retention|retained|exited)(_?(bool|flag|label))?",
    re.IGNORECASE,
)
#: Of columns that may as well be features.
_PERHAPS = re.compile(
    r"(is_?)?(class|outcome|response|income|default(.payment.*)?|action|behaviou?r|status|state)",
    re.IGNORECASE,
)
#: What is measured after something was shown; not what was so earlier, such as prev_conversions.
_OUTCOMES = re.compile(
    r"(play(ing)?|watch(ing)?|dwell|stay|read(ing)?|comment_stay|profile_stay)_?"
    r"(times?(_ms)?|duration|ratio|percentage|seconds|ms)|impressions?|ratings?|overall|"
    r"(?!.*(hist|prev|past|last|avg|rate)).*conversions?([\W_]?(value|amount|count))?",
    re.IGNORECASE,
)
_OF_EVENT = r"_?(id|timestamp|time|ts|at|date|pos|nb|amount|value|delay)(_?ms)?"
_RATING_NAMES = re.compile(r"(^|[\W_])(ratings?|stars|score|grade|overall)$", re.IGNORECASE)
_WEIGHTS = re.compile(
    r"((sample|instance|row|case|importance|example)[_ ]?)?weights?|fnlwgt|"
    r"(.*_)?propensity(_score)?",
    re.IGNORECASE,
)
_TRUE = (
    "1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos", "won", "success",
    "successful", "approved", "accepted", "paid",
)  # fmt: skip
_NOT = r"(not?|non|un|in|dis)[\W_]*"
#: The share of positives that a label mostly has.
_USUAL = (0.01, 0.6)
#: What stands behind the name of an event on another day: retention_7, clicked_30d.
_DAY = re.compile(r"_?d?\d+(_?d(ays?)?)?$", re.IGNORECASE)
_BINARY = {"0", "1", "0.0", "1.0"}
#: Texts that a label has at most.
_MOST_TEXTS = 20
#: Names of dates that belong to a person, not to an event.
PERSONAL_DATES = re.compile(
    r"birth|dob|sign.?up|regist|enrol|joined|join.?date|(member|customer|client|user).?since|"
    r"(dt|date).?(customer|client|member)|(customer|client|member|user|account).?(date|created)",
    re.IGNORECASE,
)
_USERS = re.compile(
    r"(user|uid|customer|client|member|visitor|viewer|household|session)[\W_]?(id|key|hash|code|no)?",
    re.IGNORECASE,
)
#: From which span on cuts are at midnight.
_LONG = datetime.timedelta(days=10)
_SHARES = {"valid": 0.1, "test": 0.1}


def choose_labels(sample: SampledFile, path: str, label: str) -> tuple[list[int], list[str]]:
    """Return the positions of the labels, the main one first, and names that could be labels too.

    Args:
        sample: The rows.
        path: Names the file in errors.
        label: The names of the labels' columns, or their numbers from 1 on, with commas between;
            "": find them.

    Raises:
        BadInputError: There is no such column, or none looks like a label.
    """
    columns = sample.columns
    names = [column.name for column in columns]
    known = ", ".join(filter(None, names[:20])) or f"columns 1 to {len(columns)}"
    given = [label] if label in names else label.split(",")
    if label:
        numbers = {str(j + 1): j for j in range(len(columns))}
        places = numbers | {name: j for j, name in enumerate(names) if name}
        for each in given:
            if each not in places:
                raise BadInputError(f"{path}: no column {each!r} for the label", f"it has {known}")
        return [places[each] for each in dict.fromkeys(given)], []
    scores = [_label_score(column, j, sample) for j, column in enumerate(columns)]
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], -_positives(columns[j]), j))
    best, *others = [j for j in ranked if scores[j]] or [0]
    if not scores[best]:
        raise BadInputError(
            f"{path}: no column looks like a label: none has two values or is named rating",
            f"name it with --label: it has {known}; a log of what was clicked alone has no "
            "label, it also needs rows of what was shown and not clicked",
        )
    others = [j for j in others if scores[j] >= 5]
    further = [j for j in others if _is_event(columns[j]) and len(_canonical(columns[j])) == 2]
    return [best, *further], [names[j] or str(j + 1) for j in others if j not in further][:5]


def why_no_feature(column: Profile, labels: list[Profile]) -> str:
    """Return why a column that could be read must not be a feature; "" if it may be one."""
    name = column.plain_name
    if _is_event(column) or _OUTCOMES.fullmatch(name):
        return "looks like a label, or is known only with it"
    for label in labels:
        stem = re.escape(label.plain_name)
        if stem and re.fullmatch(stem + _OF_EVENT, name, re.IGNORECASE):
            return f"known only with the label {label.name}"
    if _WEIGHTS.fullmatch(name):
        return "looks like the weight of a row, which no feature is; [weight] takes it"
    return ""


def _is_event(column: Profile) -> bool:
    name = column.plain_name
    if len(_canonical(column)) == 2:
        name = _DAY.sub("", name)
    return bool(_GENERIC.fullmatch(name) or _EVENTS.fullmatch(name))


def _label_score(column: Profile, j: int, sample: SampledFile) -> int:
    """How much a column looks like a label, by name, values and place; 0: it is none."""
    name, event = column.plain_name, _is_event(column)
    perhaps = bool(_PERHAPS.fullmatch(name))
    binary = set(column.counts) <= _BINARY
    if column.kind in ("empty", "time") or column.multi_hot or _WEIGHTS.fullmatch(name):
        return 0
    if sample.named and not name:
        return 0
    if len(_canonical(column)) == 2:
        perhaps = perhaps or bool(_PERHAPS.fullmatch(name.rpartition("_")[2]))
        last = max((k for k, c in enumerate(sample.columns) if c.name or not sample.named))
        score = 20 + (80 if event else 30 * perhaps + 10 * (j == last) + 5 * (j == 0))
        score += 10 * bool(_GENERIC.fullmatch(name))
        score += 5 * bool(re.search("click|clk", name, re.IGNORECASE))
        score -= 10 * (not binary and not _natural(column))
        share = _positives(column) / max(column.present, 1)
        score -= 10 * (not _USUAL[0] <= share <= _USUAL[1])
    elif (event or perhaps) and binary:
        score = 45  # a file that is sorted by its label
    elif _is_rating(column) and (_RATING_NAMES.search(name) or not sample.named):
        score = 40 if sample.named else 25
    elif event and column.kind == "int" and column.least == 0:
        score = 30  # counts
    elif (event or perhaps) and column.kind == "string" and 3 <= column.distinct <= _MOST_TEXTS:
        score = 35
    elif _OUTCOMES.fullmatch(name) and column.kind in ("int", "float") and column.distinct > 2:
        score = 2 + 2 * name.lower().endswith("ratio")
    else:
        return 0
    return max(score - 15 * (column.missing > 0.05 * column.rows), 1)


def _natural(column: Profile) -> set[str]:
    """Return the texts that say yes, or of two the one that the other negates; set() if none."""
    true = {text for text in column.counts if _of(text) in _TRUE}
    if true and len(true) < column.distinct:
        return true
    texts = _canonical(column) if len(_canonical(column)) == 2 else set()
    negated = [a for a in texts for b in texts if re.fullmatch(_NOT + re.escape(a), b)]
    return {text for text in column.counts if _of(text) in negated}


def _positive(column: Profile) -> set[str]:
    """Return the texts that are 1: those that say so, else the rarest that is no exception."""
    counts = column.counts
    if set(counts) <= _BINARY:
        return set(counts) & {"1", "1.0"}
    enough = [text for text in counts if counts[text] >= _USUAL[0] * column.present]
    rarest = min(enough or counts, key=lambda text: (counts[text], text), default="")
    return _natural(column) or {text for text in counts if _of(text) == _of(rarest)}


def _positives(column: Profile) -> int:
    """Return how many rows of a column with two values are positive; 0 of others."""
    two = len(_canonical(column)) <= 2
    return sum(column.counts[text] for text in _positive(column)) if two else 0


def _canonical(column: Profile) -> set[str]:
    """Return the values without differences in how they are written."""
    if column.distinct > 8:
        return set(column.counts)
    return set(map(_of, column.counts))


def _of(text: str) -> str:
    return text.casefold().removesuffix(".").removesuffix(".0")


def _is_rating(column: Profile) -> bool:
    if column.kind not in ("int", "float") or not 3 <= column.distinct <= 11:
        return False
    return column.least >= 0 and 3 <= column.most <= 10


def label_rule(column: Profile, where: str) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[label]`` and why; ``where`` names file and column in errors.

    Raises:
        BadInputError: The column has too many values to be a label.
    """
    share = {text: often / max(column.present, 1) for text, often in column.counts.items()}
    extra = f"; {column.missing} rows have none and are malformed" if column.missing else ""
    rule: dict[str, Any] = {"name": spec_name(column.name)}
    if rule["name"] != column.name:
        rule["from"] = column.name
    if "trim" in column.reading:
        rule["trim"] = True
    if set(share) <= _BINARY:
        ones = share.get("1", 0) + share.get("1.0", 0)
        return rule, f"0 and 1, {ones:.1%} are 1{extra}"
    positive = _positive(column)
    part = sum(share[text] for text in positive)
    if len(_canonical(column)) == 2:
        rule["positive"] = sorted(positive)
        rule["negative"] = sorted(share.keys() - positive)
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
        rule["positive"] = sorted(positive)
        others = (f"{text} {share[text]:.1%}" for text in share if text not in positive)
        return rule, (
            f"{column.distinct} values: {' or '.join(sorted(positive))}, {part:.1%}, is 1, all "
            f"others 0; choose: {', '.join(others)}{extra}"
        )
    raise BadInputError(
        f"{where} cannot be a label: it has {column.distinct} values, such as "
        + ", ".join(f"{text:.40}" for text in list(column.counts)[:3]),
        f"a label is a number, or one of at most {_MOST_TEXTS} texts: name one with --label",
    )


def _threshold(column: Profile) -> float:
    """Return from which number on a label is 1.

    Of events it is 1; of few numbers the smallest in the upper half of the range, 4 for ratings up
    to 5; of many the number that a quarter of the rows reach.
    """
    if _EVENTS.fullmatch(column.plain_name) and column.least == 0:
        return 1
    numbers = sorted(map(column.number, column.counts.elements()))
    number = next((each for each in numbers if each >= 0.75 * column.most), numbers[-1])
    if column.distinct > 11:
        number = numbers[len(numbers) * 3 // 4]
    return int(number) if number == int(number) else number


def choose_split(columns: list[Profile], sample: SampledFile) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[split]`` and why, given the columns that are no labels.

    Where there is one, it is a split to which further days can be added.
    """
    if sample.days:
        return {"by": "days"}, (
            f"the log has a file for each day: pass {sample.days} as --input_path; the last day is "
            "halved into valid and test, and `etl extend` adds further ones"
        )
    keys = [c for c in columns if c.name and not c.missing and not c.multi_hot]
    times = [c for c in keys if c.kind == "time" and c.distinct >= 10]
    times = [c for c in times if not PERSONAL_DATES.search(c.name)]
    if times:
        return _by_time(max(times, key=lambda column: column.distinct), sample)
    why = "at random, because no column is a time"
    for column in keys:
        if _USERS.fullmatch(column.plain_name) and column.often > 1.1:
            why += f'; by = "column", column = "{column.name}" keeps the rows of each on one side, '
            why += "which is right if a model shall score those that it has never seen"
    return {"by": "share", **_SHARES}, why


def _by_time(column: Profile, sample: SampledFile) -> tuple[dict[str, Any], str]:
    split: dict[str, Any] = {"by": "time", "column": column.name}
    if column.time_format:
        split["time_format"] = column.time_format
    why = f"{column.name} is a time, and a model scores rows newer than those it was trained on"
    cuts = _cuts(column, sample)
    if not cuts:
        return {**split, **_SHARES}, (
            f"{why}: the last tenth of the rows is test. For days that `etl extend` adds later, "
            "give the cuts themselves: valid_from and test_from instead of the shares"
        )
    split |= dict(zip(("valid_from", "test_from"), cuts, strict=True))
    what = "rows" if sample.whole else "time"
    return split, (
        f"{why}: valid and test are the last tenths of the {what}. Rows that `etl extend` adds "
        "later are test; shares, valid = 0.1 and test = 0.1, cannot be extended"
    )


def _cuts(column: Profile, sample: SampledFile) -> list[str]:
    """Return when validation and test begin; [] if the times cannot be cut so."""
    known = {text: column.time(text) for text in column.counts}
    times = sorted(known[text] for text in column.counts.elements())
    first, last = times[0], times[-1]
    if sample.whole:
        cuts = [times[int(share * len(times))] for share in (0.8, 0.9)]
    elif sample.spread:
        cuts = [first + share * (last - first) for share in (0.8, 0.9)]
    else:
        return []
    if last - first >= _LONG:
        days = [cut.replace(hour=0, minute=0, second=0, microsecond=0) for cut in cuts]
        cuts = days if len(set(days)) == len(days) else cuts
    if not first < cuts[0] < cuts[1] <= last:
        return []
    texts = [f"{cut.astimezone(datetime.UTC):%Y-%m-%d %H:%M:%S}" for cut in cuts]
    return [text.removesuffix(" 00:00:00") for text in texts]


# ---- columns that give a label away, whatever their names

#: With fewer rows of either label an AUROC is chance.
_ENOUGH = 20
#: Numbers with more distinct values are compared by the hundredth in which they are.
_HUNDRED = 100


def labels_of_rows(column: Profile, rule: dict[str, Any]) -> np.ndarray:
    """Return the label of each row by the keys of ``[label]``, NaN where it is missing."""
    if "positive" in rule:
        known: dict[Any, bool] = {text: text in rule["positive"] for text in column.counts}
    else:
        least = rule.get("threshold", 1)
        known = {text: column.number(text) >= least for text in column.counts}
    return np.array([known.get(text, np.nan) for text in column.of_rows()], np.float64)


def find_leak(column: Profile, labels: dict[str, np.ndarray]) -> str:
    """Return why a column gives one of some labels away; "" if it does not.

    Args:
        column: The column.
        labels: By their names, the labels of the rows, NaN where missing.
    """
    values = pa.array(column.of_rows(), pa.string())
    for name, truth in labels.items():
        known = ~np.isnan(truth)
        truth = truth[known]
        if min(np.sum(truth == 1), np.sum(truth == 0)) < _ENOUGH:
            continue
        forms = {"its values give": values, "whether it is missing gives": values.is_null()}
        if column.kind in ("int", "float") and column.distinct > _HUNDRED and not column.multi_hot:
            forms["its numbers give"] = _hundredths(column)
        areas = {what: column_auroc(form.filter(known), truth) or 0 for what, form in forms.items()}
        what = max(areas, key=lambda what: (round(areas[what], 3), "missing" in what))
        if areas[what] > TOO_GOOD:
            return (
                f"{what} {name} away (AUROC alone {areas[what]:.3f}): make it a feature only if it "
                "is known before the label is"
            )
    return ""


def _hundredths(column: Profile) -> pa.Array:
    """Return in which hundredth of the rows, by size, the number of each row is."""
    numbers = np.array(column.numbers, np.float64)
    of_rows = np.repeat(numbers, list(column.counts.values()))
    edges = np.quantile(of_rows, np.arange(1, _HUNDRED) / _HUNDRED)
    place = dict(zip(column.counts, np.searchsorted(edges, numbers).tolist(), strict=True))
    return pa.array([place.get(text or "") for text in column.of_rows()])
