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
#: The smallest and the largest share of positives that a label mostly has.
_MIN_SHARE = 0.01
_MAX_SHARE = 0.6
_BINARY = {"0", "1", "0.0", "1.0"}
#: Texts that a label has at most.
_MAX_TEXTS = 20
#: The most distinct numbers of a rating.
_MAX_RATINGS = 11
#: The largest number of a rating.
_MAX_RATING = 10
#: The least score of a column that may be a label.
_MIN_SCORE = 5
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
        # By number, by the name in the file, and by the name alone; names come before numbers.
        indices = {str(j + 1): j for j in range(len(columns))}
        indices |= {column.source: j for j, column in enumerate(columns) if column.name}
        indices |= {name: j for j, name in enumerate(names) if name}
        given = dict.fromkeys([label] if label in indices else label.split(","))
        for name in given:
            if name not in indices:
                raise BadInputError(f"{path}: no column {name!r} for the label", f"it has {known}")
        return LabelChoice([indices[name] for name in given], [], [])
    scores = [_score(column, j, sample) for j, column in enumerate(columns)]
    for j, column in enumerate(columns):
        if scores[j] and _is_attribute(column, columns):
            scores[j] = max(scores[j] - 30, 1)
    positives = [_count_positives(column) for column in columns]
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], -positives[j], j))
    best = ranked[0]
    last = _find_last(sample)
    if scores[last] == scores[best] and positives[last] >= _ALIKE * positives[best]:
        best = last
    others = [j for j in ranked if j != best]
    if not scores[best]:
        raise BadInputError(
            f"{path}: no column looks like a label: none has two values or is named rating",
            f"name it with --label: it has {known}; a log of what was clicked alone has no "
            "label, it also needs rows of what was shown and not clicked",
        )
    # Further events with two values are labels as well.
    further = []
    possible = []
    for j in others:
        if scores[j] < _MIN_SCORE:
            continue
        if is_event(columns[j]) and len(_canonical_values(columns[j])) == 2:
            further.append(j)
        else:
            possible.append(j)
    close = [j for j in possible if scores[j] >= scores[best] - _CLOSE]

    def name_all(indices: list[int]) -> list[str]:
        return [names[j] or str(j + 1) for j in indices]

    return LabelChoice(
        [best, *further],
        name_all(possible)[:_SHOWN],
        name_all([best, *close])[:_SHOWN] if close else [],
    )


def _find_last(sample: SampledFile) -> int:
    """Return the number of the last column, where tables mostly have the label."""
    return max(k for k, column in enumerate(sample.columns) if column.name or not sample.named)


def is_event(column: Profile) -> bool:
    """Return whether a column says by its name what somebody did, or that it is a label."""
    name = column.name
    if len(_canonical_values(column)) == 2:
        name = DAY.sub("", name)
    return is_called(name, "label", "event")


def _score(column: Profile, j: int, sample: SampledFile) -> int:
    """Return how much a column looks like a label, by name, values and position; 0: not at all."""
    name, named = column.name, sample.named
    if column.kind in ("empty", "time") or column.multi_hot or is_called(name, "weight"):
        return 0
    if named and not name:
        return 0
    score = 0
    if len(_canonical_values(column)) == 2:
        score = _score_two_values(column, j, sample)
    elif column.distinct == 1:
        # The head of a file that is sorted by its label has one value of it.
        if _is_perhaps(column) and set(column.counts) <= _BINARY:
            score = 45
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
    if not binary and not _find_true_texts(column):
        score -= 10
    if not _MIN_SHARE <= _count_positives(column) / max(column.present, 1) <= _MAX_SHARE:
        score -= 10
    return score


def _score_numbers(column: Profile, *, named: bool) -> int:
    name, minimum, maximum = column.name, column.numbers.min(), column.numbers.max()
    is_rating = 3 <= column.distinct <= _MAX_RATINGS
    is_rating = is_rating and minimum >= 0 and 3 <= maximum <= _MAX_RATING
    if is_called(name, "label"):
        return 105 if is_rating else 30
    if is_rating and is_called(name, "rating"):
        return 60
    if is_rating and not named:
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
    if column.kind != "string":
        return False
    values = [_simplify(text) for text in column.counts]
    has_event = any(is_called(value, "event") for value in values)
    return has_event and all(is_called(value, "event", "kind of event") for value in values)


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


