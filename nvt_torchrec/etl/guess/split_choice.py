"""Which rows are for training, validation and test."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from nvt_torchrec.etl.guess.names import find_split_name
from nvt_torchrec.etl.guess.sample import SampledFile
from nvt_torchrec.etl.guess.values import Profile
from nvt_torchrec.formats.splits import SPLITS

#: Microseconds of a day.
_DAY = 86_400_000_000
#: Of logs that are as long, cuts are at midnight.
_MIN_SPAN_OF_DAYS = 10 * _DAY
#: Shares where nothing else is known.
_SHARES: dict[str, Any] = {"valid": 0.1, "test": 0.1}


@dataclasses.dataclass(frozen=True)
class SplitChoice:
    """How rows are split.

    Attributes:
        keys: Those of ``[split]``.
        why: The comment.
        input_path: What the ETL reads, if that is not what was given; "" else.
    """

    keys: dict[str, Any]
    why: str
    input_path: str = ""

    def change(self, given: Mapping[str, float]) -> SplitChoice:
        """Return the same kind of split with the ``valid``, ``test`` and ``seed`` that are given.

        Shares take the place of fixed cuts by time.
        """
        keys, why = dict(self.keys), self.why
        if {"valid", "test"} & given.keys():
            keys = {key: value for key, value in keys.items() if not key.endswith("_from")}
            keys = {**keys, **_SHARES}
            why = f"by {keys['by']}, with shares as given"
        return SplitChoice({**keys, **given}, why, self.input_path)


def choose_split(
    sample: SampledFile, column: Profile | None, time: Profile | None, labels: list[Profile]
) -> SplitChoice:
    """Return how rows are split: as they are published, else so that days can be added.

    Args:
        sample: The rows.
        column: The column that :func:`find_split_column` found, if there is one.
        time: The column that says when a row happened, if there is one.
        labels: The columns of the labels, which rows of valid and test need.
    """
    published = SplitChoice({}, "")
    if column:
        published = _choose_values(column, labels)
    elif sample.splits:
        published = _choose_files(sample, labels)
    if published.keys:
        return published
    if sample.days:
        keys = {"by": "days"}
        reason = (
            f"the log has a file for each day: pass {sample.days} as --input_path; the last day "
            "is halved into valid and test, and `nvt-etl extend` adds further ones"
        )
    elif time:
        keys, reason = _choose_time(sample, time)
    else:
        keys = {"by": "share"} | _SHARES
        reason = "at random, because no column says when a row happened"
    return SplitChoice(keys, published.why + reason, published.input_path or sample.days)


def find_split_column(sample: SampledFile) -> int | None:
    """Return the index of the column that says of each row whether it is for training, if any.

    It is no feature, and a split at random would put rows of test into training.
    """
    for index, column in enumerate(sample.columns):
        splits = {find_split_name(text) for text in column.counts}
        # The head of a log may have rows for training alone.
        is_split = len(splits) > 1 or not (sample.whole or sample.splits)
        if "" not in splits and "train" in splits and is_split:
            return index
    return None


def _choose_values(column: Profile, labels: list[Profile]) -> SplitChoice:
    """Return the split by a column's values; without keys if only training has labels."""
    texts: dict[str, list[str]] = {}
    for text in column.counts:
        texts.setdefault(find_split_name(text), []).append(text)
    why = ""
    for split in ("valid", "test"):
        if split in texts and not _have_labels(column, texts[split], labels):
            why += (
                f"rows of {column.name} {texts.pop(split)[0]} have no label, so they are left out; "
            )
            if len(texts) == 1:
                return SplitChoice({}, why)
    if len(texts) == 1:
        texts["test"] = ["test"]
        why += (
            "the rows that were read are all for training: write what the others have as test, and "
            "as valid if there is one; "
        )
    keys: dict[str, Any] = {"by": "values", "column": column.source}
    keys |= _name_splits({split: _simplify_list(given) for split, given in texts.items()})
    if "valid" not in texts:
        why += "valid is a tenth of the rows for training; "
    return SplitChoice(keys, f"{why}as {column.name} says")


