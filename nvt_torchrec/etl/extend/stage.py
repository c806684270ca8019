"""Build the next generation of an output in a separate directory, ready for the switch.

The directory is laid out like ``OUT``. Its parts are hard links with their new names, so the
functions of a run can write its schemas, footers and report, and the current generation does not
change.

In a split by days, the newest day is halved into valid and test, and all others are for training.
No part is rewritten for that: the parts of the previous newest day are renamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shutil
from collections import Counter
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.extend.claim import NEXT
from nvt_torchrec.etl.finish.make_manifest import add_counts, sum_up_counts
from nvt_torchrec.etl.state.output import PARTS
from nvt_torchrec.etl.units.writing import UnitResult
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
        files: The current names of the existing parts that the next generation keeps.
        renamed: Current name → new name of the existing parts that are renamed.
        new: Name in ``work`` → name in the next generation of the new day's parts.

    Returns:
        The directory of the splits.

    Raises:
        OSError: The directory cannot be written, or its file system has no hard links.
    """
    splits = EtlOutput(work / NEXT).splits
    current_splits = EtlOutput(output).splits
    shutil.rmtree(splits, ignore_errors=True)
    for split in SPLITS:
        (splits / split).mkdir(parents=True)
    for file in files:
        os.link(current_splits / file, splits / renamed.get(file, file), follow_symlinks=False)
    for file, name in new.items():
        os.link(work / PARTS / file, splits / name)
    return splits


def list_rejected_files(rejected: Path, inputs: list[InputFile], days: set[int]) -> set[str]:
    """Return the names of the files in ``rejected`` that belong to the given days."""
    names = set()
    for file in inputs:
        if file.day not in days:
            continue
        name = f"{Path(file.path).name}.tsv"
        # If another file had that name already, the name begins with the day.
        name_with_day = f"{file.day}.{name}"
        names.add(name_with_day if (rejected / name_with_day).exists() else name)
    return names


def link_files(source: Path, target: Path, without: set[str]) -> None:
    """Link the files of a directory into another one, in which some may exist already.

    Neither directory needs to exist.
    """
    for file in sorted(source.glob("*")):
        if file.name in without:
            continue
        target.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(file, target / file.name, follow_symlinks=False)


def move_waiting(before: Manifest, results: list[UnitResult]) -> Manifest:
    """Return the manifest with the rows that no longer wait for clicks counted as written.

    Args:
        before: The manifest of the current generation.
        results: The results of all units of the extension, including those of files of earlier
            days.
    """
    written = Counter[str]()
    for result in results:
        written[result.unit.block.source] += result.rows
    inputs = []
    for file in before.inputs:
        rows = dict(file.rows)
        count = written[file.path]
        if count:
            rows["out"] += count
            rows["waiting"] -= count
        inputs.append(dataclasses.replace(file, rows=rows))
    return dataclasses.replace(before, inputs=inputs)


def make_next_manifest(
    before: Manifest,
    day_manifest: Manifest,
    by_days: bool,
    renamed: dict[str, str],
    first_parts: dict[str, int],
    dropped: set[int],
) -> Manifest:
    """Make the manifest of the next generation.

    Args:
        before: The manifest of the current generation.
        day_manifest: The manifest of the new day alone.
        by_days: Whether all earlier days become training days; otherwise each row keeps its split.
        renamed: Current name → new name of the existing parts that are renamed.
        first_parts: The number of the new day's first part in each split.
        dropped: Days whose parquet the next generation leaves out.
    """
    by_day_and_split = {}
    for name, counts in before.by_day_and_split.items():
        if int(name) not in dropped:
            if by_days:
                counts = {"train": add_counts(list(counts.values()))}
            by_day_and_split[name] = counts
    by_day_and_split |= day_manifest.by_day_and_split
    files = []
    for part in before.files:
        if part.day not in dropped:
            new_name = renamed.get(part.file, part.file)
            files.append(dataclasses.replace(part, file=new_name))
    files += day_manifest.files
    inputs = []
    for file in before.inputs:
        # A file with waiting rows is read again, even if its day is dropped.
        if file.day not in dropped or file.rows.get("waiting"):
            inputs.append(file)
    inputs += day_manifest.inputs
    settings = dict(day_manifest.settings)
    extension = Extension(settings.pop("generation"), settings.pop("day"), settings)
    return dataclasses.replace(
        day_manifest,
        settings=before.settings,
        extensions=[*before.extensions, extension],
        **sum_up_counts(by_day_and_split, inputs),
        files=sorted(files, key=lambda part: parse_part_name(part.file)),
        next_parts={split: first_parts[split] + day_manifest.next_parts[split] for split in SPLITS},
        split=before.split,
    )


def rename_parts(
    files: list[PartFile], next_parts: dict[str, int]
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the new names of the parts of valid and test, whose day becomes a training day.

    Args:
        files: The manifest's ``files``.
        next_parts: The number of the next part of each split.

    Returns:
        Old name → new name, in the order of the rows in the log; and the numbers of the next parts
        after the renames.
    """
    names = {}
    next_parts = dict(next_parts)
    # A day's first half is in valid; parts of a split are numbered in the order of the rows.
    for file in sorted(files, key=lambda part: (part.day, *parse_part_name(part.file))):
        if file.split != "train":
            names[file.file] = f"train/part.{next_parts['train']}.parquet"
            next_parts["train"] += 1
    return names, next_parts


def parse_part_name(file: str) -> tuple[int, int]:
    """Return the sort key of a part: ``valid/part.3.parquet`` → (1, 3).

    Raises:
        BadInputError: It is not the name of a part, and may point out of the directory.
    """
    match = re.fullmatch(r"(\w+)/part\.(\d+)\.parquet", file)
    if match is None or match[1] not in SPLITS:
        raise BadInputError(f"{file}: not the name of a part", "run the ETL again")
    return SPLITS.index(match[1]), int(match[2])