def _find_true_texts(column: Profile) -> set[str]:
    """Return the texts that say yes, or of two the one that the other negates; set() if none."""
    true = {text for text in column.counts if _simplify(text) in _TRUE}
    if true and len(true) < column.distinct:
        return true
    values = _canonical_values(column)
    if len(values) != 2:
        return set()
    a, b = values
    negated = set()
    if re.fullmatch(_NOT + re.escape(a), b):
        negated.add(a)
    if re.fullmatch(_NOT + re.escape(b), a):
        negated.add(b)
    return {text for text in column.counts if _simplify(text) in negated}


def _choose_positive(column: Profile) -> set[str]:
    """Return the texts that are 1: those that say so, else the rarest that is no exception."""
    counts = column.counts
    if set(counts) <= _BINARY:
        return set(counts) & {"1", "1.0"}
    true_texts = _find_true_texts(column)
    if true_texts:
        return true_texts
    frequent = [text for text in counts if counts[text] >= _MIN_SHARE * column.present]
    rarest = min(frequent or counts, key=lambda text: (counts[text], text), default="")
    return {text for text in counts if _simplify(text) == _simplify(rarest)}


def _count_positives(column: Profile) -> int:
    """Return how many rows of a column with two values are positive; 0 of others."""
    if len(_canonical_values(column)) > 2:
        return 0
    return sum(column.counts[text] for text in _choose_positive(column))


def _canonical_values(column: Profile) -> set[str]:
    """Return the values without differences in how they are written."""
    return set(column.counts) if column.distinct > 8 else set(map(_simplify, column.counts))


def _simplify(text: str) -> str:
    return text.casefold().removesuffix(".").removesuffix(".0")


def label_rule(column: Profile, where: str) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[label]`` and the comment; ``where`` names file and column in errors.

    Raises:
        BadInputError: The column has too many values to be a label.
    """
    shares = {text: count / max(column.present, 1) for text, count in column.counts.items()}
    rule: dict[str, Any] = {"name": spec_name(column.name)}
    if rule["name"] != column.source:
        rule["from"] = column.source
    if "trim" in column.reading:
        rule["trim"] = True
    positive = sorted(_choose_positive(column))
    positive_share = sum(shares[text] for text in positive)
    positive_texts = " or ".join(positive)
    if set(shares) <= _BINARY:
        why = f"0 and 1, {positive_share:.1%} are 1"
    elif len(_canonical_values(column)) == 2:
        rule |= {"positive": positive, "negative": sorted(shares.keys() - set(positive))}
        why = f"two values, {positive_share:.1%} are {positive_texts}"
    elif column.is_number and column.distinct > 1:
        threshold = _choose_threshold(column)
        rule["threshold"] = threshold
        numbers = column.sorted_numbers()
        why = (
            f"numbers from {numbers[0]:g} to {numbers[-1]:g}, of which "
            f"{np.mean(numbers >= threshold):.1%} are at least {threshold:g}: choose the threshold"
        )
    elif column.kind == "string" and 1 < column.distinct <= _MAX_TEXTS and not column.multi_hot:
        rule["positive"] = positive
        others = [f"{text} {shares[text]:.1%}" for text in shares if text not in positive]
        why = (
            f"{column.distinct} values: {positive_texts}, {positive_share:.1%}, is 1, all others "
            f"0; choose: {', '.join(others)}"
        )
    else:
        examples = ", ".join(f"{text:.40}" for text in list(column.counts)[:3])
        raise BadInputError(
            f"{where} cannot be a label: it has {column.distinct} values, such as {examples}",
            f"a label is a number, or one of at most {_MAX_TEXTS} texts: name one with --label",
        )
    if column.missing:
        why += f"; {column.missing} rows have none and are malformed"
    return rule, why


def _choose_threshold(column: Profile) -> float:
    """Return the least number that is a 1.

    Of events it is 1; of few numbers the smallest in the upper half of the range, 4 for ratings up
    to 5; of many the number that a quarter of the rows reach.
    """
    numbers = column.sorted_numbers()
    if is_called(column.name, "event") and numbers[0] == 0:
        return 1
    if column.distinct > _MAX_RATINGS:
        number = numbers[len(numbers) * 3 // 4]
    else:
        upper = numbers[numbers >= 0.75 * numbers[-1]]
        number = upper[0] if len(upper) else numbers[-1]  # all may be negative
    return int(number) if number == int(number) else float(number)


def read_labels(column: Profile, rule: dict[str, Any]) -> np.ndarray:
    """Return the label of each row by the keys of ``[label]``, NaN where it is missing."""
    known = column.numbers >= rule.get("threshold", 1)
    if "positive" in rule:
        known = np.array([text in rule["positive"] for text in column.counts])
    return np.append(known, np.nan)[column.codes]
