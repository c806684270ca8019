"""Number the vectors of a table's rows, and store each vector once.

The vectors of a table may be larger than memory. They are kept on disk in the order in which they
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
        file: The file that is written; it must not exist.
        stored: The format of the vectors.
    """

    def __init__(self, file: Path, stored: StoredVectors) -> None:
        self._file = file
        self._stored = stored
        self._missing: list[np.ndarray] = []

    def append(self, values: CategoryValues, missing: np.ndarray) -> None:
        """Write the vectors of the next rows.

        Args:
            values: The vectors, as lists of numbers.
            missing: bool [n], True for a row without a vector, for which zeros are written.

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
        """The mask of rows without a vector, bool [rows]."""
        return np.concatenate([np.empty(0, np.bool_), *self._missing])

    def read(self, begin: int, end: int) -> np.ndarray:
        """Return the vectors of a range of rows, [end - begin, width]."""
        offset = begin * self._stored.row_bytes
        count = (end - begin) * self._stored.width
        values = np.fromfile(self._file, self._stored.dtype, count, offset=offset)
        return values.reshape(-1, self._stored.width)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors of the given rows, [n, width]."""
        # The file is mapped again for each call: pages of a mapping that stays count as memory.
        mapped = np.memmap(self._file, self._stored.dtype, "r")
        return mapped.view(np.ndarray).reshape(-1, self._stored.width)[rows]


class VectorNumbers:
    """Finds the number of each row's vector.

    A row that was read reuses the vector of the earlier row that it replaces, or else of the
    previous version of its key, if that vector is the same. All other vectors are stored, in the
    order of the files.

    Args:
        stored: The format of the vectors.
        order: The rows.
        read: The vectors of the rows that were read.
        earlier: The table as of the earlier days, and the directory of its vectors; None for a run.
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
        """Write the new vectors to ``directory/NAME/FIRST``, and return the numbers of all rows.

        Returns:
            int32 [rows], 0 for a row without a vector.

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
        # A repeated version gets the number of the nearest row before it that is not repeated.
        index = np.where(is_repeated, 0, np.arange(len(numbers)))
        numbers = numbers[np.maximum.accumulate(index)]
        if not first and not len(in_file_order):
            raise BadInputError(
                f"vector {self._stored.name}: no row of its table has a vector",
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
        """Return the numbers of the vectors of earlier rows, int64 [n]; -1 for none.

        Args:
            positions: int64 [n], positions of rows of the earlier table; -1 for no row.
        """
        rows = np.where(positions < 0, -1, positions - self._order.num_read)
        if self._table is None:
            return np.full(len(rows), -1)
        return self._table.take_vector_numbers(self._stored.name, rows).astype(np.int64)

    def _match_replaced(self) -> None:
        """Reuse the number of the earlier row that a row replaces, if its vector is the same."""
        replaced = self._find_earlier(self._order.replaced)
        for rows in self._divide(self._is_new & ~self.missing & (replaced >= 0)):
            vectors = self._read.take(self._order.positions[rows])
            same = rows[_are_equal(vectors, self._take_stored(replaced[rows]))]
            self._numbers[same] = replaced[same]

    def _match_versions(self) -> np.ndarray:
        """Return the mask of rows with the same vector as the previous version, bool [rows]."""
        keys = self._order.keys
        may_repeat = self._is_new & ~self.missing & (self._numbers < 0)
        may_repeat[:1] = False
        may_repeat[1:] &= (keys[1:] == keys[:-1]) & ~self.missing[:-1]
        is_repeated = np.zeros(len(keys), np.bool_)
        for rows in self._divide(may_repeat):
            vectors = self._read.take(self._order.positions[rows])
            is_repeated[rows] = _are_equal(vectors, self._take_rows(rows - 1))
        return is_repeated

    def _divide(self, chosen: np.ndarray) -> Iterator[np.ndarray]:
        """Yield blocks of the rows where ``chosen``, bool [rows], is True.

        They are in the order of the files. The earlier days may have had the same order, so a block
        reads few pages of either.
        """
        rows = np.flatnonzero(chosen)
        rows = rows[np.argsort(self._order.positions[rows])]
        for begin in range(0, len(rows), self._block):
            yield rows[begin : begin + self._block]

    def _take_rows(self, rows: np.ndarray) -> np.ndarray:
        """Return the vectors of rows, [n, width]; each row must have a vector."""
        is_new = self._is_new[rows]
        taken = np.empty((len(rows), self._stored.width), self._stored.dtype)
        if is_new.any():
            taken[is_new] = self._read.take(self._order.positions[rows[is_new]])
        if not is_new.all():
            taken[~is_new] = self._take_stored(self._numbers[rows[~is_new]])
        return taken

    def _take_stored(self, numbers: np.ndarray) -> np.ndarray:
        """Return the earlier vectors with the given numbers, [n, width]."""
        return self._open_earlier().take_values(numbers.astype(np.int32))

    def _open_earlier(self) -> VectorStore:
        """Map the earlier vectors, again for each call; see :meth:`VectorsOnDisk.take`."""
        assert self._directory is not None
        return VectorStore(self._directory, self._stored)

    def _copy(self, directory: Path, first: int, positions: np.ndarray) -> None:
        """Write the vectors at the given positions of rows that were read, ascending."""
        with write_vectors(directory, self._stored, first) as writer:
            for begin in range(0, self._order.num_read, self._block):
                end = min(begin + self._block, self._order.num_read)
                low, high = np.searchsorted(positions, (begin, end))
                if low < high:
                    writer.append(self._read.read(begin, end)[positions[low:high] - begin])


def _are_equal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return whether pairs of vectors, [n, width] each, are equal bit by bit, bool [n]."""
    bits = np.dtype(f"u{first.itemsize}")
    return (first.view(bits) == second.view(bits)).all(axis=1)
