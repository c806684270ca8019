"""The cells in which drift counts values, and a sliding window of them.

Cells of a dense column are ten bins at the deciles of the training rows, in the values that the
model sees: transformed, missing ones filled. Cells of a categorical column are :class:`Buckets` of
its vocabulary by frequency. Imports neither NVTabular nor Dask nor pandas.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numba import types

from nvt_torchrec.base.arrays import to_numpy
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.kernels import compiled
from nvt_torchrec.formats.rows import Jagged
from nvt_torchrec.formats.spec.feature_spec import FIRST_OOV_ID, CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.compiled.workflow import EncodedRows, Ids
from nvt_torchrec.workflows.drift import compared

#: Bins of equal share, where values are distinct enough. Ten is customary for the PSI.
BINS = 10


def make_edges(sample: np.ndarray) -> np.ndarray:
    """Return the edges of the bins, float32 [columns, BINS − 1], of values float32 [columns, n].

    A value is in bin k if it is greater than k edges. Where values repeat, so do edges, and bins
    between them are empty.
    """
    if not sample.size:
        return np.zeros((len(sample), BINS - 1), np.float32)
    edges = np.quantile(sample, np.arange(1, BINS) / BINS, axis=1, method="inverted_cdf").T
    return np.ascontiguousarray(edges, np.float32)


def count_bins(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count the values float32 [columns, n] in each bin: int64 [columns, BINS]."""
    counts = np.zeros((len(edges), BINS), np.int64)
    _count_bins(values, edges, counts)
    return counts


@compiled(
    types.void(
        types.Array(types.float32, 2, "A", readonly=True),
        types.Array(types.float32, 2, "C", readonly=True),
        types.Array(types.int64, 2, "C"),
    ),
)
def _count_bins(values, edges, counts):
    for j in range(len(edges)):
        column = np.ascontiguousarray(values[j])
        for i in range(len(column)):
            bin_ = 0
            for k in range(edges.shape[1]):
                bin_ += np.int64(column[i] > edges[j, k])
            counts[j, bin_] += 1


#: Buckets of frequent values. Ten is customary for the PSI.
BUCKETS = 10
#: The bucket of rare values and those out of vocabulary; that of padding and null, never compared.
REST, ABSENT = BUCKETS, BUCKETS + 1
#: Occurrences, in the half that decides, from which on a value is frequent. The order of rarer
#: values is mostly chance.
LEAST_COUNT = 10
#: The most values in the buckets of frequent values, which bounds the memory.
MOST_VALUES = 1 << 16
#: Values of a vocabulary that are read at once.
_BATCH = 1 << 18
_AGAIN = "copy the whole workflow directory again, or fit it again"


