"""Training sets made of arrays, as TorchRec and NVIDIA preprocess them.

``.npy`` (TorchRec's ``npy_preproc_criteo`` and what follows it)::

    day_<N>_dense.npy     float32 [rows, 13]
    day_<N>_sparse.npy    int32 or int64 [rows, 26]
    day_<N>_labels.npy    int32 [rows, 1]

Split binary: a directory for each split with ``label.bin``, ``numerical.bin`` (all dense columns of
a row together) and ``cat_0.bin`` …, in one of two flavours:

=========  ============  ===================  =========================================
           label         numerical            categories
=========  ============  ===================  =========================================
TorchRec   float32       float32 [rows, 13]   int32
NVIDIA     bool          float16 [rows, 13]   int8, int16 or int32, by the cardinality
=========  ============  ===================  =========================================

NVIDIA's sets say so in ``feature_spec.yaml``, which also names the columns; without it the sizes of
the files tell the flavours apart. Nothing is read from a file whose size does not fit the others.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np

from clicklog.errors import BadInputError
from clicklog.splits import cut_last_day

DENSE_COLUMNS = 13  # of the Criteo log, where no feature_spec.yaml tells
_SPLIT_NAMES = {
    "train": "train", "valid": "valid", "validation": "valid", "val": "valid", "test": "test",
}  # fmt: skip
_FETCH = "fetch or make it again; shorter or longer, it would shift the columns after it"


@dataclasses.dataclass(frozen=True)
class ArrayFile:
    """An array [rows, columns] in a file."""

    path: Path
    dtype: np.dtype
    rows: int
    columns: int = 1
    offset: int = 0
    by_column: bool = False  # Fortran's order

    def read(self, begin: int, end: int) -> np.ndarray:
        """Rows [begin, end): [columns, end - begin]. Raises :class:`BadInputError`."""
        size = self.dtype.itemsize
        try:
            if self.by_column:
                starts = [self.offset + (j * self.rows + begin) * size for j in range(self.columns)]
                values = np.stack([self._read(start, end - begin) for start in starts])
            else:
                start = self.offset + begin * self.columns * size
                values = self._read(start, (end - begin) * self.columns)
                values = values.reshape(-1, self.columns).T
        except (OSError, ValueError) as error:
            raise BadInputError(f"{self.path}: cannot be read: {error}", _FETCH) from error
        return values

    def _read(self, offset: int, count: int) -> np.ndarray:
        values = np.fromfile(self.path, self.dtype, count, offset=offset)
        if len(values) != count:
            raise OSError("it is shorter than it was")
        return values


@dataclasses.dataclass(frozen=True)
class RowSet:
    """Files that hold the columns of the same rows, and which of these rows go to a split."""

    split: str
    day: int
    begin: int
    end: int
    label: ArrayFile
    dense: ArrayFile | None
    categorical: tuple[ArrayFile, ...]

    @property
    def files(self) -> list[ArrayFile]:
        """All its files."""
        return [self.label, *([self.dense] if self.dense else []), *self.categorical]


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """A training set that is made of arrays.

    Attributes:
        kind: name of the format.
        label, dense, categorical: names of the columns.
        sets: the row sets, those of train first, then valid, then test.
        table_sizes: of the categorical columns; None if the set does not say.
    """

    kind: str
    label: str
    dense: tuple[str, ...]
    categorical: tuple[str, ...]
    sets: tuple[RowSet, ...]
    table_sizes: tuple[int, ...] | None = None


def find_source(directory: Path) -> ArraySource:
    """Recognise the training set in a directory, and check the sizes of its files.

    Raises:
        BadInputError: there is none that is known, or a file is missing or has another size or type
            than the others require.
    """
    if not directory.is_dir():
        raise BadInputError(f"{directory}: no such directory", "give the directory of the set")
    if (directory / "feature_spec.yaml").exists():
        return _from_feature_spec(directory)
    if any(directory.glob("*_dense.npy")):
        return _from_npy(directory)
    if any((directory / name / "label.bin").exists() for name in _SPLIT_NAMES):
        return _from_bin(directory)
    raise BadInputError(
        f"{directory}: no training set of a known format",
        "it needs day_0_dense.npy …, train/label.bin …, a feature_spec.yaml, or a workflow.pkl",
    )


# --- .npy


def _from_npy(directory: Path) -> ArraySource:
    days = {}
    for path in directory.glob("day_*_dense.npy"):
        if match := re.fullmatch(r"day_(\d+)_dense\.npy", path.name):
            days[int(match[1])] = f"day_{match[1]}"
    if not days and (directory / "train_dense.npy").exists():  # Kaggle's; its test has no labels
        days = {0: "train"}
    if not days:
        raise BadInputError(
            f"{directory}: no day_<N>_dense.npy",
            "days are named day_0_dense.npy, day_1_dense.npy …",
        )
    missing = sorted(set(range(min(days), max(days))) - days.keys())
    if missing:
        raise BadInputError(
            f"{directory / f'day_{missing[0]}_dense.npy'}: missing, there is a later day",
            "fetch it, or renumber the days",
        )
    sets: list[RowSet] = []
    for day, name in sorted(days.items()):
        sets += _day(directory, day, name, last=day == max(days), only=len(days) == 1)
    if not sets:
        raise BadInputError(f"{directory}: its arrays have no rows", "fetch or make them again")
    for row_set in sets:
        for file, first in zip(row_set.files, sets[0].files, strict=True):
            if file.columns != first.columns:
                raise BadInputError(
                    f"{file.path}: {file.columns} columns, {first.path.name} has {first.columns}",
                    "all days need the same columns",
                )
    order = {"train": 0, "valid": 1, "test": 2}
    return ArraySource(
        "TorchRec's .npy set",
        "label",
        tuple(f"int_{i}" for i in range(sets[0].dense.columns)),
        tuple(f"cat_{i}" for i in range(sets[0].categorical[0].columns)),
        tuple(sorted(sets, key=lambda row_set: order[row_set.split])),
    )


def _day(directory: Path, day: int, name: str, *, last: bool, only: bool) -> list[RowSet]:
    dense = _npy(directory / f"{name}_dense.npy", "f")
    sparse = directory / f"{name}_sparse_contig_freq.npy"
    if not sparse.exists():
        sparse = directory / f"{name}_sparse.npy"
    ids = _npy(sparse, "i")
    labels = _npy(directory / f"{name}_labels.npy", "if")
    for file in (ids, labels):
        if file.rows != dense.rows:
            raise BadInputError(
                f"{file.path}: {file.rows} rows, {dense.path.name} has {dense.rows}", _FETCH
            )
    if labels.columns != 1:
        raise BadInputError(f"{labels.path}: {labels.columns} columns", "a row has one label")
    cuts = cut_last_day(dense.rows, only_day=only) if last else {"train": (0, dense.rows)}
    return [
        RowSet(split, day, begin, end, labels, dense, (ids,))
        for split, (begin, end) in cuts.items()
        if begin < end
    ]


def _npy(path: Path, kinds: str) -> ArrayFile:
    """The header of a ``.npy`` file; ``kinds``: NumPy's letters of the dtypes it may have."""
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise BadInputError(f"{path}: missing", "each day has dense, sparse and labels") from None
    except Exception as error:  # NumPy parses the header as Python, which raises anything
        raise BadInputError(f"{path}: not a whole .npy file: {error}", "fetch it again") from error
    if array.dtype.kind not in kinds or array.ndim not in (1, 2):
        raise BadInputError(
            f"{path}: {array.dtype} of shape {list(array.shape)}",
            "dense is float32 [rows, 13], sparse int32 or int64 [rows, 26], labels int32 [rows, 1]",
        )
    rows, columns = array.shape if array.ndim == 2 else (len(array), 1)
    by_column = columns > 1 and rows > 1 and array.flags.f_contiguous
    size = path.stat().st_size
    if size != array.offset + array.nbytes:
        raise BadInputError(
            f"{path}: {size} bytes, {array.offset + array.nbytes} by its header", _FETCH
        )
    return ArrayFile(path, array.dtype, rows, columns, array.offset, by_column)


