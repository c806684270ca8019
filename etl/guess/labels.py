"""Which column is the label, and which of its values are positive."""

from __future__ import annotations

import re
from typing import Any

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.guess.sample import SampledFile
from nvt_torchrec.etl.guess.values import Profile

_LABEL_NAMES = re.compile(
    r"^(is_?)?(label|labels|target|y|click|clicks|clicked|conversion|converted|convert|class|"
    r"outcome|response|purchased?|bought|income|liked?|churn|fraud|default|survived|installed)s?$",
    re.IGNORECASE,
)
_RATING_NAMES = re.compile(r"(^|_)(rating|ratings|stars|score|grade)$", re.IGNORECASE)
_TRUE = ("1", "true", "yes", "y", "t", "click", "clicked", "positive", "pos", "won", "success")


def chosen_label(columns: list[Profile], path: str, label: str) -> int:
    """Return the position of the column that is named, or numbered from 1 on.

    Raises:
        BadInputError: there is no such column; the message begins with ``path``.
    """
    names = [column.name for column in columns]
    if label in names:
        return names.index(label)
    if label.isdigit() and 1 <= int(label) <= len(columns):
        return int(label) - 1
    known = ", ".join(filter(None, names[:20])) or f"1 to {len(columns)}"
    raise BadInputError(f"{path}: no column {label!r} for the label", f"it has {known}")


def find_label(sample: SampledFile, path: str) -> int:
    """Return the position of the column that looks most like a label.

    Raises:
        BadInputError: none does; the message begins with ``path``.
    """
    scores = [_label_score(column, j, sample) for j, column in enumerate(sample.columns)]
    best = max(range(len(scores)), key=lambda j: (scores[j], -j))
    if not scores[best]:
        raise BadInputError(
            f"{path}: no column looks like a label: none has two values",
            "name it with --label, by its name or, from 1 on, its number",
        )
    return best


def _label_score(column: Profile, j: int, sample: SampledFile) -> int:
    """How much a column looks like a label; 0: it is none."""
    if column.kind in ("empty", "time") or column.multi_hot:
        return 0
    named = bool(_LABEL_NAMES.search(column.name))
    at_an_end = j in (0, len(sample.columns) - 1)
    if len(_canonical(column)) == 2:
        score = 20 + 50 * named + 10 * at_an_end + 10 * (set(column.counts) <= _BINARY)
    elif named and set(column.counts) <= _BINARY:
        score = 45  # a file that is sorted by its label
    elif _is_rating(column, sample.header):
        score = 40 if sample.header else 8
    else:
        return 0
    return max(score - 15 * bool(column.missing), 1)


_BINARY = {"0", "1", "0.0", "1.0"}


def _canonical(column: Profile) -> set[str]:
    """Return the values without differences in how they are written."""
    if column.distinct > 8:
        return set(column.counts)
    return {text.casefold().removesuffix(".").removesuffix(".0") for text in column.counts}


def _is_rating(column: Profile, header: bool) -> bool:
    if column.kind not in ("int", "float") or not 3 <= column.distinct <= 11:
        return False
    if column.least < 0 or column.most > 10 or column.most < 3:
        return False
    return bool(_RATING_NAMES.search(column.name)) if header else True


def label_rule(column: Profile, path: str) -> tuple[dict[str, Any], str]:
    """Return the keys of ``[label]`` and why.

    Raises:
        BadInputError: the column has too many values to be a label.
    """
    share = {text: often / max(column.present, 1) for text, often in column.counts.items()}
    extra = f"; {column.missing} rows have none and are malformed" if column.missing else ""
    name = column.name
    rule: dict[str, Any] = {"name": name}
    if set(share) <= _BINARY:
        ones = share.get("1", 0) + share.get("1.0", 0)
        return rule, f"0 and 1, {ones:.1%} are 1{extra}"
    if len(_canonical(column)) == 2:
        ones = {text for text in share if _of(text) in _TRUE}
        if not ones or len(ones) == len(share):
            rarest = min(share, key=lambda text: (share[text], text))
            ones = {text for text in share if _of(text) == _of(rarest)}
        rule["positive"] = sorted(ones)
        rule["negative"] = sorted(share.keys() - ones)
        part = sum(share[text] for text in ones)
        return rule, f"two values, {part:.1%} are {' or '.join(sorted(ones))}{extra}"
    if column.kind in ("int", "float") and column.distinct > 1:
        threshold = _threshold(column)
        part = sum(o for text, o in share.items() if column.number(text) >= threshold)
        rule["threshold"] = threshold
        return rule, (
            f"numbers from {column.least:g} to {column.most:g}, of which {part:.1%} are at least "
            f"{threshold:g}: choose the threshold{extra}"
        )
    raise BadInputError(
        f"{path}: column {name or '?'} cannot be a label: it has {column.distinct} values",
        "name another one with --label",
    )


def _of(text: str) -> str:
    return text.casefold().removesuffix(".").removesuffix(".0")


def _threshold(column: Profile) -> float:
    """Return the smallest value that is in the upper half of the range, 4 for ratings up to 5."""
    numbers = sorted({column.number(text) for text in column.counts})
    wanted = 0.75 * column.most
    number = next((n for n in numbers if n >= wanted), numbers[-1])
    return int(number) if number == int(number) else number
