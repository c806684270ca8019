"""Which column is the label, what is known only with it, and which rows are for training."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.auroc import TOO_GOOD, bin_numbers, column_auroc
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.names import DAY, OF_EVENT, is_called
from nvt_torchrec.etl.guess.sample import SampledFile, spec_name
from nvt_torchrec.etl.guess.values import Profile

_TRUE = (
    "1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos", "won", "success",
    "successful", "approved", "accepted", "paid",
)  # fmt: skip
_NOT = r"(not?|non|un|in|dis)[\W_]*"
#: The share of positives that a label mostly has.
_USUAL = (0.01, 0.6)
_BINARY = {"0", "1", "0.0", "1.0"}
#: Texts that a label has at most.
_MOST_TEXTS = 20
#: Microseconds; from the second span on cuts are at midnight.
_DAY, _LONG = 86_400_000_000, 10 * 86_400_000_000
_SHARES: dict[str, Any] = {"valid": 0.1, "test": 0.1}
#: Distinct times of a column that may say when a row happened: the dates of a week.
_LEAST_TIMES = 5
#: With fewer rows of either label an AUROC is chance.
_ENOUGH = 20
#: Numbers with more distinct values are compared by bins of equal counts.
_HUNDRED = 100


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
    if label:
        places = {str(j + 1): j for j in range(len(columns))}
        places |= {name: j for j, name in enumerate(names) if name}
        given = dict.fromkeys([label] if label in names else label.split(","))
        for each in given:
            if each not in places:
                raise BadInputError(f"{path}: no column {each!r} for the label", f"it has {known}")
        return [places[each] for each in given], []
    scores = [_label_score(column, j, sample) for j, column in enumerate(columns)]
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], -_positives(columns[j]), j))
    best, *others = ranked
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
    name = column.name
    if _is_event(column) or is_called(name, "outcome"):
        return "looks like a label, or is known only with it"
    for label in labels:
        stem = re.escape(label.name)
        if stem and re.fullmatch(stem + OF_EVENT, name, re.IGNORECASE):
            return f"known only with the label {label.name}"
    if is_called(name, "weight"):
        return "looks like the weight of a row, which no feature is; [weight] takes it"
    return ""


def _is_event(column: Profile) -> bool:
    name = column.name
    return is_called(DAY.sub("", name) if len(_canonical(column)) == 2 else name, "label", "event")


def _label_score(column: Profile, j: int, sample: SampledFile) -> int:
    """How much a column looks like a label, by name, values and place; 0: it is none."""
    name, event, named = column.name, _is_event(column), sample.named
    perhaps, binary = is_called(name, "perhaps"), set(column.counts) <= _BINARY
    least, most = (column.numbers.min(), column.numbers.max()) if column.is_number else (-1, -1)
    if column.kind in ("empty", "time") or column.multi_hot or is_called(name, "weight"):
        return 0
    if named and not name:
        return 0
    if len(_canonical(column)) == 2:
        perhaps = perhaps or is_called(name.rpartition("_")[2], "perhaps")
        last = max(k for k, each in enumerate(sample.columns) if each.name or not named)
        score = 20 + (80 if event else 30 * perhaps + 10 * (j == last) + 5 * (j == 0))
        score += 10 * is_called(name, "label")
        score += 5 * bool(re.search("click|clk", name, re.IGNORECASE))
        score -= 10 * (not binary and not _natural(column))
        share = _positives(column) / max(column.present, 1)
        score -= 10 * (not _USUAL[0] <= share <= _USUAL[1])
    elif (event or perhaps) and binary:
        score = 45  # a file that is sorted by its label
    elif (
        3 <= column.distinct <= 11
        and least >= 0
        and 3 <= most <= 10
        and (not named or is_called(name, "rating"))
    ):
        score = 40 if named else 25
    elif event and column.kind == "int" and least == 0:
        score = 30  # counts
    elif (event or perhaps) and column.kind == "string" and 3 <= column.distinct <= _MOST_TEXTS:
        score = 35
    elif is_called(name, "outcome") and column.is_number and column.distinct > 2:
        score = 2 + 2 * name.lower().endswith("ratio")
    else:
        return 0
    return max(score - 15 * (column.missing > 0.05 * column.rows), 1)


def _natural(column: Profile) -> set[str]:
    """Return the texts that say yes, or of two the one that the other negates; set() if none."""
    true = {text for text in column.counts if _plain(text) in _TRUE}
    if true and len(true) < column.distinct:
        return true
    texts = _canonical(column) if len(_canonical(column)) == 2 else set()
    negated = [a for a in texts for b in texts if re.fullmatch(_NOT + re.escape(a), b)]
    return {text for text in column.counts if _plain(text) in negated}


def _positive(column: Profile) -> set[str]:
    """Return the texts that are 1: those that say so, else the rarest that is no exception."""
    counts = column.counts
    if set(counts) <= _BINARY:
        return set(counts) & {"1", "1.0"}
    enough = [text for text in counts if counts[text] >= _USUAL[0] * column.present]
    rarest = min(enough or counts, key=lambda text: (counts[text], text), default="")
    return _natural(column) or {text for text in counts if _plain(text) == _plain(rarest)}


def _positives(column: Profile) -> int:
    """Return how many rows of a column with two values are positive; 0 of others."""
    two = len(_canonical(column)) <= 2
    return sum(column.counts[text] for text in _positive(column)) if two else 0


def _canonical(column: Profile) -> set[str]:
    """Return the values without differences in how they are written."""
    return set(column.counts) if column.distinct > 8 else set(map(_plain, column.counts))


def _plain(text: str) -> str:
    return text.casefold().removesuffix(".").removesuffix(".0")


def label_rule(column: Profile, where: str) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[label]`` and why; ``where`` names file and column in errors.

    Raises:
        BadInputError: The column has too many values to be a label.
    """
    share = {text: often / max(column.present, 1) for text, often in column.counts.items()}
    rule: dict[str, Any] = {"name": spec_name(column.name)}
    if rule["name"] != column.name:
        rule["from"] = column.name
    if "trim" in column.reading:
        rule["trim"] = True
    positive = sorted(_positive(column))
    part, texts = sum(share[text] for text in positive), " or ".join(positive)
    if set(share) <= _BINARY:
        why = f"0 and 1, {part:.1%} are 1"
    elif len(_canonical(column)) == 2:
        rule |= {"positive": positive, "negative": sorted(share.keys() - set(positive))}
        why = f"two values, {part:.1%} are {texts}"
    elif column.is_number and column.distinct > 1:
        rule["threshold"] = least = _threshold(column)
        numbers = column.sorted_numbers()
        why = (
            f"numbers from {numbers[0]:g} to {numbers[-1]:g}, of which "
            f"{np.mean(numbers >= least):.1%} are at least {least:g}: choose the threshold"
        )
    elif column.kind == "string" and 1 < column.distinct <= _MOST_TEXTS and not column.multi_hot:
        rule["positive"] = positive
        others = ", ".join(f"{text} {share[text]:.1%}" for text in share if text not in positive)
        why = f"{column.distinct} values: {texts}, {part:.1%}, is 1, all others 0; choose: {others}"
    else:
        raise BadInputError(
            f"{where} cannot be a label: it has {column.distinct} values, such as "
            + ", ".join(f"{text:.40}" for text in list(column.counts)[:3]),
            f"a label is a number, or one of at most {_MOST_TEXTS} texts: name one with --label",
        )
    if column.missing:
        why += f"; {column.missing} rows have none and are malformed"
    return rule, why


