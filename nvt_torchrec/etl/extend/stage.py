"""The next generation of an output, ready beside it: what the switch will rename.

Its directory is laid out as ``OUT``. Parts are hard links there, under the names that they will
have, so that schemas, footers and the report are written by the same functions as those of a run,
and the generation before stays as it is.

Where days are split by days, the newest one is halved into valid and test, and all others are for
training. No part is written again: those of the day before are renamed.
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


def list_rejected_files(rejected: Path, inputs: list[InputFile], days: set[int]) -> set[str]:
    """Return the names of the files of some days below ``rejected``."""
    names = set()
    for file in inputs:
        if file.day not in days:
            continue
        name = f"{Path(file.path).name}.tsv"
        # The name begins with the day where another file had that name already.
        name_with_day = f"{file.day}.{name}"
        names.add(name_with_day if (rejected / name_with_day).exists() else name)
    return names


def link_files(source: Path, target: Path, without: set[str]) -> None:
    """Link the files of a directory, if there is one, to another that may have some of them."""
    for file in sorted(source.glob("*")):
        if file.name in without:
            continue
        target.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.link(file, target / file.name, follow_symlinks=False)


def move_waiting(before: Manifest, results: list[UnitResult]) -> Manifest:
    """Return a manifest whose files have the rows that waited, and are written now, as written.

    Args:
        before: The manifest of this generation.
        results: Of all units of the day that is added, files of days before among them.
    """
    written = Counter[str]()
    for result in results:
        written[result.unit.block.source] += result.rows
    inputs = []
    for file in before.inputs:
        rows, count = dict(file.rows), written[file.path]
        if count:
            rows["out"] += count
            rows["waiting"] -= count
        inputs.append(dataclasses.replace(file, rows=rows))
    return dataclasses.replace(before, inputs=inputs)


def make_next_manifest(
    before: Manifest,
    of_day: Manifest,
    by_days: bool,
    renamed: dict[str, str],
    first_parts: dict[str, int],
    dropped: set[int],
) -> Manifest:
    """Make the manifest of the next generation.

    Args:
        before: The manifest of this generation.
        of_day: That of the new day, as if it were the only one.
        by_days: Whether all days before are for training from now on; otherwise each row keeps its
            split.
        renamed: New names of parts there are.
        first_parts: The number of the day's first part in each split.
        dropped: Days that are left out from now on.
    """
    by_day_and_split = {}
    for name, counts in before.by_day_and_split.items():
        if int(name) not in dropped:
            if by_days:
                counts = {"train": add_counts(list(counts.values()))}
            by_day_and_split[name] = counts
    by_day_and_split |= of_day.by_day_and_split
    files = []
    for part in before.files:
        if part.day not in dropped:
            new_name = renamed.get(part.file, part.file)
            files.append(dataclasses.replace(part, file=new_name))
    files += of_day.files
    inputs = []
    for file in before.inputs:
        # A file whose rows wait is read again, whatever its day.
        if file.day not in dropped or file.rows.get("waiting"):
            inputs.append(file)
    inputs += of_day.inputs
    settings = dict(of_day.settings)
    extension = Extension(settings.pop("generation"), settings.pop("day"), settings)
    return dataclasses.replace(
        of_day,
        settings=before.settings,
        extensions=[*before.extensions, extension],
        **sum_up_counts(by_day_and_split, inputs),
        files=sorted(files, key=lambda part: parse_part_name(part.file)),
        next_parts={split: first_parts[split] + of_day.next_parts[split] for split in SPLITS},
        split=before.split,
    )


def rename_parts(
    files: list[PartFile], next_parts: dict[str, int]
) -> tuple[dict[str, str], dict[str, int]]:
    """Return the new names of parts of valid and test, whose day is for training from now on.

    Args:
        files: The manifest's ``files``.
        next_parts: The number of the next part of each split.

    Returns:
        Old name to new name, in the order of the rows in the log; and the numbers of the next
        parts after that.
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
    """Return what parts are ordered by: ``valid/part.3.parquet`` → (1, 3).

    Raises:
        BadInputError: It is not the name of a part, and may lead elsewhere.
    """
    match = re.fullmatch(r"(\w+)/part\.(\d+)\.parquet", file)
    if match is None or match[1] not in SPLITS:
        raise BadInputError(f"{file}: not the name of a part", "run the ETL again")
    return SPLITS.index(match[1]), int(match[2])
