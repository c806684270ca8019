"""Check whether rows of one split are also in another.

Rows are compared by 64-bit hashes. A sample is kept: the hashes that end in a number of zero bits,
which is the same for every split. So memory is bounded, and the check is exact for small data.

An error is reported for files with the same rows in any order, and for *windows* of 16 consecutive
rows that occur in two splits, because then a range of rows was copied. Single equal rows are no
error, as the same user may see the same page twice. The number to expect is estimated from repeats
within a split: if a share s of its n rows is repeated in it, up to s·N/n of its rows are expected
in another split of N rows. So that a small split is not warned of for want of repeats, their
number is taken as the largest that chance would have made so few of, with 95 % probability. A share
well above that is a warning.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from clicklog.kernels import compiled
from clicklog.splits import SPLITS
from etl.shuffle.permutation import mix

if TYPE_CHECKING:
    from etl.check.files import Output

#: Rows of a window. Windows in which fewer rows differ from the one before are ignored.
WINDOW, _LEAST_CHANGES = 16, 8
#: Hashes of rows and of windows that are kept for each held-out split, approximately.
_KEPT_ROWS, _KEPT_WINDOWS = 1 << 22, 1 << 20
#: Copied ranges of fewer rows are not reported.
_LEAST_COPIED = 48
#: Shares of equal rows up to this, or up to twice the expected share, are not warned of.
_HARMLESS = 0.01
_REMEDY = "evaluation on training rows is meaningless: cut the splits by time"
#: The same by the rule of the spec's [split], where it is not by days.
_REMEDIES = {
    "time": "evaluation on training rows is meaningless: if they are the same events, remove the "
    "repeats from the log",
    "files": "evaluation on training rows is meaningless: see whether the files of the splits "
    "repeat rows",
}


@dataclasses.dataclass
class Sample:
    """The number of some rows, the sum of their hashes, sampled hashes of rows and windows."""

    rows: int
    digest: int
    hashes: np.ndarray
    windows: np.ndarray

    @classmethod
    def join(cls, samples: list[Sample]) -> Sample:
        """Join the samples of different rows."""
        empty = np.empty(0, np.uint64)
        return cls(
            sum(sample.rows for sample in samples),
            sum(sample.digest for sample in samples) % 2**64,
            np.concatenate([empty, *(sample.hashes for sample in samples)]),
            np.concatenate([empty, *(sample.windows for sample in samples)]),
        )


def take_sample(hashes: np.ndarray, row_mask: int, window_mask: int) -> Sample:
    """Take a sample of consecutive rows, given their hashes, uint64 [n]."""
    digest, rows, windows = _sampled(hashes, np.uint64(row_mask), np.uint64(window_mask))
    return Sample(len(hashes), int(digest), rows, windows)


@dataclasses.dataclass
class _HeldOut:
    """The part of a held-out split that is kept to compare others with."""

    rows: int
    hashes: np.ndarray  # sampled hashes of rows, sorted, distinct
    counts: np.ndarray  # the number of rows that have each
    windows: np.ndarray  # sampled hashes of windows, sorted, distinct
    files: np.ndarray  # the number of the file that each window is in


@dataclasses.dataclass
class _Common:
    """The rows and windows that a held-out split and another split share."""

    hashes: np.ndarray  # bool: which of the held-out split's hashes are shared
    windows: Counter = dataclasses.field(default_factory=Counter)  # by pair of files


class Overlap:
    """Collects samples of all splits, held-out splits first, and compares them.

    Attributes:
        order: Lists of files that may be read in parallel; :meth:`finish` is called after each.
        row_mask: The mask for hashes of rows, for :func:`take_sample`.
        window_mask: The mask for hashes of windows.
    """

    def __init__(self, splits: dict[str, list[str]], rows: dict[str, int]) -> None:
        self._names = [file for files in splits.values() for file in files]
        self._split_of = {file: split for split, files in splits.items() for file in files}
        train = "train" if "train" in splits else "training"
        held = [split for split in reversed(list(splits)) if split != train]
        self._held_names = held if len(splits) > 1 else []
        self._rows = {
            split: sum(rows.get(file, 0) for file in own) for split, own in splits.items()
        }
        most = max([self._rows[split] for split in self._held_names], default=0)
        self.row_mask = _mask(most, _KEPT_ROWS)
        self.window_mask = _mask(most, _KEPT_WINDOWS)
        self.order = [splits[split] for split in self._held_names]
        self.order.append(
            [file for file in self._names if self._split_of[file] not in self._held_names]
        )
        self._samples: dict[str, list[Sample]] = {}
        self._digests: dict[str, tuple[int, int]] = {}
        self._held: dict[str, _HeldOut] = {}
        self._common: dict[tuple[str, str], _Common] = {}

    @classmethod
    def plan(cls, output: Output) -> Overlap:
        """Make it for the files of an output."""
        rows = {file: footer.num_rows for file, footer in output.footers.items()}
        order = sorted(output.splits, key=lambda name: [*SPLITS, name].index(name))
        return cls({split: output.splits[split] for split in order}, rows)

    def reduce(self, file: str, sample: Sample) -> Sample:
        """Reduce a sample of training rows to what held-out splits contain as well. Thread-safe."""
        if self._split_of[file] in self._held_names:
            return sample
        held = self._held.values()
        hashes = [sample.hashes[_find(split.hashes, sample.hashes) >= 0] for split in held]
        windows = [sample.windows[_find(split.windows, sample.windows) >= 0] for split in held]
        empty = np.empty(0, np.uint64)
        return Sample(
            sample.rows,
            sample.digest,
            np.unique(np.concatenate([empty, *hashes])),
            np.unique(np.concatenate([empty, *windows])),
        )

    def add(self, file: str, sample: Sample) -> None:
        """Add the (reduced) sample of a row group."""
        split = self._split_of[file]
        rows, digest = self._digests.get(file, (0, 0))
        self._digests[file] = rows + sample.rows, (digest + sample.digest) % 2**64
        for other in self._held_names[: self._place(split)]:
            self._compare(split, other, self._names.index(file), sample)
        if split in self._held_names:
            self._samples.setdefault(file, []).append(sample)

    def _place(self, split: str) -> int:
        """Count the held-out splits that were read before a split, and are compared with it."""
        return self._held_names.index(split) if split in self._held_names else len(self._held_names)

    def _compare(self, split: str, other: str, file: int, sample: Sample) -> None:
        held = self._held[other]
        common = self._common.setdefault((split, other), _Common(np.zeros(len(held.hashes), bool)))
        at = _find(held.hashes, sample.hashes)
        common.hashes[at[at >= 0]] = True
        at = _find(held.windows, np.unique(sample.windows))
        for their_file, count in Counter(held.files[at[at >= 0]].tolist()).items():
            common.windows[file, their_file] += count

    def finish(self) -> None:
        """Note that all files of the next list in :attr:`order` have been read."""
        for split in self._held_names:
            if split not in self._held:
                self._held[split] = self._finish(split)
                break

    def _finish(self, split: str) -> _HeldOut:
        own = [file for file in self._names if self._split_of[file] == split]
        samples = {file: Sample.join(self._samples.pop(file, [])) for file in own}
        hashes = np.concatenate([sample.hashes for sample in samples.values()])
        windows = np.concatenate([sample.windows for sample in samples.values()])
        files = [np.full(len(samples[file].windows), self._names.index(file)) for file in own]
        hashes, counts = np.unique(hashes, return_counts=True)
        windows, first = np.unique(windows, return_index=True)
        return _HeldOut(self._rows[split], hashes, counts, windows, np.concatenate(files)[first])

    def check(self, output: Output) -> None:
        """Compare the splits, and add findings to the output."""
        same = self._check_same_files(output)
        for (split, other), common in self._common.items():
            held = self._held[other]
            self._check_copied(output, split, common, held, same)
            if held.counts.sum():
                self._check_equal_rows(output, split, other, common, held)

    def _check_same_files(self, output: Output) -> set[tuple[str, str]]:
        """Report files with the same rows; return the pairs."""
        first: dict[tuple[int, int], str] = {}
        pairs = set()
        for file in self._names:
            key = self._digests.get(file, (0, 0))
            if key[0] < WINDOW:
                continue
            if key in first:
                pairs |= {(first[key], file), (file, first[key])}
                what = f"holds the same {key[0]} rows as {first[key]}"
                output.error("same rows", file, what, "delete one of them")
            first.setdefault(key, file)
        return pairs

    def _check_copied(
        self, output: Output, split: str, common: _Common, held: _HeldOut, same
    ) -> None:
        scale = self.window_mask + 1
        by_chance = self._windows_by_chance(split, held)
        for (mine, theirs), count in sorted(common.windows.items()):
            pair = self._names[mine], self._names[theirs]
            if pair in same or count * scale + WINDOW < _LEAST_COPIED or by_chance * 100 > count:
                continue
            output.error(
                "same rows",
                pair[1],
                f"about {count * scale + WINDOW - 1} rows of it are in {pair[0]} too, in the same "
                "order",
                _remedy(output),
            )

    def _windows_by_chance(self, split: str, held: _HeldOut) -> float:
        """Estimate the equal windows in the sample if rows were drawn independently."""
        sampled, scale = held.counts.astype(float), self.row_mask + 1
        pairs = held.rows * (held.rows - 1)
        equal = (sampled * (sampled - 1)).sum() * scale / pairs if pairs else 1.0
        # the probability that two rows are equal; without an equal pair, less than 1 / pairs
        equal = min(1.0, max(equal, 1 / max(pairs, 1)))
        return self._rows[split] * held.rows / (self.window_mask + 1) * equal**WINDOW

    def _check_equal_rows(
        self, output: Output, split: str, other: str, common: _Common, held: _HeldOut
    ) -> None:
        kept = held.counts.sum()
        share = held.counts[common.hashes].sum() / kept
        repeats = held.counts[held.counts > 1].sum()
        repeated = (repeats + 2 * repeats**0.5 + 3) / kept
        expected = min(1.0, repeated * max(1.0, self._rows[split] / max(held.rows, 1)))
        suspicious = share > max(_HARMLESS, 2 * expected)
        report = output.warning if suspicious else output.note
        report(
            "overlap",
            output.root / other,
            f"{share:.2%} of its rows are also in {split} (from repeats within it, up to "
            f"{expected:.2%} is expected)",
            _remedy(output) if suspicious else "",
        )


def _remedy(output: Output) -> str:
    return _REMEDIES.get((output.split_rule or {"by": "days"})["by"], _REMEDY)


def _mask(rows: int, kept: int) -> int:
    """Choose a mask so that about ``kept`` of ``rows`` hashes, or all, have only zeros under it."""
    mask = 0
    while rows > kept * (mask + 1):
        mask = 2 * mask + 1
    return mask


def _find(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Find the index of each value in ``ordered``, -1 for values that are not in it."""
    if not len(ordered):
        return np.full(len(values), -1)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[at] == values, at, -1)


@compiled()
def _sampled(hashes, row_mask, window_mask):
    """Return the sum of all hashes, and the sampled hashes of rows and windows (rolling hash)."""
    factor = np.uint64(0xD6E8FEB86659FD93)
    leaving = np.uint64(1)
    for _ in range(WINDOW):
        leaving *= factor
    digest, rolling, changes = np.uint64(0), np.uint64(0), 0
    rows, windows = np.empty(len(hashes), np.uint64), np.empty(len(hashes), np.uint64)
    row_count, window_count = 0, 0
    for i in range(len(hashes)):
        mixed = mix(hashes[i])
        digest += mixed
        if mixed & row_mask == 0:
            rows[row_count] = mixed
            row_count += 1
        rolling = rolling * factor + hashes[i]
        if i:
            changes += hashes[i] != hashes[i - 1]
        if i >= WINDOW:
            rolling -= leaving * hashes[i - WINDOW]
            changes -= hashes[i - WINDOW + 1] != hashes[i - WINDOW]
        if i >= WINDOW - 1 and changes >= _LEAST_CHANGES:
            window = mix(rolling)
            if window & window_mask == 0:
                windows[window_count] = window
                window_count += 1
    return digest, rows[:row_count].copy(), windows[:window_count].copy()