# --- split binary


def _from_bin(directory: Path) -> ArraySource:
    """Without ``feature_spec.yaml``: Criteo's columns, in one of the two flavours."""
    sets = []
    flavours = set()
    for name, split in _SPLIT_NAMES.items():
        own = directory / name
        if (own / "label.bin").exists():
            flavour, row_set = _bin_split(own, split)
            flavours.add(flavour)
            sets.append(row_set)
    if len(flavours) > 1:
        raise BadInputError(
            f"{directory}: its splits are in different formats: {' and '.join(sorted(flavours))}",
            "fetch or make them again, in one format",
        )
    counts = {len(row_set.categorical) for row_set in sets}
    if len(counts) > 1:
        raise BadInputError(f"{directory}: splits with {sorted(counts)} cat_<i>.bin files", _FETCH)
    return ArraySource(
        f"{flavours.pop()} split binary set",
        "label",
        tuple(f"int_{i}" for i in range(DENSE_COLUMNS)),
        tuple(f"cat_{i}" for i in range(counts.pop())),
        tuple(sorted(sets, key=_split_order)),
    )


def _split_order(row_set: RowSet) -> int:
    return list(_SPLIT_NAMES.values()).index(row_set.split)


def _bin_split(directory: Path, split: str) -> tuple[str, RowSet]:
    numbers = sorted(
        int(match[1])
        for path in directory.glob("cat_*.bin")
        if (match := re.fullmatch(r"cat_(\d+)\.bin", path.name))
    )
    missing = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers))
    if missing:
        raise BadInputError(f"{directory / f'cat_{missing[0]}.bin'}: missing", _FETCH)
    names = [f"cat_{i}.bin" for i in numbers]
    errors = {}
    for flavour, label, dense, ids in (
        ("TorchRec's", "f4", "f4", ("i4",)),
        ("NVIDIA's", "?", "f2", ("i1", "i2", "i4")),
    ):
        try:
            label_file = _bin(directory / "label.bin", (label,), None)
            rows = label_file.rows
            dense_file = _bin(directory / "numerical.bin", (dense,), rows, DENSE_COLUMNS)
            cats = tuple(_bin(directory / name, ids, rows) for name in names)
            return flavour, RowSet(split, 0, 0, rows, label_file, dense_file, cats)
        except BadInputError as error:
            errors[flavour] = error
    # the error of the format that the size of numerical.bin, the largest file, is closer to
    sizes = [_size(directory / name) for name in ("label.bin", "numerical.bin")]
    nvidia = abs(sizes[1] - 26 * sizes[0]) < abs(sizes[1] - 13 * sizes[0])
    raise errors["NVIDIA's" if nvidia else "TorchRec's"]