def _threshold(column: Profile) -> float:
    """Return from which number on a label is 1.

    Of events it is 1; of few numbers the smallest in the upper half of the range, 4 for ratings up
    to 5; of many the number that a quarter of the rows reach.
    """
    numbers = column.sorted_numbers()
    if is_called(column.name, "event") and numbers[0] == 0:
        return 1
    if column.distinct > 11:
        number = numbers[len(numbers) * 3 // 4]
    else:
        number = next((each for each in numbers if each >= 0.75 * numbers[-1]), numbers[-1])
    return int(number) if number == int(number) else float(number)


def choose_split(columns: list[Profile], sample: SampledFile) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[split]`` and why, given the columns that are no labels.

    Where there is one, it is a split to which further days can be added.
    """
    if sample.days:
        return {"by": "days"}, (
            f"the log has a file for each day: pass {sample.days} as --input_path; the last day is "
            "halved into valid and test, and `nvt-etl extend` adds further ones"
        )
    if column := find_time(columns):
        split = {"by": "time", "column": column.name}
        if column.time_format:
            split["time_format"] = column.time_format
        why = f"{column.name} is a time, and a model scores rows newer than those it was trained on"
        if cuts := _cuts(column, sample):
            return split | dict(zip(("valid_from", "test_from"), cuts, strict=True)), (
                f"{why}: valid and test are the last tenths of the rows. What `nvt-etl extend` "
                "adds later is test; shares, valid = 0.1 and test = 0.1, cannot be extended"
            )
        return split | _SHARES, (
            f"{why}: the last tenth of the rows is test. For days that `nvt-etl extend` adds, give "
            "the cuts themselves: valid_from and test_from instead of the shares"
        )
    return {"by": "share"} | _SHARES, "at random, because no column says when a row happened"


def find_time(columns: list[Profile]) -> Profile | None:
    """Return the column that says when a row happened: of the times, that of the most values."""
    times = [
        column
        for column in columns
        if column.kind == "time"
        and column.name
        and not column.missing
        and column.distinct >= _LEAST_TIMES
        and not is_called(column.name, "birth")
    ]
    return max(times, key=lambda column: column.distinct, default=None)


def _cuts(column: Profile, sample: SampledFile) -> list[str]:
    """Return when validation and test begin; [] if the times cannot be cut so."""
    if not sample.whole:
        return []
    times = column.sorted_numbers()
    first, last = times[0], times[-1]
    cuts = times[[int(share * len(times)) for share in (0.8, 0.9)]]
    days = cuts // _DAY * _DAY
    if last - first >= _LONG and days[0] < days[1]:
        cuts = days
    if not first < cuts[0] < cuts[1] <= last:
        return []
    texts = np.datetime_as_string(cuts.astype("M8[us]"), unit="s")
    return [text.replace("T", " ").removesuffix(" 00:00:00") for text in texts.tolist()]


def labels_of_rows(column: Profile, rule: dict[str, Any]) -> np.ndarray:
    """Return the label of each row by the keys of ``[label]``, NaN where it is missing."""
    known = column.numbers >= rule.get("threshold", 1)
    if "positive" in rule:
        known = np.array([text in rule["positive"] for text in column.counts])
    return np.append(known, np.nan)[column.codes]


def find_leak(column: Profile, labels: dict[str, np.ndarray]) -> str:
    """Return why a column gives one of some labels away, whatever its name; "" if it does not.

    Args:
        column: The column.
        labels: By their names, the labels of the rows, NaN where missing.
    """
    codes = column.codes
    forms = {"its values give": codes, "whether it is missing gives": (codes < 0).astype(int)}
    if column.is_number and column.distinct > _HUNDRED:
        forms["its numbers give"] = bins = codes.copy()
        bins[codes >= 0] = bin_numbers(column.numbers[codes[codes >= 0]])
    for name, truth in labels.items():
        known = ~np.isnan(truth)
        truth = truth[known]
        if min(np.sum(truth == 1), np.sum(truth == 0)) < _ENOUGH:
            continue
        areas = {
            what: column_auroc(to_arrow(values[known]), truth) or 0
            for what, values in forms.items()
        }
        what = max(areas, key=lambda what: (round(areas[what], 3), "missing" in what))
        if areas[what] > TOO_GOOD:
            return (
                f"{what} {name} away (AUROC alone {areas[what]:.3f}): make it a feature only if it "
                "is known before the label is"
            )
    return ""
