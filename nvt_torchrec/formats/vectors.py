"""Vectors: a list of numbers of fixed length for each key of a table, such as a text embedding.

The parquet has one int32 column without nulls for each vector, after the pointers of histories:
``NAME.vector`` is the number of the row's vector, from 0, or -1 if the row has none.

The vectors are in ``SPLITS/_vectors/NAME/FIRST/values.npy``, [n, width] float32 or float16 in C
order, where FIRST is the decimal number of the first vector in the file. The first directory begins
at 0, and each other one begins where the previous one ends. Added days get new directories; old
ones never change. All values are finite. ``WORKFLOW/vectors/NAME/FIRST/values.npy`` are links to
the same files.

A model gets ``dense_vectors``, float32 [rows, sum of (width + 1)]: for each vector, in the order of
the schema, its values followed by an indicator, 1. A row without the vector has zeros.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.atomic import new_directory
from nvt_torchrec.base.files.mapping import ArrayWriter, MappedArray
from nvt_torchrec.formats.parts import link_parts, open_parts

T = TypeVar("T")
#: The directory of all vectors next to those of the splits, and in a workflow or bundle.
VECTORS = "_vectors"
IN_WORKFLOW = "vectors"
VALUES = "values.npy"
#: The number of a row without a vector.
NO_VECTOR = -1
MAX_WIDTH = 65_536
#: The dtypes in which vectors can be stored, and the bytes of a value.
DTYPES = {"float32": 4, "float16": 2}
_REMEDY = "copy the vectors again, or run the ETL again"
#: About how many values are gathered at once, so that they are still in the cache when checked.
_BLOCK_VALUES = 1 << 18


@dataclasses.dataclass(frozen=True)
class StoredVectors:
    """The name and form of a vector of the data.

    Attributes:
        name: The name, a plain file name.
        width: The length, 1 to :data:`MAX_WIDTH`.
        dtype: The stored type, one of :data:`DTYPES`.
    """

    name: str
    width: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        name = self.name
        is_text = isinstance(name, str)
        # The name becomes the name of a directory.
        if not is_text or Path(name).name != name or "\0" in name or name[:1] in ("", "."):
            raise SchemaError(
                f"vector {name!r:.60}: it cannot be the name of a file",
                "name vectors without slashes, and without a dot at the beginning",
            )
        is_whole = isinstance(self.width, Integral) and not isinstance(self.width, bool)
        if not is_whole or not 1 <= self.width <= MAX_WIDTH:
            raise SchemaError(
                f"vector {name}: width = {self.width!r:.60}",
                f"give an integer from 1 to {MAX_WIDTH}",
            )
        if self.dtype not in DTYPES:
            raise SchemaError(
                f"vector {name}: dtype = {self.dtype!r:.60}", f"give one of {', '.join(DTYPES)}"
            )

    @property
    def pointer(self) -> str:
        """The name of the parquet column with the number of each row's vector."""
        return f"{self.name}.vector"

    @property
    def num_inputs(self) -> int:
        """The number of columns in ``dense_vectors``: the values and the indicator."""
        return self.width + 1

    @property
    def row_bytes(self) -> int:
        """The size of one vector in the store, in bytes."""
        return self.width * DTYPES[self.dtype]


def count_inputs(vectors: Iterable[StoredVectors]) -> int:
    """Return the number of columns of ``dense_vectors``."""
    return sum(vector.num_inputs for vector in vectors)


@dataclasses.dataclass(frozen=True)
class VectorPart:
    """The vectors of one directory, mapped from its file.

    Attributes:
        directory: The directory.
        first: The number of the first vector.
        values: [n, width], float32 or float16.
    """

    directory: Path
    first: int
    values: np.ndarray


