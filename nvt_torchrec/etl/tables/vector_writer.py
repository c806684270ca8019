"""Number the vectors of a table's rows, and store each of them once.

The vectors of a table may be larger than the memory: they wait on disk in the order in which they
were read, and are compared and copied in blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.tables.row_order import RowOrder
from nvt_torchrec.formats.rows import CategoryValues, get_flat_values
from nvt_torchrec.formats.vectors import StoredVectors, VectorStore, write_vectors
from nvt_torchrec.workflows.stored_table import StoredTable

#: About how many bytes of vectors are held at once.
_BLOCK_BYTES = 8 << 20
#: Numbers are int32.
_MAX_VECTORS = 2**31 - 1


class VectorsOnDisk:
    """The vectors of a table's rows, in the order in which they were read.

    Args:
        file: A file that is not there.
        stored: Their form.
    """

    def __init__(self, file: Path, stored: StoredVectors) -> None:
        self._file = file
        self._stored = stored
        self._missing: list[np.ndarray] = []

    def append(self, values: CategoryValues, missing: np.ndarray) -> None:
        """Write the vectors of the next rows, lists; zeros where they are missing, bool [n].

        Raises:
            OSError: The file cannot be written.
        """
        rows = np.zeros((len(missing), self._stored.width), self._stored.dtype)
        rows[~missing] = np.asarray(get_flat_values(values)).reshape(-1, self._stored.width)
        self._missing.append(missing)
        with open(self._file, "ab") as file:
            file.write(rows.data)

    @property
    def missing(self) -> np.ndarray:
        """Where rows have no vector, bool [rows]."""
        return np.concatenate([np.empty(0, np.bool_), *self._missing])

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the vectors of rows one after the other, [end - begin, width]."""
        offset = begin * self._stored.row_bytes
        count = (end - begin) * self._stored.width
        values = np.fromfile(self._file, self._stored.dtype, count, offset=offset)
        return values.reshape(-1, self._stored.width)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors of any rows, [n, width]."""
        # It is mapped anew each time, so that the pages that were read are not counted as memory.
        mapped = np.memmap(self._file, self._stored.dtype, "r")
        return mapped.view(np.ndarray).reshape(-1, self._stored.width)[rows]


class VectorNumbers:
    """Finds the number of each row's vector.

    A row that was read has that of the row whose place it takes, or else that of the version
    before, where this is the same vector. All others are stored, in the order of the files.

    Args:
        stored: The form of the vectors.
        order: The rows.
        read: The vectors of the rows that were read.
        earlier: The table as of the days before, and the directory of the vectors that it has;
            None of a run.
    """

    def __init__(
        self,
        stored: StoredVectors,
        order: RowOrder,
        read: VectorsOnDisk,
        earlier: tuple[StoredTable, Path] | None,
    ) -> None:
        self._stored = stored
        self._order = order
        self._read = read
        self._table = earlier[0] if earlier else None
        self._directory = earlier[1] if earlier else None
        self._num_earlier = self._open_earlier().count if earlier else 0
        self._block = max(1, _BLOCK_BYTES // stored.row_bytes)
        self._is_new = order.positions < order.num_read
        self._numbers = self._find_earlier(np.where(self._is_new, -1, order.positions))
        self.missing = ~self._is_new & (self._numbers < 0)
        self.missing[self._is_new] = read.missing[order.positions[self._is_new]]

    def write(self, directory: Path) -> np.ndarray:
        """Write the vectors that are new to ``directory/NAME/FIRST``; return all numbers.

        Returns:
            int32 [rows], 0 where a row has none.

        Raises:
            BadInputError: No row has a vector, or there are too many.
            OutputError: The directory cannot be written.
        """
        numbers = self._numbers
        self._match_replaced()
        is_repeated = self._match_versions()
        to_store = self._is_new & ~self.missing & ~is_repeated & (numbers < 0)
        first = self._num_earlier
        in_file_order = np.sort(self._order.positions[to_store])
        numbers[to_store] = first + np.searchsorted(in_file_order, self._order.positions[to_store])
        # A version that repeats the one before has its number, which that one may have likewise.
        index = np.where(is_repeated, 0, np.arange(len(numbers)))
        numbers = numbers[np.maximum.accumulate(index)]
        if not first and not len(in_file_order):
            raise BadInputError(
                f"vector {self._stored.name}: no row of its table has one",
                "name the column with `from`, or leave the vector out",
            )
        if first + len(in_file_order) > _MAX_VECTORS:
            raise BadInputError(
                f"vector {self._stored.name}: more than {_MAX_VECTORS} vectors",
                "leave out keys that the log does not have",
            )
        if len(in_file_order):
            self._copy(directory, first, in_file_order)
        return np.where(self.missing, 0, numbers).astype(np.int32)

    def _find_earlier(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers at positions of the earlier table, int64 [n]; -1 for none."""
        rows = np.where(positions < 0, -1, positions - self._order.num_read)
        if self._table is None:
            return np.full(len(rows), -1)
        return self._table.take_vectors(self._stored.name, rows).astype(np.int64)

    def _match_replaced(self) -> None:
        """Number rows with the vector of the row whose place they take."""
        replaced = self._find_earlier(self._order.replaced)
        for of_block in self._divide(self._is_new & ~self.missing & (replaced >= 0)):
            now = self._read.take(self._order.positions[of_block])
            same = of_block[_are_equal(now, self._take_stored(replaced[of_block]))]
            self._numbers[same] = replaced[same]

    def _match_versions(self) -> np.ndarray:
        """Return which rows have the vector of the version before, bool [rows]."""
        keys = self._order.keys
        may_repeat = self._is_new & ~self.missing & (self._numbers < 0)
        may_repeat[:1] = False
        may_repeat[1:] &= (keys[1:] == keys[:-1]) & ~self.missing[:-1]
        is_repeated = np.zeros(len(keys), np.bool_)
        for of_block in self._divide(may_repeat):
            now = self._read.take(self._order.positions[of_block])
            is_repeated[of_block] = _are_equal(now, self._take_rows(of_block - 1))
        return is_repeated

    def _divide(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the rows where ``chosen``, bool [rows], is set, in blocks.

        They are in the order of the files, in which the next day may have them as well, so that a
        block reads few pages.
        """
        rows = np.flatnonzero(chosen)
        rows = rows[np.argsort(self._order.positions[rows])]
        for begin in range(0, len(rows), self._block):
            yield rows[begin : begin + self._block]

    def _take_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors of rows, each of which has one, [n, width]."""
        is_new = self._is_new[rows]
        taken = np.empty((len(rows), self._stored.width), self._stored.dtype)
        if is_new.any():
            taken[is_new] = self._read.take(self._order.positions[rows[is_new]])
        if not is_new.all():
            taken[~is_new] = self._take_stored(self._numbers[rows[~is_new]])
        return taken

    def _take_stored(self, numbers: np.ndarray) -> np.ndarray:
        """Return earlier vectors, [n, width]."""
        return self._open_earlier().take_values(numbers.astype(np.int32))

    def _open_earlier(self) -> VectorStore:
        """Map the earlier vectors anew, so that what was read is not counted as memory."""
        assert self._directory is not None
        return VectorStore(self._directory, self._stored)

    def _copy(self, directory: Path, first: int, positions: np.ndarray) -> None:
        """Write vectors that were read, at rising positions."""
        with write_vectors(directory, self._stored, first) as writer:
            for begin in range(0, self._order.num_read, self._block):
                end = min(begin + self._block, self._order.num_read)
                low, high = np.searchsorted(positions, (begin, end))
                if low < high:
                    writer.append(self._read.read(begin, end)[positions[low:high] - begin])


def _are_equal(some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return which vectors are the same bit by bit, bool [n]."""
    bits = np.dtype(f"u{some.itemsize}")
    return (some.view(bits) == others.view(bits)).all(axis=1)