def _bin(path: Path, dtypes: tuple[str, ...], rows: int | None, columns: int = 1) -> ArrayFile:
    """The file as rows of one of the dtypes; the rows are given, or follow from its size."""
    size = _size(path)
    for name in dtypes:
        dtype = np.dtype("u1" if name in ("?", "|b1") else name)  # to see bytes that are no bool
        count = size // (dtype.itemsize * columns) if rows is None else rows
        if size == count * dtype.itemsize * columns:
            return ArrayFile(path, dtype, count, columns)
    widths = " or ".join(str(np.dtype(name).itemsize * columns) for name in dtypes)
    what = "whole rows" if rows is None else f"the {rows} rows of label.bin"
    raise BadInputError(f"{path}: {size} bytes, not {what} of {widths} bytes", _FETCH)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        raise BadInputError(f"{path}: missing", _FETCH) from None


# --- feature_spec.yaml


def _from_feature_spec(directory: Path) -> ArraySource:
    """NVIDIA's Dataset Feature Specification, of sources of type ``split_binary``."""
    import yaml

    path = directory / "feature_spec.yaml"
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        channels, features = value["channel_spec"], value["feature_spec"]
        (label,) = channels["label"]
        dense, categorical = list(channels["numerical"]), list(channels["categorical"])
        dtypes = {name: np.dtype(features[name]["dtype"]) for name in [label, *dense, *categorical]}
        cardinalities = [features[name].get("cardinality") for name in categorical]
        sets = [
            _spec_split(directory, name, chunks, label, dense, categorical, dtypes)
            for name, chunks in value["source_spec"].items()
        ]
    except (
        yaml.YAMLError, OSError, LookupError, TypeError, ValueError, AttributeError, RecursionError
    ) as error:  # fmt: skip
        raise BadInputError(
            f"{path}: no feature specification: {error!r}",
            "it needs channel_spec (label, numerical, categorical), feature_spec and source_spec",
        ) from error
    for name in categorical:
        if dtypes[name].kind not in "iu":
            raise BadInputError(f"{path}: {name} is {dtypes[name]}", "ids are integers")
    known = all(isinstance(size, int) for size in cardinalities)
    return ArraySource(
        "set with NVIDIA's feature_spec.yaml",
        label,
        tuple(dense),
        tuple(name.removesuffix(".bin") for name in categorical),
        tuple(sorted(sets, key=_split_order)),
        tuple(cardinalities) if known and cardinalities else None,
    )


def _spec_split(
    directory: Path,
    name: str,
    chunks: list[dict[str, Any]],
    label: str,
    dense: list[str],
    categorical: list[str],
    dtypes: dict[str, np.dtype],
) -> RowSet:
    """One mapping of ``source_spec``."""
    path = directory / "feature_spec.yaml"
    if name not in _SPLIT_NAMES:
        raise BadInputError(f"{path}: split {name!r}", f"one of {', '.join(_SPLIT_NAMES)}")
    files = {}
    for chunk in chunks:
        if chunk["type"] != "split_binary":
            raise BadInputError(
                f"{path}: {name} holds a source of type {chunk['type']!r}",
                "split_binary is imported; give other types to `python -m etl run`",
            )
        (file,) = chunk["files"]
        files[tuple(chunk["features"])] = directory / file
    if (missing := [(one,) for one in (label, *categorical) if (one,) not in files]) or (
        dense and tuple(dense) not in files
    ):
        raise BadInputError(
            f"{path}: {name} has no file of {', '.join((missing or [tuple(dense)])[0])}",
            "label and each category have a file of their own, the numerical columns one together",
        )
    label_file = _bin(files[label,], (dtypes[label].str,), None)
    rows = label_file.rows
    if len({dtypes[one] for one in dense}) > 1:
        raise BadInputError(f"{path}: numerical columns of several dtypes", "they share a file")
    return RowSet(
        _SPLIT_NAMES[name],
        0,
        0,
        rows,
        label_file,
        _bin(files[tuple(dense)], (dtypes[dense[0]].str,), rows, len(dense)) if dense else None,
        tuple(_bin(files[one,], (dtypes[one].str,), rows) for one in categorical),
    )
