"""Are rows of one split also in another?

Rows are compared by 64-bit hashes, of which a sample is kept: those whose hash ends in some number
of zero bits, the same ones in every split. So memory is bounded, and exact for small data.

What is an error: files with the same rows in any order, and *windows* of 16 consecutive rows that
are in two splits: then a range of rows was copied. Single rows that coincide are none: the same
user sees the same page twice. How many to expect, a split tells itself: if a share s of n rows
has its like within the split, another one of N rows has the like of up to s·N/n (its chance grows
at most in proportion to N). A share well above that is a warning.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from clicklog.kernels import compiled
from clicklog.splits import SPLITS
from etl.check.findings import ERROR, NOTE, WARNING
from etl.shuffle.permutation import mix

if TYPE_CHECKING:
    from etl.check.files import Output

#: Rows of a window. Windows that are mostly one row repeated tell nothing and are left out.
WINDOW = 16
_LEAST_CHANGES = 8
#: Hashes of rows, and of windows, that are kept for each held-out split.
_KEPT_ROWS, _KEPT_WINDOWS = 1 << 22, 1 << 20
#: A copied range of fewer rows is no finding.
_LEAST_COPIED = 48
#: Shares of coincident rows up to here are no finding, nor up to twice what is expected.
_HARMLESS = 0.01
_REMEDY = "evaluation on rows of the training set is worth nothing: cut the splits by time"


@dataclasses.dataclass
class Sample:
    """Of some rows: their number, the sum of their hashes, sampled hashes of rows and windows."""

    rows: int
    digest: int
    hashes: np.ndarray
    windows: np.ndarray

    @classmethod
    def joined(cls, samples: list[Sample]) -> Sample:
        """Of the rows of several."""
        none = np.empty(0, np.uint64)
        return cls(
            sum(one.rows for one in samples),
            sum(one.digest for one in samples) % 2**64,
            np.concatenate([none, *(one.hashes for one in samples)]),
            np.concatenate([none, *(one.windows for one in samples)]),
        )


def take_sample(hashes: np.ndarray, row_mask: int, window_mask: int) -> Sample:
    """Sample consecutive rows by their hashes, uint64 [n]."""
    digest, rows, windows = _sampled(hashes, np.uint64(row_mask), np.uint64(window_mask))
    return Sample(len(hashes), int(digest), rows, windows)


@dataclasses.dataclass
class _HeldOut:
    """What is kept of a split that others are compared with."""

    rows: int
    hashes: np.ndarray  # sampled, sorted, each once
    counts: np.ndarray  # how many rows have it
    windows: np.ndarray  # sampled, sorted, each once
    files: np.ndarray  # number of the file a window is in


@dataclasses.dataclass
class _Common:
    """What a held-out split and another one have in common."""

    hashes: np.ndarray  # bool: which of the held-out split's
    windows: Counter = dataclasses.field(default_factory=Counter)  # by (file, file)


class Overlap:
    """Collects samples of all splits, held-out ones first, and compares them.

    Attributes:
        order: files that may be read at the same time; after each list comes :meth:`finish`.
        row_mask, window_mask: for :func:`take_sample`.
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
        """For the files of an output."""
        rows = {file: footer.num_rows for file, footer in output.footers.items()}
        order = sorted(output.splits, key=lambda name: [*SPLITS, name].index(name))
        return cls({split: output.splits[split] for split in order}, rows)

    def reduce(self, file: str, sample: Sample) -> Sample:
        """Leave of a sample of the training split what held-out ones have too. Thread-safe."""
        if self._split_of[file] in self._held_names:
            return sample
        held = self._held.values()
        hashes = [sample.hashes[_find(one.hashes, sample.hashes) >= 0] for one in held]
        windows = [sample.windows[_find(one.windows, sample.windows) >= 0] for one in held]
        none = np.empty(0, np.uint64)
        return Sample(
            sample.rows,
            sample.digest,
            np.unique(np.concatenate([none, *hashes])),
            np.unique(np.concatenate([none, *windows])),
        )

    def add(self, file: str, sample: Sample) -> None:
        """Take in the (reduced) sample of a row group."""
        split = self._split_of[file]
        rows, digest = self._digests.get(file, (0, 0))
        self._digests[file] = rows + sample.rows, (digest + sample.digest) % 2**64
        for other in self._held_names[: self._place(split)]:
            self._compare(split, other, self._names.index(file), sample)
        if split in self._held_names:
            self._samples.setdefault(file, []).append(sample)

    def _place(self, split: str) -> int:
        """How many held-out splits a split is compared with: those that were read before it."""
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
        """All files of the next list in :attr:`order` are read."""
        for split in self._held_names:
            if split not in self._held:
                self._held[split] = self._finish(split)
                break

    def _finish(self, split: str) -> _HeldOut:
        own = [file for file in self._names if self._split_of[file] == split]
        samples = {file: Sample.joined(self._samples.pop(file, [])) for file in own}
        hashes = np.concatenate([sample.hashes for sample in samples.values()])
        windows = np.concatenate([sample.windows for sample in samples.values()])
        files = [np.full(len(samples[file].windows), self._names.index(file)) for file in own]
        hashes, counts = np.unique(hashes, return_counts=True)
        windows, first = np.unique(windows, return_index=True)
        return _HeldOut(self._rows[split], hashes, counts, windows, np.concatenate(files)[first])

    def check(self, output: Output) -> None:
        """Add findings to the output."""
        same = self._same_files(output)
        for (split, other), common in self._common.items():
            held = self._held[other]
            self._copied(output, split, common, held, same)
            if held.counts.sum():
                self._coincident(output, split, other, common, held)

    def _same_files(self, output: Output) -> set[tuple[str, str]]:
        """Report files with the same rows; the pairs."""
        first: dict[tuple[int, int], str] = {}
        pairs = set()
        for file in self._names:
            key = self._digests.get(file, (0, 0))
            if key[0] < WINDOW:
                continue
            if key in first:
                pairs |= {(first[key], file), (file, first[key])}
                what = f"holds the same {key[0]} rows as {first[key]}"
                output.add(ERROR, "same rows", file, what, "delete one of them")
            first.setdefault(key, file)
        return pairs

    def _copied(self, output: Output, split: str, common: _Common, held: _HeldOut, same) -> None:
        scale = self.window_mask + 1
        by_chance = self._windows_by_chance(split, held)
        for (mine, theirs), count in sorted(common.windows.items()):
            pair = self._names[mine], self._names[theirs]
            if pair in same or count * scale + WINDOW < _LEAST_COPIED or by_chance * 100 > count:
                continue
            output.add(
                ERROR,
                "same rows",
                pair[1],
                f"about {count * scale + WINDOW - 1} rows of it stand in {pair[0]} too, in the "
                "same order",
                _REMEDY,
            )

    def _windows_by_chance(self, split: str, held: _HeldOut) -> float:
        """How many equal windows to expect in the sample if rows were independent draws."""
        sampled, scale = held.counts.astype(float), self.row_mask + 1
        pairs = held.rows * (held.rows - 1)
        equal = (sampled * (sampled - 1)).sum() * scale / pairs if pairs else 1.0
        # of two rows to be equal; `equal` of no pair seen says less than one in `pairs`
        equal = min(1.0, max(equal, 1 / max(pairs, 1)))
        return self._rows[split] * held.rows / (self.window_mask + 1) * equal**WINDOW

    def _coincident(
        self, output: Output, split: str, other: str, common: _Common, held: _HeldOut
    ) -> None:
        kept = held.counts.sum()
        share = held.counts[common.hashes].sum() / kept
        repeated = held.counts[held.counts > 1].sum() / kept
        expected = min(1.0, repeated * max(1.0, self._rows[split] / max(held.rows, 1)))
        suspicious = share > max(_HARMLESS, 2 * expected)
        output.add(
            WARNING if suspicious else NOTE,
            "overlap",
            output.root / other,
            f"{share:.2%} of its rows are also in {split} (by its own repeats, up to "
            f"{expected:.2%} is to be expected)",
            _REMEDY if suspicious else "",
        )


def _mask(rows: int, kept: int) -> int:
    """Hashes whose lower bits under this mask are 0 are about ``kept`` of ``rows``, or all."""
    mask = 0
    while rows > kept * (mask + 1):
        mask = 2 * mask + 1
    return mask


def _find(ordered: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The index of each value in ``ordered``, -1 where it is not there."""
    if not len(ordered):
        return np.full(len(values), -1)
    at = np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)
    return np.where(ordered[at] == values, at, -1)


@compiled()
def _sampled(hashes, row_mask, window_mask):
    """Sum of all hashes; hashes of rows and of windows (polynomial rolling hash) in the sample."""
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
