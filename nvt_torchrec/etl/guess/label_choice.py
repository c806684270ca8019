"""Which columns may be the label, and how one of them is read as 0 and 1."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.names import DAY, is_called, is_code
from nvt_torchrec.etl.guess.sample import SampledFile, spec_name
from nvt_torchrec.etl.guess.values import Profile

_TRUE = (
    "1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos", "won", "success",
    "successful", "approved", "accepted", "paid", "buy", "bought", "purchase", "purchased",
    "order", "ordered", "transaction",
)  # fmt: skip
_NOT = r"(not?|non|un|in|dis)[\W_]*"
#: The share of positives that a label mostly has.
_USUAL = (0.01, 0.6)
_BINARY = {"0", "1", "0.0", "1.0"}
#: Texts that a label has at most.
_MAX_TEXTS = 20
#: Distinct numbers of a rating at most, and its largest number.
_MAX_RATINGS, _MAX_RATING = 11, 10
#: A candidate whose score is so near to the best one's may be the label as well.
_CLOSE = 15
#: Of two equal candidates, the last column is the label if it has this share of the other's ones.
_ALIKE = 0.8
#: Other candidates that a comment names.
_SHOWN = 5
#: Keys of which each has one label, with several rows, for that to be no chance.
_MIN_KEYS = 20


@dataclasses.dataclass(frozen=True)
class LabelChoice:
    """The columns that are labels, and those that could be.

    Attributes:
        indices: The columns of the labels, the main one first.
        possible: The names, or numbers from 1 on, of columns that could be the label instead.
        close: Those of the main label and of all candidates that are nearly as good; [] if there
            is no doubt.
    """

    indices: list[int]
    possible: list[str]
    close: list[str]


def choose_labels(sample: SampledFile, path: str, label: str) -> LabelChoice:
    """Find the labels of a log, or look up those that are given.

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
        places |= {column.source: j for j, column in enumerate(columns) if column.name}
        places |= {name: j for j, name in enumerate(names) if name}
        given = dict.fromkeys([label] if label in places else label.split(","))
        for each in given:
            if each not in places:
                raise BadInputError(f"{path}: no column {each!r} for the label", f"it has {known}")
        return LabelChoice([places[each] for each in given], [], [])
    scores = [_score(column, j, sample) for j, column in enumerate(columns)]
    for j, column in enumerate(columns):
        if scores[j] and _is_attribute(column, columns):
            scores[j] = max(scores[j] - 30, 1)
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], -_positives(columns[j]), j))
    best, last = ranked[0], _find_last(sample)
    is_alike = _positives(columns[last]) >= _ALIKE * _positives(columns[best])
    if is_alike and scores[last] == scores[best]:
        best = last
    others = [j for j in ranked if j != best]
    if not scores[best]:
        raise BadInputError(
            f"{path}: no column looks like a label: none has two values or is named rating",
            f"name it with --label: it has {known}; a log of what was clicked alone has no "
            "label, it also needs rows of what was shown and not clicked",
        )
    others = [j for j in others if scores[j] >= 5]
    further = [j for j in others if is_event(columns[j]) and len(_canonical(columns[j])) == 2]
    others = [j for j in others if j not in further]
    close = [j for j in others if scores[j] >= scores[best] - _CLOSE]

    def name_all(indices: list[int]) -> list[str]:
        return [names[j] or str(j + 1) for j in indices]

    return LabelChoice(
        [best, *further],
        name_all(others)[:_SHOWN],
        name_all([best, *close])[:_SHOWN] if close else [],
    )


def _find_last(sample: SampledFile) -> int:
    """Return the number of the last column, where tables mostly have the label."""
    return max(k for k, column in enumerate(sample.columns) if column.name or not sample.named)


def is_event(column: Profile) -> bool:
    """Return whether a column says by its name what somebody did, or that it is a label."""
    name = column.name
    return is_called(DAY.sub("", name) if len(_canonical(column)) == 2 else name, "label", "event")


def _score(column: Profile, j: int, sample: SampledFile) -> int:
    """How much a column looks like a label, by name, values and place; 0: it is none."""
    name, named = column.name, sample.named
    if column.kind in ("empty", "time") or column.multi_hot or is_called(name, "weight"):
        return 0
    if named and not name:
        return 0
    score = 0
    if len(_canonical(column)) == 2:
        score = _score_two_values(column, j, sample)
    elif column.distinct == 1:  # of a file that is sorted by its label
        score = 45 if _is_perhaps(column) and set(column.counts) <= _BINARY else 0
    elif column.is_number:
        score = _score_numbers(column, named=named)
    elif column.kind == "string" and column.distinct <= _MAX_TEXTS:
        score = _score_texts(column)
    if score and column.missing > 0.05 * column.rows:
        score = max(score - 15, 1)
    return score


