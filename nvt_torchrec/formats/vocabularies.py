"""The vocabularies of a saved workflow: how large they are, and where their values are."""

from __future__ import annotations

import dataclasses
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.feature_spec.feature_spec import FeatureSpec
from nvt_torchrec.formats.generations import read_columns
from nvt_torchrec.formats.schema import LARGEST_TABLE

if TYPE_CHECKING:
    import pyarrow as pa

COPY_AGAIN = "copy the whole workflow directory again, or fit it again"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A column's vocabulary.

    Attributes:
        name: The name of the vocabulary: the column's, or the one that columns share.
        file: The path of its values, relative to the workflow's directory.
        values: How many values have an id of their own.
        table_size: The rows of the embedding table: ``values`` + reserved ids.
        observed: The rows of the days counted (for lists: ids) that were ``null``, ``oov`` (without
            an id of their own) and ``unique`` (in the vocabulary), over all columns that share it;
            all 0 for a hashed column.
    """

    name: str
    file: str
    values: int
    table_size: int
    observed: dict[str, int]

    @property
    def meta_file(self) -> str:
        """Path of NVTabular's account of its ids."""
        return str(PurePosixPath(self.file).with_name(f"meta.{self.name}.parquet"))

    def read_counts(self, workflow: Path) -> np.ndarray:
        """Read how often each value occurred in the days that were counted, int64 [values].

        Raises:
            BadInputError: The file of the values is damaged.
        """
        import pyarrow as pa

        from nvt_torchrec.base.arrays import to_numpy

        return to_numpy(*self.read(workflow, {f"{self.name}_size": pa.int64()}))

    def read(self, workflow: Path, kinds: dict[str, pa.DataType]) -> list[pa.Array]:
        """Read columns of the file of the values. Raises :class:`BadInputError`."""
        file = workflow / self.file
        columns = read_columns(file, kinds, COPY_AGAIN)
        if len(columns[0]) != self.values:
            raise BadInputError(
                f"{file}: damaged: {len(columns[0])} values instead of {self.values}", COPY_AGAIN
            )
        return columns


@dataclasses.dataclass(frozen=True)
class VocabularyCounts:
    """What was counted of a vocabulary: ``values`` and ``observed`` of :class:`Vocabulary`."""

    values: int
    observed: dict[str, int]


def describe_vocabularies(
    spec: FeatureSpec, counted: dict[str, VocabularyCounts], directories: dict[str, str]
) -> dict[str, Vocabulary]:
    """Describe the vocabulary of each column.

    Args:
        spec: The columns.
        counted: By vocabulary, what was counted of it.
        directories: By vocabulary, the directory of its files.

    Raises:
        ValueError: A number cannot be that of a fitted vocabulary.
    """
    described = {}
    for column in spec.categorical:
        name = column.vocabulary_name
        counts = counted[name]
        most = 0 if column.hash_buckets else LARGEST_TABLE - column.reserved_ids
        good = counts.observed.keys() == {"null", "oov", "unique"}
        if not good or min(counts.observed.values()) < 0 or not 0 <= counts.values <= most:
            raise ValueError(f"the vocabulary of column {column.name} has {counts}")
        described[column.name] = Vocabulary(
            name=name,
            file=f"{directories[name]}/unique.{name}.parquet",
            values=counts.values,
            table_size=column.reserved_ids + counts.values,
            observed=counts.observed,
        )
    return described