def _have_labels(column: Profile, texts: list[str], labels: list[Profile]) -> bool:
    """Return whether some rows with these texts in a column have each of the labels."""
    numbers = [number for number, text in enumerate(column.counts) if text in texts]
    rows = np.isin(column.codes, numbers)
    return all(np.any(label.codes[rows] >= 0) for label in labels)


def _name_splits(given: dict[str, Any]) -> dict[str, Any]:
    """Return what is train, valid and test, given training and at least one other.

    What is published besides the rows for training is test, if it is one thing.
    """
    splits = {**given}
    if "test" not in splits:
        splits["test"] = splits.pop("valid")
    splits.setdefault("valid", _SHARES["valid"])
    return {split: splits[split] for split in SPLITS}


def _simplify_list(names: list[str]) -> str | list[str]:
    """Return the only name of a list, or the list."""
    return names[0] if len(names) == 1 else names


def _choose_files(sample: SampledFile, labels: list[Profile]) -> SplitChoice:
    """Return the split of files that are named for it; without keys if only training has labels."""
    files: dict[str, Any] = {}
    why = ""
    for split in SPLITS:
        names = sample.splits.get(split, [])
        if not names:
            continue
        if split == "train" or sample.has_labels(split, labels):
            files[split] = _simplify_list(names)
        else:
            why += f"{names[0]} has no label, so its rows are neither for training nor for test; "
    if len(files) == 1:
        names = sample.splits["train"]
        file = names[0] if len(names) == 1 else f"{_common_beginning(names)}*"
        return SplitChoice({}, why, f"{sample.root}/{file}")
    if "test" not in files:
        why += "valid is a tenth of the training rows, as only one other file has labels; "
    keys = {"by": "files"} | _name_splits(files)
    return SplitChoice(keys, f"{why}as the files are named", sample.root)


def _common_beginning(names: list[str]) -> str:
    """Return the characters that all names begin with."""
    first, last = min(names), max(names)  # all others are between them
    length = 0
    while length < len(first) and first[length] == last[length]:
        length += 1
    return first[:length]


def _choose_time(sample: SampledFile, time: Profile) -> tuple[dict[str, Any], str]:
    split = {"by": "time", "column": time.source}
    if time.time_format:
        split["time_format"] = time.time_format
    why = f"{time.name} is a time, and a model scores rows newer than those it was trained on"
    cuts = _cut_times(time, sample)
    if cuts:
        split["valid_from"], split["test_from"] = cuts
        why += (
            ": valid and test are the last tenths of the rows. The cuts stay where they are, so "
            "later days, which `nvt-etl extend` adds as files named by a number or a date, are "
            "test: to train on them, set later cuts and run the ETL again. Shares, valid = 0.1 "
            "and test = 0.1, cannot be extended"
        )
        return split, why
    why += (
        ": the last tenth of the rows is test. For days that `nvt-etl extend` adds, give the cuts "
        "themselves: valid_from and test_from instead of the shares"
    )
    return split | _SHARES, why


def _cut_times(column: Profile, sample: SampledFile) -> list[str]:
    """Return when validation and test begin; [] if the times cannot be cut so."""
    if not sample.whole:
        return []
    times = column.sorted_numbers()
    first, last = times[0], times[-1]
    cuts = times[[int(share * len(times)) for share in (0.8, 0.9)]]
    days = cuts // _DAY * _DAY
    if last - first >= _MIN_SPAN_OF_DAYS and days[0] < days[1]:
        cuts = days
    if not first < cuts[0] < cuts[1] <= last:
        return []
    texts = np.datetime_as_string(cuts.astype("M8[us]"), unit="s")
    return [text.replace("T", " ").removesuffix(" 00:00:00") for text in texts.tolist()]
