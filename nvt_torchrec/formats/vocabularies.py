"""The vocabularies of a saved workflow, and its lineage, which is a list of generations.

``python -m etl run`` makes generation 0. Each day that ``python -m etl extend`` adds makes the next
generation. Its vocabularies begin with those of the previous generation, so a value keeps its id.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.schema import LARGEST_TABLE

if TYPE_CHECKING:
    import pyarrow as pa

_DIGEST = re.compile("[0-9a-f]{64}")
COPY_AGAIN = "copy the whole workflow directory again, or fit it again"


@dataclasses.dataclass(frozen=True)
class Generation:
    """A workflow of a lineage.

    Attributes:
        number: 0 for the workflow that was fitted, then 1, 2, ….
        digest: The digest of the workflow. A day that adds nothing gives a generation with the
            digest of its parent.
        days: The days that were counted for the first time in this generation, increasing.
        values: The number of values of each vocabulary.
        reused: The number of ids of each vocabulary that were given to other values, which only
            earlier versions could do (``--retire_after_days``). A workflow with such ids is
            refused.
    """

    number: int
    digest: str
    days: tuple[int, ...]
    values: dict[str, int]
    reused: dict[str, int] | None = None

    def __post_init__(self) -> None:
        where = f"generation {self.number}"
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"{where}: {self.digest!r:.80} is not a digest")
        if not self.days or self.days[0] < 0 or list(self.days) != sorted(set(self.days)):
            raise ValueError(f"{where}: its days {list(self.days)!r:.80} do not increase from 0")
        if min(self.values.values(), default=0) < 0:
            raise ValueError(f"{where}: a number of values is negative")
        if any((self.reused or {}).values()):
            raise ValueError(f"{where}: ids were given to other values (--retire_after_days)")

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready form."""
        return {key: item for key, item in dataclasses.asdict(self).items() if key != "reused"}


def check_lineage(lineage: Sequence[Generation], digest: str, values: Mapping[str, int]) -> None:
    """Check that generations are the lineage of a workflow.

    Args:
        lineage: The generations.
        digest: The digest of the workflow.
        values: The number of values of each vocabulary of the workflow.

    Raises:
        ValueError: A generation has the wrong number or vocabularies, or the last one is another
            workflow.
    """
    for number, generation in enumerate(lineage):
        if generation.number != number or generation.values.keys() != values.keys():
            raise ValueError(f"lineage[{number}] is not generation {number} of this workflow")
    if not lineage or (lineage[-1].digest, lineage[-1].values) != (digest, dict(values)):
        raise ValueError("the last generation of the lineage is not this workflow")


def read_columns(file: Path, kinds: Mapping[str, pa.DataType], remedy: str) -> list[pa.Array]:
    """Read columns without nulls from a parquet file.

    Args:
        file: The file.
        kinds: The columns and their types.
        remedy: What to do about a damaged file.

    Raises:
        BadInputError: The file cannot be read, or its columns have nulls or other types.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq  # pq.read_table imports pandas

    try:
        with pq.ParquetFile(file, page_checksum_verification=True) as opened:
            table = opened.read(columns=list(kinds))
        held = dict(zip(table.column_names, table.schema.types, strict=True))
        if held != kinds or any(column.null_count for column in table.columns):
            raise ValueError(f"expected columns {dict(kinds)} without nulls, found {held}")
    except (OSError, ValueError, pa.ArrowException) as error:
        raise BadInputError(f"{file}: damaged: {error}", remedy) from error
    return [table.column(name).combine_chunks() for name in kinds]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A column's vocabulary.

    Attributes:
        name: The name of the vocabulary: that of its column, or the name that columns share.
        file: The path of its values, relative to the workflow's directory.
        values: The number of values.
        table_size: The rows of the embedding table: ``values`` + reserved ids.
        observed: The number of rows (for lists, of ids) of the counted days that were ``null``,
            ``oov`` (out of vocabulary) and ``unique`` (in the vocabulary), over all columns that
            share the vocabulary; all 0 for a hashed column.
    """

    name: str
    file: str
    values: int
    table_size: int
    observed: dict[str, int]

    @property
    def meta_file(self) -> str:
        """The path of NVTabular's description of the ids, relative to the workflow's directory."""
        return str(PurePosixPath(self.file).with_name(f"meta.{self.name}.parquet"))

    def read_counts(self, workflow: Path) -> np.ndarray:
        """Read the number of occurrences of each value in the counted days, int64 [values].

        Raises:
            BadInputError: The file of the values is damaged.
        """
        import pyarrow as pa

        from nvt_torchrec.base.arrays import to_numpy

        return to_numpy(*self.read(workflow, {f"{self.name}_size": pa.int64()}))

    def read(self, workflow: Path, kinds: dict[str, pa.DataType]) -> list[pa.Array]:
        """Read columns of the file of values. Raises :class:`BadInputError`."""
        file = workflow / self.file
        columns = read_columns(file, kinds, COPY_AGAIN)
        if len(columns[0]) != self.values:
            raise BadInputError(
                f"{file}: damaged: {len(columns[0])} values instead of {self.values}", COPY_AGAIN
            )
        return columns


@dataclasses.dataclass(frozen=True)
class VocabularyCounts:
    """The counts of a vocabulary, see the attributes of :class:`Vocabulary`."""

    values: int
    observed: dict[str, int]


def describe_vocabularies(
    spec: FeatureSpec, counted: dict[str, VocabularyCounts], directories: dict[str, str]
) -> dict[str, Vocabulary]:
    """Describe the vocabulary of each column.

    Args:
        spec: The columns.
        counted: The counts of each vocabulary.
        directories: The directory of the files of each vocabulary.

    Raises:
        ValueError: A count cannot be right.
    """
    described = {}
    for column in spec.categorical:
        name = column.vocabulary_name
        counts = counted[name]
        maximum = 0 if column.hash_buckets else LARGEST_TABLE - column.reserved_ids
        observed = counts.observed
        has_keys = observed.keys() == {"null", "oov", "unique"}
        if not has_keys or min(observed.values()) < 0 or not 0 <= counts.values <= maximum:
            raise ValueError(f"the vocabulary of column {column.name} has impossible {counts}")
        described[column.name] = Vocabulary(
            name=name,
            file=f"{directories[name]}/unique.{name}.parquet",
            values=counts.values,
            table_size=column.reserved_ids + counts.values,
            observed=observed,
        )
    return described
