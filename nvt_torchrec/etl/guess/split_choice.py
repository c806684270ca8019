"""Choose which rows are for training, validation and test."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from nvt_torchrec.etl.guess.names import find_split_name
from nvt_torchrec.etl.guess.sample import SampledFile
from nvt_torchrec.etl.guess.values import Profile
from nvt_torchrec.formats.splits import SPLITS

#: Microseconds in a day.
_DAY = 86_400_000_000
#: In logs of at least this length, cuts are at midnight.
_MIN_SPAN_OF_DAYS = 10 * _DAY
#: Default shares.
_SHARES: dict[str, Any] = {"valid": 0.1, "test": 0.1}


@dataclasses.dataclass(frozen=True)
class SplitChoice:
    """A choice of the split.

    Attributes:
        keys: The keys of ``[split]``.
        why: The comment above it.
        input_path: The path that the ETL must read, if it is not the given one; else "".
    """

    keys: dict[str, Any]
    why: str
    input_path: str = ""

    def override(self, given: Mapping[str, float]) -> SplitChoice:
        """Return the same kind of split with the given ``valid``, ``test`` and ``seed``.

        Shares replace fixed cuts by time.
        """
        keys = dict(self.keys)
        why = self.why
        if {"valid", "test"} & given.keys():
            keys = {key: value for key, value in keys.items() if not key.endswith("_from")}
            keys = {**keys, **_SHARES}
            why = f"by {keys['by']}, with the given shares"
        return SplitChoice({**keys, **given}, why, self.input_path)


def choose_split(
    sample: SampledFile, column: Profile | None, time: Profile | None, labels: list[Profile]
) -> SplitChoice:
    """Choose a split: the published one if there is one, else one by days, by time or at random.

    Args:
        sample: The sample of the log.
        column: The column that :func:`find_split_column` found, or None.
        time: The column with the time of a row, or None.
        labels: The columns of the labels; rows of valid and test need them.
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
            "is halved into valid and test, and `nvt-etl extend` adds more days"
        )
    elif time:
        keys, reason = _choose_time(sample, time)
    else:
        keys = {"by": "share"} | _SHARES
        reason = "at random, because no column has the time of a row"
    return SplitChoice(keys, published.why + reason, published.input_path or sample.days)


def find_split_column(sample: SampledFile) -> int | None:
    """Return the index of the column that names the split of each row, or None.

    Such a column is not a feature, and a random split would put rows of test into training.
    """
    for index, column in enumerate(sample.columns):
        splits = {find_split_name(text) for text in column.counts}
        # The sample may have rows for training only, if it is a part of the log.
        is_split = len(splits) > 1 or not (sample.whole or sample.splits)
        if "" not in splits and "train" in splits and is_split:
            return index
    return None


def _choose_values(column: Profile, labels: list[Profile]) -> SplitChoice:
    """Return the split by a column's values; without keys if only training rows have labels."""
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
            "the rows that were read are all for training: set test, and valid if it exists, to "
            "the values of the other rows; "
        )
    keys: dict[str, Any] = {"by": "values", "column": column.source}
    keys |= _complete_splits({split: _simplify_list(given) for split, given in texts.items()})
    if "valid" not in texts:
        why += "valid is a tenth of the rows for training; "
    return SplitChoice(keys, f"{why}as {column.name} says")


def _have_labels(column: Profile, texts: list[str], labels: list[Profile]) -> bool:
    """Return True if each label is present in some row that has one of the texts in a column."""
    codes = [code for code, text in enumerate(column.counts) if text in texts]
    rows = np.isin(column.codes, codes)
    return all(np.any(label.codes[rows] >= 0) for label in labels)


def _complete_splits(given: dict[str, Any]) -> dict[str, Any]:
    """Return train, valid and test, given train and at least one of the others.

    A single other split is test, even if it is published as valid; valid is then a share of train.
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
    """Return the split of files by their names; without keys if only training files have labels."""
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
        file = names[0]
        if len(names) > 1:
            file = f"{os.path.commonprefix(names)}*"  # noqa: RUF071 - by character, for a glob
        return SplitChoice({}, why, f"{sample.root}/{file}")
    if "test" not in files:
        why += "valid is a tenth of the training rows, as only one other file has labels; "
    keys = {"by": "files"} | _complete_splits(files)
    return SplitChoice(keys, f"{why}as the files are named", sample.root)


def _choose_time(sample: SampledFile, time: Profile) -> tuple[dict[str, Any], str]:
    """Return the keys of a split by time, and the comment."""
    split = {"by": "time", "column": time.source}
    if time.time_format:
        split["time_format"] = time.time_format
    why = f"by {time.name}, because a model scores rows newer than those it was trained on"
    cuts = _find_time_cuts(time, sample)
    if cuts:
        split["valid_from"], split["test_from"] = cuts
        why += (
            ": valid and test are the last tenths of the rows. The cuts do not move, so later "
            "days, which `nvt-etl extend` adds as files named by a number or a date, are test: to "
            "train on them, set later cuts and run the ETL again. With shares instead of cuts, "
            "valid = 0.1 and test = 0.1, no days could be added"
        )
        return split, why
    why += (
        ": the last tenth of the rows is test. To add days with `nvt-etl extend` later, set the "
        "cuts valid_from and test_from instead of the shares"
    )
    return split | _SHARES, why


def _find_time_cuts(column: Profile, sample: SampledFile) -> list[str]:
    """Return the times at which valid and test begin; [] if the sample does not tell."""
    if not sample.whole:
        return []
    times = column.sorted_numbers()
    first = times[0]
    last = times[-1]
    cuts = times[[int(0.8 * len(times)), int(0.9 * len(times))]]
    days = cuts // _DAY * _DAY
    if last - first >= _MIN_SPAN_OF_DAYS and days[0] < days[1]:
        cuts = days
    if not first < cuts[0] < cuts[1] <= last:
        return []
    texts = np.datetime_as_string(cuts.astype("M8[us]"), unit="s")
    return [text.replace("T", " ").removesuffix(" 00:00:00") for text in texts.tolist()]
