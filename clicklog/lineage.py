"""The line of descent of a saved workflow, for programs that train on its data.

It is read from the workflow's ``metadata.json`` and the files that this names, which the package
``workflows`` writes and documents; only what these programs need is looked at.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from clicklog.errors import BadInputError, SchemaError
from clicklog.files.artifact import FileEntry, check_digests, check_sizes
from clicklog.files.atomic import read_json
from clicklog.files.validation import parse
from clicklog.generations import Generation, check_lineage, read_reused
from clicklog.spec.feature_spec import FIRST_OOV_ID, CategoricalColumn, FeatureSpec
from clicklog.spec.raw_types import RAW_TYPES

METADATA_FILE = "metadata.json"
_WHAT = "a saved workflow"
_COPY_AGAIN = "copy the whole workflow directory again, or fit it again"


@dataclasses.dataclass(frozen=True)
class Lineage:
    """A saved workflow and the generations before it.

    Attributes:
        path: The directory of the workflow.
        digest: Its digest.
        spec: The feature spec.
        files: Sizes and digests of its files, by relative path.
        generations: All generations from 0 on, the workflow itself last.
    """

    path: Path
    digest: str
    spec: FeatureSpec
    files: dict[str, FileEntry]
    generations: tuple[Generation, ...]

    @classmethod
    def read(cls, path: Path) -> Lineage:
        """Read the lineage of the workflow in a directory.

        Raises:
            BadInputError: There is no workflow, or it is damaged.
            SchemaError: The workflow was made before generations were recorded.
        """
        file = path / METADATA_FILE
        value = parse(dict[str, Any], read_json(file, _WHAT, _COPY_AGAIN), file, _COPY_AGAIN)
        if not value.get("lineage"):
            raise SchemaError(
                f"{file}: names no generations: it was made before workflows could be extended, or "
                "imported",
                "fit it again with `python -m etl run`",
            )
        lineage = cls(
            path=path,
            digest=parse(str, value.get("digest"), file, _COPY_AGAIN),
            spec=parse(FeatureSpec, value.get("spec"), file, _COPY_AGAIN),
            files=parse(dict[str, FileEntry], value.get("files"), file, _COPY_AGAIN),
            generations=parse(tuple[Generation, ...], value["lineage"], file, _COPY_AGAIN),
        )
        values = lineage.current.values
        own = {name: values.get(name, 0) for name in lineage.spec.vocabularies}
        try:
            check_lineage(lineage.generations, lineage.digest, own)
        except ValueError as error:
            raise BadInputError(f"{file}: damaged: {error}", _COPY_AGAIN) from None
        return lineage

    @property
    def current(self) -> Generation:
        """The generation of the workflow itself."""
        return self.generations[-1]

    def ancestor(self, digest: str) -> Generation | None:
        """Return the generation with a digest, which may be the workflow's own; None without one.

        Generations with equal digests encode every row equally; of these it is the last.
        """
        same = (found for found in reversed(self.generations) if found.digest == digest)
        return next(same, None)

    def reused_ids(self, since: int) -> dict[str, np.ndarray]:
        """Return the ids that were given to other values after generation ``since``.

        Returns:
            By vocabulary, int64 [n] in ascending order; without vocabularies that have none.

        Raises:
            BadInputError: A file is missing or damaged.
        """
        reserved = {name: own[0].reserved_ids for name, own in self.spec.vocabularies.items()}
        found: dict[str, np.ndarray] = {}
        for generation in self.generations:
            if generation.number > since and generation.reused_file:
                self._check_file(generation.reused_file)
                for name, ids in read_reused(self.path, generation, reserved).items():
                    found[name] = np.union1d(found.get(name, np.empty(0, np.int64)), ids)
        return found

    def oov_ids(self, column: CategoricalColumn, ids: np.ndarray) -> np.ndarray:
        """Return by which id a column's values were encoded before they had one of their own.

        Args:
            column: The column, which is not hashed.
            ids: Ids of values that the vocabulary holds now: int64 [n].

        Returns:
            The ids of out of vocabulary: int64 [n].

        Raises:
            BadInputError: The vocabulary's file is missing or damaged.
        """
        if column.oov_ids == 1 or not len(ids):
            return np.full(len(ids), FIRST_OOV_ID, np.int64)
        from clicklog.arrays import to_arrow, to_numpy
        from clicklog.hashing import murmur3_int, murmur3_string  # imports Numba

        vocabulary = column.vocabulary_name
        ending = f"/unique.{vocabulary}.parquet"
        name = next((name for name in self.files if name.endswith(ending)), ending[1:])
        kind = RAW_TYPES[column.raw].vocabulary_type
        values = self._columns(name, {vocabulary: kind})[vocabulary]
        places = ids - column.reserved_ids
        if len(ids) and (places.min() < 0 or places.max() >= len(values)):
            raise BadInputError(
                f"{self.path / name}: damaged: {len(values)} values instead of more than "
                f"{places.max()}",
                _COPY_AGAIN,
            )
        hashes = (
            murmur3_string(values.take(to_arrow(places)))
            if kind == "string"
            else murmur3_int(to_numpy(values)[places])
        )
        return FIRST_OOV_ID + (hashes % np.uint32(column.oov_ids)).astype(np.int64)

    def _columns(self, name: str, kinds: dict[str, str]) -> dict[str, Any]:
        """Read columns without nulls of a file of the workflow, as Arrow arrays."""
        import pyarrow as pa  # takes 100 ms, and most callers read no file
        import pyarrow.parquet as pq

        self._check_file(name)
        file = self.path / name
        try:
            table = pq.read_table(file, columns=list(kinds))
        except (pa.ArrowException, OSError) as error:
            raise BadInputError(f"{file}: cannot be read: {error}", _COPY_AGAIN) from error
        arrays = {column: table[column].combine_chunks() for column in table.column_names}
        found = {column: str(array.type) for column, array in arrays.items()}
        if found != kinds or any(array.null_count for array in arrays.values()):
            raise BadInputError(f"{file}: damaged: its columns are {found}", _COPY_AGAIN)
        return arrays

    def _check_file(self, name: str) -> None:
        """Compare a file of the workflow with its digest."""
        if name not in self.files:
            raise BadInputError(f"{self.path / name}: not among the workflow's files", _COPY_AGAIN)
        entry = {name: self.files[name]}
        check_sizes(self.path, entry, _COPY_AGAIN)
        check_digests(self.path, entry, _COPY_AGAIN)


@dataclasses.dataclass(frozen=True)
class Identity:
    """Which workflow made some data.

    Attributes:
        digest: The digest of the workflow; None if it is unknown.
        generation: The number of its generation; None if it is unknown.
    """

    digest: str | None
    generation: int | None


def identify(path: Path) -> Identity:
    """Return which workflow lies in a directory, as far as it says, without its other contents.

    Raises:
        BadInputError: The workflow is damaged.
    """
    file = path / METADATA_FILE
    value = read_json(file, _WHAT, _COPY_AGAIN) if file.is_file() else {}
    value = parse(dict[str, Any], value, file, _COPY_AGAIN)
    lineage = parse(list[dict[str, Any]], value.get("lineage") or [], file, _COPY_AGAIN)
    number = lineage[-1].get("number") if lineage else None
    found = {"digest": value.get("digest"), "generation": number}
    return parse(Identity, found, file, _COPY_AGAIN)