@dataclasses.dataclass(frozen=True)
class Buckets:
    """The values of a vocabulary in a few buckets by the frequency that they had when counted.

    The most frequent values are in :data:`BUCKETS` buckets of about equal share, and the rest,
    which is rare or out of vocabulary, in one more.

    Values that are chosen for their high counts have high counts by chance, too: on another day
    their share is lower without any shift (regression to the mean; for values seen once see Good,
    The population frequencies of species, Biometrika 40, 1953). So the counts are split: each
    occurrence is put into one of two halves at random. One half decides which values are in which
    bucket, the other one, which is independent of it, how large the share of each bucket is (data
    thinning: Neufeld et al., Journal of Machine Learning Research 25, 2024). The shares are then
    unbiased, even that of the rest, whose values another day may have seen for the first time.

    Attributes:
        of_ids: uint8 [n], the bucket of each id; larger ids are in that of the last one, the rest.
        counts: int64 [BUCKETS + 1], how often the values of each bucket occurred in the half of
            the rows that decides on the shares.
    """

    of_ids: np.ndarray
    counts: np.ndarray

    @classmethod
    def make(cls, batches: Iterable[np.ndarray], first: int, unseen: int) -> Buckets:
        """Make the buckets of counted ids; few counts are in memory at once.

        Args:
            batches: How often each id occurred, int64 [n], in the order of the ids.
            first: The first id.
            unseen: How often values without an id of their own occurred.
        """
        rng = np.random.default_rng(0)  # the same split every time
        head = np.empty((3, 0), np.int64)  # ids, occurrences that decide, and those that measure
        rest, rare, begin = 0, unseen, first
        for counts in batches:
            frequent = np.flatnonzero(counts >= LEAST_COUNT)  # others cannot be in the head
            rare += int(counts.sum()) - int(counts[frequent].sum())
            deciding = rng.binomial(counts[frequent], 0.5)
            added = np.stack([begin + frequent, deciding, counts[frequent] - deciding])
            head, begin = np.concatenate([head, added], axis=1), begin + len(counts)
            keep = np.flatnonzero(head[1] >= LEAST_COUNT)
            if len(keep) > MOST_VALUES:  # of equal counts, the smaller ids
                keep = np.sort(keep[np.argsort(-head[1, keep], kind="stable")[:MOST_VALUES]])
            rest += int(head[2].sum()) - int(head[2, keep].sum())
            head = head[:, keep]
        ids, deciding, measuring = head[:, np.argsort(-head[1], kind="stable")]
        total = int(deciding.sum()) + rest + rare // 2  # only buckets of equal share need it
        before = np.cumsum(deciding) - deciding
        buckets = np.minimum(before * BUCKETS // max(1, total), BUCKETS - 1)
        sums = np.zeros(BUCKETS + 1, np.int64)
        np.add.at(sums, buckets, measuring)
        sums[REST] = rest + int(rng.binomial(rare, 0.5))
        of_ids = np.full(max(first, int(ids.max(initial=0)) + 1) + 1, REST, np.uint8)
        of_ids[:FIRST_OOV_ID] = ABSENT
        of_ids[ids] = buckets
        return cls(of_ids, sums)

    def count(self, ids: Ids, counts: np.ndarray) -> None:
        """Add the ids of a column to counts of buckets, int64 [BUCKETS + 2]."""
        _count_buckets(ids.values if isinstance(ids, Jagged) else ids, self.of_ids, counts)


@compiled(
    types.void(
        types.Array(types.int32, 1, "A", readonly=True),
        types.Array(types.uint8, 1, "C", readonly=True),
        types.Array(types.int64, 1, "C"),
    ),
    nogil=False,  # a few microseconds
)
def _count_buckets(ids, of_ids, counts):
    last = len(of_ids) - 1
    for i in range(len(ids)):
        counts[of_ids[min(np.int64(ids[i]), last)]] += 1


def read_buckets(path: Path, description: WorkflowDescription) -> dict[str, Buckets]:
    """Read the buckets of all vocabularies of a saved workflow, in bounded memory.

    Hashed columns have no counts, so they are left out.

    Raises:
        BadInputError: A vocabulary is damaged.
    """
    return {
        name: Buckets.make(
            _read_counts(path, description, columns[0]),
            columns[0].reserved_ids,
            description.vocabularies[columns[0].name].observed["oov"],
        )
        for name, columns in description.spec.vocabularies.items()
        if not columns[0].hash_buckets
    }


def _read_counts(
    path: Path, description: WorkflowDescription, column: CategoricalColumn
) -> Iterator[np.ndarray]:
    """Read how often the values of a column's vocabulary occurred, int64, in batches."""
    vocabulary = description.vocabularies[column.name]
    file, values = path / vocabulary.file, 0
    try:
        with pq.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(_BATCH, columns=[f"{vocabulary.name}_size"]):
                if not batch.num_columns or batch.column(0).type != pa.int64():
                    raise BadInputError(f"{file}: no counts of the values", _AGAIN)
                yield to_numpy(batch.column(0))
                values += len(batch)
    except (OSError, pa.ArrowException) as error:
        raise BadInputError(f"{file}: cannot be read: {error}", _AGAIN) from error
    if values != vocabulary.values:
        raise BadInputError(
            f"{file}: {values} counts of the {vocabulary.values} values of column {column.name}",
            _AGAIN,
        )


#: Parts of the window, the oldest of which is dropped at once.
_SLOTS = 12
#: Rows that are counted together: single ones would cost more in calls than in counting.
_TOGETHER = 128
#: Larger values, in standard deviations, count as this, so that a single one does not decide.
_LARGEST = 100.0


class Window:
    """Counts the rows of the last seconds: by vocabulary the values in each bucket, and dense sums.

    Columns that share a vocabulary are counted together, because their training counts are stored
    together. Of dense columns a workflow holds mean and standard deviation only; the values that
    the model sees are normalized by them, so the mean of a window is 0 without a shift.

    Args:
        spec: The spec of the rows.
        buckets: The buckets of the vocabularies, see :func:`read_buckets`.
        seconds: The length of the window.
        clock: Returns the time in seconds.

    Attributes:
        buckets: The buckets of the vocabularies that are counted.
        dense: The dense columns that are summed.
    """

    def __init__(
        self,
        spec: FeatureSpec,
        buckets: dict[str, Buckets],
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        columns = compared(spec)
        self._vocabulary_of = {
            j: column.vocabulary_name
            for j, column in enumerate(spec.categorical)
            if column.name in columns and column.vocabulary_name in buckets
        }
        self.buckets = {name: buckets[name] for name in dict.fromkeys(self._vocabulary_of.values())}
        self.dense = [name for name in spec.normalized_names if name in columns]
        self._places = [spec.dense_names.index(name) for name in self.dense]
        self._slot_s, self._clock = seconds / _SLOTS, clock
        self._lock = threading.Lock()
        self._counts = {name: np.zeros((_SLOTS, BUCKETS + 2), np.int64) for name in self.buckets}
        self._sums = np.zeros((_SLOTS, 1 + len(self.dense)))  # rows, and the sum of each column
        self._slot = 0
        self._waiting: list[EncodedRows] = []

    def add(self, batches: Sequence[EncodedRows]) -> None:
        """Count some rows."""
        with self._lock:
            self._move()
            self._waiting += batches
            if sum(map(len, self._waiting)) >= _TOGETHER:
                self._count()

    def totals(self) -> tuple[dict[str, np.ndarray], float, dict[str, float]]:
        """Return the values in each bucket by vocabulary, the rows, and the sums of the columns."""
        with self._lock:
            self._move()
            self._count()
            rows, *sums = self._sums.sum(axis=0).tolist()
            counts = {name: of.sum(axis=0)[: BUCKETS + 1] for name, of in self._counts.items()}
        return counts, rows, dict(zip(self.dense, sums, strict=True))

    def _move(self) -> None:
        """Begin a new slot, if it is time for it, and empty those that left the window."""
        now = int(self._clock() / self._slot_s)
        if now == self._slot:
            return
        self._count()
        for number in range(max(self._slot, now - _SLOTS) + 1, now + 1):
            self._sums[number % _SLOTS] = 0
            for counts in self._counts.values():
                counts[number % _SLOTS] = 0
        self._slot = now

    def _count(self) -> None:
        """Count the rows that wait, in the slot of now."""
        rows, self._waiting = self._waiting, []
        if not rows:
            return
        slot = self._slot % _SLOTS
        dense = np.concatenate([batch.dense[self._places] for batch in rows], axis=1)
        self._sums[slot, 0] += dense.shape[1]
        self._sums[slot, 1:] += dense.clip(-_LARGEST, _LARGEST).sum(axis=1, dtype=np.float64)
        joined = _joined([batch.ids for batch in rows])
        for j, name in self._vocabulary_of.items():
            self.buckets[name].count(joined[j], self._counts[name][slot])


def _joined(batches: list[np.ndarray | list[Ids]]) -> Sequence[Ids]:
    """Join the ids of several batches of rows by column; lists become their values."""
    if all(isinstance(ids, np.ndarray) for ids in batches):
        return np.concatenate(batches, axis=1)
    return [
        np.concatenate([ids.values if isinstance(ids, Jagged) else ids for ids in columns])
        for columns in zip(*batches, strict=True)
    ]
