"""Choose the columns of the labels, and find how to read them as 0 and 1."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.names import DAY, is_called, is_code
from nvt_torchrec.etl.guess.sample import SampledFile, make_spec_name
from nvt_torchrec.etl.guess.values import Profile

_TRUE = (
    "1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos", "won", "success",
    "successful", "approved", "accepted", "paid", "buy", "bought", "purchase", "purchased",
    "order", "ordered", "transaction",
)  # fmt: skip
_NOT = r"(not?|non|un|in|dis)[\W_]*"
#: Usual range of the share of positives.
_MIN_SHARE = 0.01
_MAX_SHARE = 0.6
_BINARY = {"0", "1", "0.0", "1.0"}
#: Maximum number of distinct strings of a label.
_MAX_TEXTS = 20
#: Maximum number of distinct values of a rating.
_MAX_RATINGS = 11
#: The largest rating.
_MAX_RATING = 10
#: Minimum score of a column that may be a label.
_MIN_SCORE = 5
#: A candidate whose score is at most this much below the best one may equally be the label.
_MAX_SCORE_GAP = 15
#: If the last column has the best score too, it is the label if it has at least this share of the
#: best column's positives.
_MIN_SHARE_OF_POSITIVES = 0.8
#: Maximum number of other candidates to name in a comment.
_MAX_SHOWN = 5
#: Minimum number of keys with one value each, for that not to be chance.
_MIN_KEYS = 20


@dataclasses.dataclass(frozen=True)
class LabelChoice:
    """The columns that are labels, and those that could be.

    Attributes:
        indices: The indices of the labels' columns, the main label first.
        alternatives: The names, or numbers from 1, of columns that could be the label instead.
        candidates: The names, or numbers from 1, of the main label and of all columns that are
            nearly as good; [] if there is no doubt.
    """

    indices: list[int]
    alternatives: list[str]
    candidates: list[str]


def choose_labels(sample: SampledFile, path: str, label: str) -> LabelChoice:
    """Find the labels of a log, or look up the given ones.

    Args:
        sample: The sample of the log.
        path: Names the file in errors.
        label: The names of the labels' columns, or their numbers from 1, separated by commas; "" to
            find them.

    Raises:
        BadInputError: A given column does not exist, or no column looks like a label.
    """
    columns = sample.columns
    names = [column.name for column in columns]
    known = ", ".join(filter(None, names[:20])) or f"columns 1 to {len(columns)}"
    if label:
        # A label is given by number, by its name in the file, or by its name without a declared
        # type. If these clash, names win over numbers.
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
        if scores[j] and _is_attribute(column, columns):  # the gender of a user is no label
            scores[j] = max(scores[j] - 30, 1)
    positives = [_count_positives(column) for column in columns]
    ranked = sorted(range(len(scores)), key=lambda j: (-scores[j], -positives[j], j))
    best = ranked[0]
    last = _find_last_column(sample)
    min_positives = _MIN_SHARE_OF_POSITIVES * positives[best]
    if scores[last] == scores[best] and positives[last] >= min_positives:
        best = last
    others = [j for j in ranked if j != best]
    if not scores[best]:
        raise BadInputError(
            f"{path}: no column looks like a label: none has two values or is named rating",
            f"name it with --label: the columns are {known}; a log of clicks alone has no label: "
            "it also needs rows for items that were shown and not clicked",
        )
    # Other events with two values are labels as well.
    more_labels = []
    alternatives = []
    for j in others:
        if scores[j] < _MIN_SCORE:
            continue
        if is_event(columns[j]) and len(_canonical_values(columns[j])) == 2:
            more_labels.append(j)
        else:
            alternatives.append(j)
    candidates = [j for j in alternatives if scores[j] >= scores[best] - _MAX_SCORE_GAP]
    if candidates:
        candidates.insert(0, best)

    def name_columns(indices: list[int]) -> list[str]:
        return [names[j] or str(j + 1) for j in indices][:_MAX_SHOWN]

    return LabelChoice([best, *more_labels], name_columns(alternatives), name_columns(candidates))


def _find_last_column(sample: SampledFile) -> int:
    """Return the index of the last column, where most tables have the label."""
    return max(j for j, column in enumerate(sample.columns) if column.name or not sample.named)


def is_event(column: Profile) -> bool:
    """Return True if the name of a column says what somebody did, or that it is a label."""
    name = column.name
    if len(_canonical_values(column)) == 2:
        name = DAY.sub("", name)
    return is_called(name, "label", "event")


def _score(column: Profile, j: int, sample: SampledFile) -> int:
    """Rate how much a column looks like a label, by name, values and position; 0: not at all."""
    if column.kind in ("empty", "time") or column.multi_hot or is_called(column.name, "weight"):
        return 0
    if sample.named and not column.name:
        return 0
    score = 0
    if len(_canonical_values(column)) == 2:
        score = _score_two_values(column, j, sample)
    elif column.distinct == 1:
        # If the file is sorted by its label, the sample has only one value of it.
        if _may_be_label(column) and set(column.counts) <= _BINARY:
            score = 45
    elif column.is_number:
        score = _score_numbers(column, named=sample.named)
    elif column.kind == "string" and column.distinct <= _MAX_TEXTS:
        score = _score_texts(column)
    if score and column.missing > 0.05 * column.rows:
        score = max(score - 15, 1)
    return score


def _may_be_label(column: Profile) -> bool:
    """Return True if the name of a column fits a label, for certain or perhaps."""
    return is_event(column) or is_called(column.name, "perhaps")


def _score_two_values(column: Profile, j: int, sample: SampledFile) -> int:
    """Rate a column with two distinct values."""
    name = column.name
    is_binary = set(column.counts) <= _BINARY
    score = 20
    if is_event(column):
        score += 80
    else:
        last_word = name.rpartition("_")[2]
        if _may_be_label(column) or is_called(last_word, "perhaps") or _has_event_values(column):
            score += 30
        if j == _find_last_column(sample):
            score += 25 if is_binary else 20
        elif j == 0:
            score += 5
    if is_called(name, "label"):
        score += 10
    if re.search("click|clk", name, re.IGNORECASE):
        score += 5
    if not is_binary and not _find_true_texts(column):
        score -= 10
    if not _MIN_SHARE <= _count_positives(column) / max(column.present, 1) <= _MAX_SHARE:
        score -= 10
    return score


def _score_numbers(column: Profile, *, named: bool) -> int:
    """Rate a column of numbers, such as ratings."""
    name = column.name
    minimum = column.numbers.min()
    maximum = column.numbers.max()
    is_rating = 3 <= column.distinct <= _MAX_RATINGS
    is_rating = is_rating and minimum >= 0 and 3 <= maximum <= _MAX_RATING
    if is_called(name, "label"):
        return 105 if is_rating else 30
    if is_rating and is_called(name, "rating"):
        return 60
    if is_rating and not named:
        return 25
    if is_event(column) and column.kind == "int" and minimum == 0:
        return 30  # the number of such events
    if is_called(name, "outcome"):
        return 4 if name.lower().endswith("ratio") else 2
    return 0


def _score_texts(column: Profile) -> int:
    """Rate a column of a few distinct strings."""
    if is_called(column.name, "label"):
        return 105
    if _has_event_values(column):
        return 60
    if is_event(column):
        return 35
    return 25 if is_called(column.name, "perhaps") else 0


def _has_event_values(column: Profile) -> bool:
    """Return True if the values name kinds of events, one of which a model may predict."""
    if column.kind != "string":
        return False
    values = [_simplify(text) for text in column.counts]
    has_event = any(is_called(value, "event") for value in values)
    return has_event and all(is_called(value, "event", "kind of event") for value in values)


def _is_attribute(column: Profile, columns: list[Profile]) -> bool:
    """Return True if a column is an attribute of a user or an item, as a gender is of a user.

    Then each value of some other column, the key, has the same value of this column in all of its
    rows. Each value of this column must have enough keys, for that not to be chance.
    """
    for key in columns:
        # A number that gives the label away, such as a delay, determines it too, but is not a key.
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
    """Return True if each value of ``key`` has one value of a column in all of its rows.

    Keys with fewer than two rows on average determine nothing.
    """
    if key.multi_hot or key.mean_count < 2:
        return False
    both = (key.codes >= 0) & (column.codes >= 0)
    pairs = np.unique(key.codes[both] * column.distinct + column.codes[both])
    return len(pairs) == len(np.unique(key.codes[both]))


def _find_true_texts(column: Profile) -> set[str]:
    """Return the strings that mean yes, or the one that the other one negates; set() if none."""
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
    """Return the strings that become 1: those that mean yes, or else the rarest one.

    Exceptions, which are in less than ``_MIN_SHARE`` of the rows, do not count as the rarest.
    """
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
    """Count the positive rows of a column with at most two values; return 0 for other columns."""
    if len(_canonical_values(column)) > 2:
        return 0
    return sum(column.counts[text] for text in _choose_positive(column))


def _canonical_values(column: Profile) -> set[str]:
    """Return the distinct values without differences of spelling, such as 1 and 1.0."""
    return set(column.counts) if column.distinct > 8 else set(map(_simplify, column.counts))


def _simplify(text: str) -> str:
    """Remove differences of spelling: upper case, and a final "." or ".0"."""
    return text.casefold().removesuffix(".").removesuffix(".0")


def make_label_rule(column: Profile, where: str) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[label]`` and the comment above it.

    Args:
        column: The column of the label.
        where: Names the file and the column in errors.

    Raises:
        BadInputError: The column has too many values to be a label.
    """
    shares = {text: count / max(column.present, 1) for text, count in column.counts.items()}
    rule: dict[str, Any] = {"name": make_spec_name(column.name)}
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
            f"are 0; or choose {', '.join(others)}"
        )
    else:
        examples = ", ".join(f"{text:.40}" for text in list(column.counts)[:3])
        raise BadInputError(
            f"{where} cannot be a label: it has {column.distinct} values, such as {examples}",
            f"a label has numbers, or at most {_MAX_TEXTS} different strings: name another column "
            "with --label",
        )
    if column.missing:
        why += f"; {column.missing} rows have no label and are malformed"
    return rule, why


def _choose_threshold(column: Profile) -> float:
    """Return the smallest number that becomes 1.

    For numbers of events it is 1. If there are few distinct numbers, it is the smallest one that
    reaches three quarters of the largest: 4 for ratings up to 5. Otherwise a quarter of the rows
    reach it.
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
    """Read the label of each row by the keys of ``[label]``.

    Returns:
        float64 [rows]: 0, 1, or NaN if the label is missing.
    """
    is_positive = column.numbers >= rule.get("threshold", 1)
    if "positive" in rule:
        is_positive = np.array([text in rule["positive"] for text in column.counts])
    # The code −1 of a missing value selects the NaN at the end.
    return np.append(is_positive, np.nan)[column.codes]
