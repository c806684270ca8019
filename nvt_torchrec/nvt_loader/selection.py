"""Choose a part of a split: some of its files whole, and a share of the rows of others.

The choice is made of row groups, before the loader plans an epoch, so it does not depend on the
world size. It is part of the data's fingerprint: a run resumes on the same rows or not at all.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.nvt_loader.parquet.dataset import Dataset
from nvt_torchrec.nvt_loader.parquet.row_chunks import Range


@dataclasses.dataclass(frozen=True)
class Selection:
    """The rows of a split that a loader reads.

    Attributes:
        files: The names of the files that are read whole, such as ``part.7.parquet``.
        sampled: Groups of further files, such as those of a day; ``share`` of the rows of each
            group are read.
        share: The share of these rows, from 0 to 1.
        seed: Numbers from 0 on that determine the sample.

    Raises:
        SettingsError: The share is no share, or a file is named twice.
    """

    files: tuple[str, ...]
    sampled: tuple[tuple[str, ...], ...] = ()
    share: float = 0.0
    seed: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise SettingsError(f"share = {self.share}", "choose 0 … 1")
        count = collections.Counter(self.names)
        twice = [name for name in count if count[name] > 1]
        if twice:
            raise SettingsError(f"{twice[0]} is selected twice", "name each file once")

    @property
    def names(self) -> list[str]:
        """The names of all files that are named."""
        return [*self.files, *(name for group in self.sampled for name in group)]


def select(dataset: Dataset, selection: Selection) -> Dataset:
    """Return the part of a split that a selection names, in the order of its files.

    Raises:
        BadInputError: The split has no such file.
    """
    files = dataset.files
    if files is None:
        raise SettingsError(f"a selection of {dataset.source.name}", "it selects files by name")
    numbers = {path.name: number for number, path in enumerate(files.paths)}
    for name in selection.names:
        if name not in numbers:
            raise BadInputError(
                f"{files.name}/{name}: no such file",
                "restore the split's files, or run the ETL again",
            )
    whole = {numbers[name] for name in selection.files}
    groups = dict(enumerate(files.row_groups))
    taken = {place: (0, group.rows) for place, group in groups.items() if group.file in whole}
    for number, names in enumerate(selection.sampled):
        sampled = {numbers[name] for name in names}
        places = [place for place, group in groups.items() if group.file in sampled]
        rows = [groups[place].rows for place in places]
        sample = sample_rows(rows, selection.share, seed=(*selection.seed, number))
        taken |= {places[index]: part for index, part in sample.items()}
    chosen = [(groups[place], taken[place]) for place in sorted(taken)]
    used = sorted(whole | {group.file for group, _ in chosen})
    renumbered = {file: number for number, file in enumerate(used)}
    source = dataclasses.replace(
        files,
        paths=tuple(files.paths[file] for file in used),
        status=tuple(files.status[file] for file in used),
        row_groups=tuple(
            dataclasses.replace(group, file=renumbered[group.file]) for group, _ in chosen
        ),
    )
    return dataclasses.replace(
        dataset,
        source=source,
        cuts={place: part for place, (group, part) in enumerate(chosen) if part != (0, group.rows)},
    )


def sample_rows(rows: Sequence[int], share: float, *, seed: tuple[int, ...]) -> dict[int, Range]:
    """Choose a share of the rows of some row groups.

    Whole row groups are drawn, and of the last one as many consecutive rows, from anywhere in it,
    as are missing. So few row groups have to be opened, and the number of rows is exact.

    Args:
        rows: The number of rows of each row group.
        share: The share of all their rows; their number is rounded.
        seed: Numbers from 0 on that determine the choice.

    Returns:
        By the number of the row group, the rows of it that are chosen.
    """
    wanted = round(share * sum(rows))
    # Raw Philox words instead of a Generator's methods, whose streams NumPy may change.
    words = np.random.Philox(np.random.SeedSequence(seed)).random_raw(len(rows) + 1)
    chosen: dict[int, Range] = {}
    for index in np.argsort(words[1:], kind="stable").tolist():
        taken = min(rows[index], wanted)
        if taken:
            begin = int(words[0] % np.uint64(rows[index] - taken + 1))
            chosen[index] = (begin, begin + taken)
        wanted -= taken
    return chosen
