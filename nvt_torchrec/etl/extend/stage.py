"""The next generation of an output, ready beside it: what the switch will rename.

Its directory is laid out as ``OUT``. Parts are hard links there, under the names that they will
have, so that schemas, footers and the report are written by the same functions as those of a run,
and the generation before stays as it is.

Days for training are earlier than those for validation and test. No part is written again: a day
that goes to another split is renamed, and the halves of a day are halves from the beginning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.extend.claim import NEXT
from nvt_torchrec.etl.finish.manifest import add_counts, summed
from nvt_torchrec.etl.state.output import PARTS
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Extension, InputFile, Manifest, PartFile
from nvt_torchrec.formats.splits import SPLITS


def link_parts(
    output: Path, work: Path, files: list[str], renamed: dict[str, str], new: dict[str, str]
) -> Path:
    """Make the directory of the next generation's splits, with links to all parts.

    Args:
        output: The output directory.
        work: The state of the day.
        files: The parts there are, by their names now.
        renamed: Their new names, of those that get one.
        new: The names of the new day's parts, by those that they have in ``work``.

    Returns:
        The directory of the splits.

    Raises:
        OSError: The directory cannot be written, or its file system has no hard links.
    """
    splits, now = EtlOutput(work / NEXT).splits, EtlOutput(output).splits
    shutil.rmtree(splits, ignore_errors=True)
    for split in SPLITS:
        (splits / split).mkdir(parents=True)
    for file in files:
        os.link(now / file, splits / renamed.get(file, file), follow_symlinks=False)
    for file, name in new.items():
        os.link(work / PARTS / file, splits / name)
    return splits


def left_out(
    before: Manifest, day: DayFile, assignment: Assignment | None, keep: int | None
) -> set[int]:
    """Return the training days older than the newest ``keep`` days; None: all are kept.

    The days of a run whose rows were mixed are left out together.
    """
    days = sorted({*map(int, before.by_day), day.day})
    dropped = set(days[:-keep]) - set(assignment or ()) if keep else set()
    if before.settings.get("shuffle") == "full":
        mixed = {part.day for part in before.files if part.generation == 0}
        dropped -= set() if mixed <= dropped else mixed
    return dropped


def files_of_days(rejected: Path, inputs: list[InputFile], days: set[int]) -> set[str]:
    """Return the names of the files on some days below ``rejected`` and ``drift``."""
    from nvt_torchrec.etl.drift import result_name

    names = set()
    for file in inputs:
        if file.day in days:
            name = f"{Path(file.path).name}.tsv"
            of_day = f"{file.day}.{name}"  # where a file of that name was there already
            names.add(of_day if (rejected / of_day).exists() else name)
            names.add(f"{result_name(file.path)}.json")
    return names


def link_files(source: Path, target: Path, without: set[str]) -> None:
    """Link the files of a directory, if there is one, to another that may have some of them."""
    for file in sorted(source.glob("*")):
        if file.name in without:
            continue
        target.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(file, target / file.name, follow_symlinks=False)


def next_manifest(
    before: Manifest,
    of_day: Manifest,
    assignment: Assignment | None,
    renamed: dict[str, str],
    first_parts: dict[str, int],
    dropped: set[int],
) -> Manifest:
    """Make the manifest of the next generation.

    Args:
        before: The manifest of this generation.
        of_day: That of the new day, as if it were the only one.
        assignment: The splits of the days from now on; None if each row keeps its split.
        renamed: New names of parts there are.
        first_parts: The number of the day's first part in each split.
        dropped: Days that are left out from now on.
    """
    by_day_and_split = {
        name: counts
        if assignment is None
        else _moved(counts, assignment.get(int(name), ("train",)))
        for name, counts in before.by_day_and_split.items()
        if int(name) not in dropped
    } | of_day.by_day_and_split
    files = [
        dataclasses.replace(part, file=renamed.get(part.file, part.file))
        for part in before.files
        if part.day not in dropped
    ] + of_day.files
    settings = dict(of_day.settings)
    extension = Extension(settings.pop("generation"), settings.pop("day"), settings)
    inputs = [file for file in before.inputs if file.day not in dropped] + of_day.inputs
    return dataclasses.replace(
        of_day,
        settings=before.settings,
        extensions=[*before.extensions, extension],
        **summed(by_day_and_split, inputs),
        files=sorted(files, key=lambda part: split_and_number(part.file)),
        next_parts={split: first_parts[split] + of_day.next_parts[split] for split in SPLITS},
        split=before.split,
    )


def _moved(
    by_split: dict[str, dict[str, Any]], splits: tuple[str, ...]
) -> dict[str, dict[str, Any]]:
    """Return the counts of a day by the splits that it is in from now on."""
    if len(splits) > 1:  # it is halved, and stays so
        return by_split
    return {splits[0]: add_counts(list(by_split.values()))}


# ---- which days are for training, validation and test after a day was added

#: The days of each split, as a manifest has them.
Days: TypeAlias = Mapping[str, Collection[int]]
#: The splits that days are in from now on: one, or valid and test for a day that is halved.
#: Days that are not listed are for training.
Assignment: TypeAlias = dict[int, tuple[str, ...]]


def assign(days: Days, new: int, valid: Collection[int], test: Collection[int]) -> Assignment:
    """Return the splits after a day was added.

    Args:
        days: The days of each split before.
        new: The day, which is later than all of them.
        valid: The days for validation, as far as they are there; none for the default.
        test: The days for test, as far as they are there.

    Raises:
        BadInputError: A day would be in a split that it cannot be in.
    """
    there = {day for of_split in days.values() for day in of_split} | {new}
    # a split whose days are all still to come gets half of the newest day
    chosen = {"valid": set(valid) & there or {new}, "test": set(test) & there or {new}}
    evaluated = chosen["valid"] | chosen["test"]
    _check_order(there, evaluated, set(days["train"]))
    assigned: Assignment = {}
    for day in sorted(evaluated):
        assigned[day] = tuple(split for split, members in chosen.items() if day in members)
        before = [split for split in SPLITS if day in days[split]]
        if day != new and len(assigned[day]) == 2 and len(before) == 1:
            raise BadInputError(
                f"day {day} is in {before[0]} as a whole, and is to be in valid and test now",
                "its parts are not written again, so it cannot be halved: put it into one of "
                "--valid_days and --test_days",
            )
    return assigned


def assign_all(
    days: Days, new: Iterable[int], valid: Collection[int] | None, test: Collection[int] | None
) -> list[Assignment]:
    """Return the splits after each of several days was added; see :func:`assign`.

    Args:
        days: The days of each split before.
        new: The days, in ascending order.
        valid: The days for validation after the last one; None for the default.
        test: The days for test after the last one; None for the default.

    Raises:
        BadInputError: A day is not there, or would be in a split that it cannot be in.
    """
    new = list(new)
    if not new:
        return []
    there = {day for of_split in days.values() for day in of_split} | set(new)
    for flag, chosen in (("--valid_days", valid), ("--test_days", test)):
        absent = sorted(set(chosen or ()) - there)
        if absent:
            raise BadInputError(
                f"{flag}: day {absent[0]} is neither in OUT nor among the days that are added",
                f"choose of days {','.join(map(str, sorted(there)))}",
            )
    if valid and test:
        _check_order(there, {*valid, *test}, set(days["train"]))
    assignments = []
    for day in new:
        assignments.append(assign(days, day, valid or (), test or ()))
        days = days_after(days, day, assignments[-1])
    return assignments


def days_after(days: Days, new: int, assignment: Assignment) -> dict[str, list[int]]:
    """Return the days of each split after a day was added."""
    there = {day for of_split in days.values() for day in of_split} | {new}
    return {
        split: sorted(day for day in there if split in assignment.get(day, ("train",)))
        for split in SPLITS
    }


def _check_order(there: set[int], evaluated: set[int], train: set[int]) -> None:
    future = sorted(day for day in there - evaluated if day > min(evaluated))
    if future:
        raise BadInputError(
            f"day {future[0]} would be for training, and is later than day {min(evaluated)}, which "
            "is for validation or test",
            "training must not see the future: put each later day into --valid_days or --test_days",
        )
    trained = sorted(evaluated & train)
    if trained:
        raise BadInputError(
            f"day {trained[0]} is for training already, so a model may have been trained on it",
            "choose later days for --valid_days and --test_days",
        )
    if there == evaluated:
        raise BadInputError(
            "all days are for validation or test, and none for training",
            "choose fewer days for --valid_days and --test_days",
        )


def renamed_parts(
    files: list[PartFile], assignment: Assignment, next_parts: dict[str, int]
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the new names of parts whose day goes to another split.

    Args:
        files: The manifest's ``files``.
        assignment: The splits of the days from now on.
        next_parts: The number of the next part of each split.

    Returns:
        Old name to new name, in the order of the rows in the log; and the numbers of the next
        parts after that.
    """
    names, following = {}, dict(next_parts)
    for file in sorted(files, key=_in_log_order):
        before, name = file.file, file.split
        splits = assignment.get(file.day, ("train",))
        if name not in splits:
            names[before] = f"{splits[0]}/part.{following[splits[0]]}.parquet"
            following[splits[0]] += 1
    return names, following


def _in_log_order(file: PartFile) -> tuple[int, int, int]:
    """A day's first half is in valid; parts of a split are numbered in the order of the rows."""
    split, number = split_and_number(file.file)
    return file.day, split, number


def split_and_number(file: str) -> tuple[int, int]:
    """``valid/part.3.parquet`` → (1, 3): the order of parts in manifest and ``_metadata``."""
    match = re.fullmatch(r"(\w+)/part\.(\d+)\.parquet", file)
    if match is None or match[1] not in SPLITS:
        raise BadInputError(f"{file}: not the name of a part", "run the ETL again")
    return SPLITS.index(match[1]), int(match[2])