class VectorStore:
    """All vectors of one name, mapped from files. Thread-safe.

    Opening the store checks types and shapes, but reads no vectors; :meth:`take` checks the values
    that it reads.

    Args:
        directory: The directory of all vectors, with ``NAME/FIRST`` below it.
        vectors: The name and form of the vectors.

    Attributes:
        vectors: The name and form of the vectors.
        parts: The parts, in the order of their first numbers.
        count: The number of vectors.

    Raises:
        BadInputError: There are no vectors, or a file is missing or damaged.
    """

    def __init__(self, directory: Path, vectors: StoredVectors) -> None:
        self.vectors = vectors
        self.root = directory / vectors.name
        self._mapped: list[MappedArray] = []
        self.parts: list[VectorPart]
        what = f"the values of vector {vectors.name}"
        self.parts, self.count = open_parts(self.root, what, _REMEDY, self._open, "vectors")

    def _open(self, directory: Path, first: int) -> tuple[VectorPart, int]:
        """Map the file of a directory, and count its vectors. Raises BadInputError."""
        file = directory / VALUES
        try:
            # Read-only, because the kernel would reserve memory for a writable (private) mapping.
            array = MappedArray(file, np.dtype(self.vectors.dtype), 2)
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or error
            raise BadInputError(f"{file}: {what}", _REMEDY) from error
        count, width = array.values.shape
        if width != self.vectors.width or not count:
            raise BadInputError(
                f"{file}: expected vectors of width {self.vectors.width}, at least one, for vector "
                f"{self.vectors.name}; found {count} of width {width}",
                _REMEDY,
            )
        self._mapped.append(array)
        return VectorPart(directory, first, array.values), count

    def check(self) -> None:
        """Raise :class:`BadInputError` if a file was written to since it was opened."""
        for array in self._mapped:
            array.check()

    def take(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Write vectors and their indicators to ``out``.

        Args:
            numbers: int32 [n], the numbers of the vectors; -1 for none.
            out: float32 [n, width + 1] with any strides. Each row becomes a vector followed by 1,
                or zeros for none.

        Raises:
            SchemaError: A number is outside the store, or a value is not finite.
        """
        if not len(numbers):
            return
        self._check_numbers(numbers, NO_VECTOR)
        block = max(1, _BLOCK_VALUES // self.vectors.width)
        for begin in range(0, len(numbers), block):
            rows = slice(begin, begin + block)
            self._take_block(numbers[rows], out[rows])

    def take_values(self, numbers: np.ndarray) -> np.ndarray:
        """Return vectors in the stored dtype, [n, width].

        Args:
            numbers: int32 [n], the numbers of the vectors, at least one.

        Raises:
            SchemaError: A number is outside the store.
        """
        taken = np.empty((len(numbers), self.vectors.width), self.vectors.dtype)
        self._check_numbers(numbers, 0)
        for part in self.parts:
            rows = np.flatnonzero(
                (numbers >= part.first) & (numbers < part.first + len(part.values))
            )
            taken[rows] = part.values[numbers[rows] - part.first]
        return taken

    def _check_numbers(self, numbers: np.ndarray, minimum: int) -> None:
        """Raise SchemaError if one of the numbers [n], n > 0, is outside the store."""
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest < minimum or highest >= self.count:
            wrong = lowest if lowest < minimum else highest
            raise SchemaError(
                f"vector {wrong} of {self.vectors.name}, which has {self.count} vectors", _REMEDY
            )

    def _take_block(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Write a block of vectors whose numbers were checked. Raises SchemaError."""
        has_vector = numbers >= 0
        out[:, -1] = has_vector
        out[~has_vector, :-1] = 0
        for part in self.parts:
            in_part = has_vector & (numbers >= part.first)
            in_part &= numbers < part.first + len(part.values)
            rows = np.flatnonzero(in_part)
            if not len(rows):
                continue
            found = part.values[numbers[rows] - part.first]
            self._check_finite(part, numbers[rows], found)
            out[rows, :-1] = found

    def _check_finite(self, part: VectorPart, numbers: np.ndarray, found: np.ndarray) -> None:
        """Raise SchemaError if a value is not finite."""
        finite = np.isfinite(found).all(axis=1)
        if not finite.all():
            number = int(numbers[np.flatnonzero(~finite)[0]])
            raise SchemaError(
                f"{part.directory / VALUES}: a value of vector {number} is not finite", _REMEDY
            )


class VectorStores:
    """The stores of several vectors. Thread-safe.

    Args:
        directory: The directory of all vectors, with ``NAME/FIRST`` below it.
        vectors: The names and forms of the vectors, in the order of the schema.

    Attributes:
        stores: The store of each vector.

    Raises:
        BadInputError: A store is missing or damaged.
    """

    def __init__(self, directory: Path, vectors: Sequence[StoredVectors]) -> None:
        self.stores = tuple(VectorStore(directory, vector) for vector in vectors)

    @property
    def vectors(self) -> tuple[StoredVectors, ...]:
        """The names and forms of the vectors."""
        return tuple(store.vectors for store in self.stores)

    def check(self) -> None:
        """Raise :class:`BadInputError` if a file was written to since it was opened."""
        for store in self.stores:
            store.check()

    def take(self, numbers: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """Return ``dense_vectors``, float32 [n, sum of (width + 1)].

        Args:
            numbers: int32 [vectors, n], the numbers of the vectors; -1 for none.
            out: The array to write to; None for a new one.

        Raises:
            SchemaError: A number is outside its store, or a value is not finite.
        """
        if out is None:
            out = np.empty((numbers.shape[1], count_inputs(self.vectors)), np.float32)
        end = 0
        for store, column in zip(self.stores, numbers, strict=True):
            begin, end = end, end + store.vectors.num_inputs
            store.take(column, out[:, begin:end])
        return out


def list_vector_files(name: str, files: Iterable[str]) -> list[str]:
    """Return the files of a vector's parts, relative to the workflow.

    The first part is returned even if the workflow does not list it, because every vector has one.

    Args:
        name: The name of the vector.
        files: The names of all files of the workflow.
    """
    root = f"{IN_WORKFLOW}/{name}/"
    found = [f"{root}0/{VALUES}"]
    for file in files:
        first = file.removeprefix(root).removesuffix(f"/{VALUES}")
        is_part = file == f"{root}{first}/{VALUES}" and first.isdecimal() and first.isascii()
        if is_part and file not in found:
            found.append(file)
    return found


def select_vectors(files: Mapping[str, T]) -> dict[str, T]:
    """Return the items whose names, relative to the workflow, are files of vectors."""
    return {name: item for name, item in files.items() if name.startswith(f"{IN_WORKFLOW}/")}


def link_vectors(source: Path, target: Path, name: str) -> None:
    """Hard-link the vectors of one name into another directory, except for existing files.

    Args:
        source: The directory of all vectors to link from.
        target: The directory to link into.
        name: The name of the vectors; if the source has none, nothing is linked.

    Raises:
        OSError: The target cannot be written, or its file system has no hard links.
    """
    link_parts([source], target, name)


@contextlib.contextmanager
def write_vectors(directory: Path, vectors: StoredVectors, first: int) -> Iterator[VectorWriter]:
    """Write vectors to ``directory/NAME/FIRST`` atomically.

    ::

        with write_vectors(splits / VECTORS, StoredVectors("text", 2), first=0) as writer:
            writer.append([[0.5, 1], [2, 3]])  # numbers 0 and 1

    Raises:
        OutputError: The directory exists, or cannot be written.
    """
    with (
        new_directory(directory / vectors.name / str(first)) as temporary,
        open(temporary / VALUES, "wb+") as file,
    ):
        writer = VectorWriter(vectors, file)
        yield writer
        writer.finish()


class VectorWriter:
    """Appends vectors to a file, without holding them in memory."""

    def __init__(self, vectors: StoredVectors, file: IO[bytes]) -> None:
        self._width = vectors.width
        self._writer = ArrayWriter(file, np.dtype(vectors.dtype), vectors.width)

    @property
    def count(self) -> int:
        """The number of appended vectors."""
        return self._writer.length

    def append(self, values: np.ndarray | Sequence[Sequence[float]]) -> None:
        """Append vectors [n, width], whose values must be finite in the stored dtype."""
        array = np.asarray(values)
        if array.ndim != 2 or array.shape[1] != self._width:
            raise ValueError(f"expected vectors [n, {self._width}], got {list(array.shape)}")
        self._writer.append(array)

    def finish(self) -> None:
        """Write the number of vectors to the file's header."""
        self._writer.finish()