def _is_perhaps(column: Profile) -> bool:
    return is_event(column) or is_called(column.name, "perhaps")


def _score_two_values(column: Profile, j: int, sample: SampledFile) -> int:
    name, binary = column.name, set(column.counts) <= _BINARY
    score = 20
    if is_event(column):
        score += 80
    else:
        last_word = name.rpartition("_")[2]
        if _is_perhaps(column) or is_called(last_word, "perhaps") or _names_events(column):
            score += 30
        if j == _find_last(sample):
            score += 25 if binary else 20
        elif j == 0:
            score += 5
    if is_called(name, "label"):
        score += 10
    if re.search("click|clk", name, re.IGNORECASE):
        score += 5
    if not binary and not _natural(column):
        score -= 10
    if not _USUAL[0] <= _positives(column) / max(column.present, 1) <= _USUAL[1]:
        score -= 10
    return score


def _score_numbers(column: Profile, *, named: bool) -> int:
    name, minimum, maximum = column.name, column.numbers.min(), column.numbers.max()
    stars = 3 <= column.distinct <= _MAX_RATINGS and minimum >= 0 and 3 <= maximum <= _MAX_RATING
    if is_called(name, "label"):
        return 105 if stars else 30
    if stars and is_called(name, "rating"):
        return 60
    if stars and not named:
        return 25
    if is_event(column) and column.kind == "int" and minimum == 0:
        return 30  # counts
    if is_called(name, "outcome"):
        return 4 if name.lower().endswith("ratio") else 2
    return 0


def _score_texts(column: Profile) -> int:
    if is_called(column.name, "label"):
        return 105
    if _names_events(column):
        return 60
    if is_event(column):
        return 35
    return 25 if is_called(column.name, "perhaps") else 0


def _names_events(column: Profile) -> bool:
    """Return whether the values name kinds of events, one of which a model may predict."""
    kinds = [_plain(text) for text in column.counts]
    events = [is_called(kind, "event") for kind in kinds]
    known = [event or is_called(k, "kind of event") for k, event in zip(kinds, events, strict=True)]
    return column.kind == "string" and any(events) and all(known)


def _is_attribute(column: Profile, columns: list[Profile]) -> bool:
    """Return whether a column is a property of a user or an item, as the gender is of a user.

    Each value of another column then has one value of this one, in all of its rows, and each value
    of this one enough of the other's, which is no chance.
    """
    for key in columns:
        # a number that gives the label away, such as a delay, is no thing with properties
        is_thing = key.kind in ("string", "hex32", "bigint") or is_code(key.name)
        if key is column or not is_thing or key.distinct < _MIN_KEYS:
            continue
        if is_determined(column, key):
            both = (key.codes >= 0) & (column.codes >= 0)
            pairs = np.unique(key.codes[both] * column.distinct + column.codes[both])
            keys = np.bincount(pairs % column.distinct, minlength=column.distinct)
            if keys.min() >= _MIN_KEYS:
                return True
    return False


def is_determined(column: Profile, key: Profile) -> bool:
    """Return whether each value of ``key``, most of them in several rows, has one of a column."""
    if key.multi_hot or key.often < 2:
        return False
    both = (key.codes >= 0) & (column.codes >= 0)
    pairs = np.unique(key.codes[both] * column.distinct + column.codes[both])
    return len(pairs) == len(np.unique(key.codes[both]))


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
    if rule["name"] != column.source:
        rule["from"] = column.source
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
        rule["threshold"] = minimum = _threshold(column)
        numbers = column.sorted_numbers()
        why = (
            f"numbers from {numbers[0]:g} to {numbers[-1]:g}, of which "
            f"{np.mean(numbers >= minimum):.1%} are at least {minimum:g}: choose the threshold"
        )
    elif column.kind == "string" and 1 < column.distinct <= _MAX_TEXTS and not column.multi_hot:
        rule["positive"] = positive
        others = ", ".join(f"{text} {share[text]:.1%}" for text in share if text not in positive)
        why = f"{column.distinct} values: {texts}, {part:.1%}, is 1, all others 0; choose: {others}"
    else:
        raise BadInputError(
            f"{where} cannot be a label: it has {column.distinct} values, such as "
            + ", ".join(f"{text:.40}" for text in list(column.counts)[:3]),
            f"a label is a number, or one of at most {_MAX_TEXTS} texts: name one with --label",
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


def labels_of_rows(column: Profile, rule: dict[str, Any]) -> np.ndarray:
    """Return the label of each row by the keys of ``[label]``, NaN where it is missing."""
    known = column.numbers >= rule.get("threshold", 1)
    if "positive" in rule:
        known = np.array([text in rule["positive"] for text in column.counts])
    return np.append(known, np.nan)[column.codes]
