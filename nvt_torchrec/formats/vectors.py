"""Vectors: a list of numbers of one length for each key of a table, such as a text's embedding.

The parquet has one int32 column for each vector, without nulls, after the pointers of histories:
``NAME.vector``, the number of the row's vector, from 0; -1: the row has none.

The vectors lie in ``SPLITS/_vectors/NAME/FIRST/values.npy``, [n, width] float32 or float16 in C
order, where FIRST is the number of the first vector in it, in decimal. The first directory begins
at 0, each other one where the one before ends; days that are added get new ones, and no old one
ever changes. All values are finite. ``WORKFLOW/vectors/NAME/FIRST/values.npy`` are the same files.

A model gets ``dense_vectors``, float32 [rows, sum of (width + 1)]: of each vector in the order of
the schema its values, and behind them an indicator, 1; where a row has none, zeros.
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
#: The directory of all vectors, beside those of the splits.
VECTORS = "_vectors"
#: That of a workflow and of a bundle.
IN_WORKFLOW = "vectors"
VALUES = "values.npy"
#: The number of a row without a vector.
NO_VECTOR = -1
MAX_WIDTH = 65_536
#: How vectors may be stored, and their bytes.
DTYPES = {"float32": 4, "float16": 2}
_REMEDY = "copy the vectors again, or run the ETL again"
#: About how many values are gathered at once, so that what is gathered is checked in the cache.
_BLOCK_VALUES = 1 << 18


@dataclasses.dataclass(frozen=True)
class StoredVectors:
    """A vector of the data.

    Attributes:
        name: Its name, a plain file name.
        width: The numbers in it, 1 to :data:`MAX_WIDTH`.
        dtype: How they are stored, one of :data:`DTYPES`.
    """

    name: str
    width: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        name = self.name
        is_text = isinstance(name, str)
        # It becomes the name of a directory.
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
        """The column of the parquet with the number of each row's vector."""
        return f"{self.name}.vector"

    @property
    def num_inputs(self) -> int:
        """How many inputs of a model it is: its values and the indicator."""
        return self.width + 1

    @property
    def row_bytes(self) -> int:
        """The bytes of one vector in the store."""
        return self.width * DTYPES[self.dtype]


def count_inputs(vectors: Iterable[StoredVectors]) -> int:
    """Return the width of ``dense_vectors``: how many inputs of a model some vectors are."""
    return sum(vector.num_inputs for vector in vectors)


@dataclasses.dataclass(frozen=True)
class VectorPart:
    """Some vectors, mapped from a file.

    Attributes:
        directory: Where they are.
        first: The number of the first one.
        values: [n, width].
    """

    directory: Path
    first: int
    values: np.ndarray


class VectorStore:
    """All vectors of one name, mapped from files. Thread-safe.

    Opening it reads no vectors: types and shapes are checked, and :meth:`take` checks what it
    reads.

    Args:
        directory: That of all vectors, with ``NAME/FIRST`` below it.
        vectors: Their name and form.

    Attributes:
        vectors: As given.
        parts: The directories, by their first numbers.
        count: How many vectors there are.

    Raises:
        BadInputError: There are none, or a file is missing or damaged.
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
            # Read-only: of a writable mapping, the kernel would have to promise as much memory.
            array = MappedArray(file, np.dtype(self.vectors.dtype), 2)
        except (OSError, ValueError) as error:
            what = getattr(error, "strerror", None) or error
            raise BadInputError(f"{file}: {what}", _REMEDY) from error
        count, width = array.values.shape
        if width != self.vectors.width or not count:
            raise BadInputError(
                f"{file}: {count} vectors of {width} values, where vector {self.vectors.name} has "
                f"{self.vectors.width}",
                _REMEDY,
            )
        self._mapped.append(array)
        return VectorPart(directory, first, array.values), count

    def check(self) -> None:
        """Raise :class:`BadInputError` if a file was written to since it was opened."""
        for array in self._mapped:
            array.check()

    def take(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Write vectors and their indicators.

        Args:
            numbers: int32 [n], the numbers of the vectors; -1 for none.
            out: float32 [n, width + 1], in any strides: gets each vector, then 1; zeros for none.

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
        """Return vectors as they are stored, [n, width].

        Args:
            numbers: int32 [n], at least one of which there is.

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
        """Raise SchemaError if a number, of at least one, is outside the store."""
        lowest, highest = int(numbers.min()), int(numbers.max())
        if lowest < minimum or highest >= self.count:
            wrong = lowest if lowest < minimum else highest
            raise SchemaError(
                f"vector {wrong} of {self.vectors.name}, which has {self.count}", _REMEDY
            )

    def _take_block(self, numbers: np.ndarray, out: np.ndarray) -> None:
        """Write some vectors, whose numbers are inside. Raises SchemaError."""
        is_there = numbers >= 0
        out[:, -1] = is_there
        out[~is_there, :-1] = 0
        for part in self.parts:
            inside = is_there & (numbers >= part.first)
            inside &= numbers < part.first + len(part.values)
            rows = np.flatnonzero(inside)
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
        directory: That of all vectors, with ``NAME/FIRST`` below it.
        vectors: Their names and forms, in the order of the schema.

    Attributes:
        stores: One for each of them.

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
            out: The memory of the result; by default it is new.

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
    """Return the files of a vector's parts among those of a workflow, relative to it.

    Args:
        name: The name of the vector.
        files: The names of all files of the workflow. That of the first part is returned even if it
            is not among them: there is no vector without it.
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
    """Return those of a workflow's files that hold vectors; by their names, relative to it."""
    return {name: item for name, item in files.items() if name.startswith(f"{IN_WORKFLOW}/")}


def link_vectors(source: Path, target: Path, name: str) -> None:
    """Link the vectors of a name into another directory; those that are there stay.

    Args:
        source: The directory with ``NAME/FIRST`` below it, or without.
        target: The one that gets them.
        name: Their name.

    Raises:
        OSError: It cannot be written, or its file system has no hard links.
    """
    link_parts([source], target, name)


@contextlib.contextmanager
def write_vectors(directory: Path, vectors: StoredVectors, first: int) -> Iterator[VectorWriter]:
    """Write vectors to ``directory/NAME/FIRST``, whole or not at all.

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
    """Appends vectors; holds none of them.

    Attributes:
        count: How many there are.
    """

    def __init__(self, vectors: StoredVectors, file: IO[bytes]) -> None:
        self._width = vectors.width
        self._writer = ArrayWriter(file, np.dtype(vectors.dtype), vectors.width)

    @property
    def count(self) -> int:
        """How many vectors were appended."""
        return self._writer.length

    def append(self, values: np.ndarray | Sequence[Sequence[float]]) -> None:
        """Add vectors [n, width], whose values are finite as they are stored."""
        array = np.asarray(values)
        if array.ndim != 2 or array.shape[1] != self._width:
            raise ValueError(f"vectors {list(array.shape)} instead of [n, {self._width}]")
        self._writer.append(array)

    def finish(self) -> None:
        """Write how many there are."""
        self._writer.finish()
