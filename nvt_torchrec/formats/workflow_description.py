"""The description of a saved workflow: ``metadata.json``, and the files that it lists.

The layout of the directory is that of NVTabular's main branch of 2026, with JSON and parquet only
(its released versions pickle)::

    metadata.json                  versions; feature spec, statistics, vocabularies, digest; size
                                   and SHA-256 of every other file. Written last
    graph.json                     operators, their parameters and fitted state, schemas
    artifacts/node_<id>/categories/unique.<vocabulary>.parquet
                                   <vocabulary> int64 or string, <vocabulary>_size int64 (number of
                                   occurrences); row i has the id: number of reserved ids + i
    artifacts/node_<id>/categories/meta.<vocabulary>.parquet
                                   NVTabular's description of the ids
    compiled/                      made from the above, see :mod:`workflows.compiled`; has its own
                                   digests
    tables/                        for a spec with tables, their rows, see
                                   :mod:`formats.table_files`
    vectors/NAME/FIRST/values.npy  for a spec with vectors, their values, see :mod:`formats.vectors`
    events/                        for a spec with events, their state: ``metadata.json`` lists
                                   ``state.json``, which lists the other files; see
                                   :mod:`workflows.event_state`

``lineage`` in ``metadata.json`` lists the generations of the workflow from 0 to itself
(:class:`formats.vocabularies.Generation`): number, digest, the days that were counted in it for
the first time, and the number of values of each vocabulary. In generation 0 a vocabulary is ordered
by falling count; later generations append values. ``<vocabulary>_size`` and the observed rows
include all counted days. Neither they nor the lineage are part of the digest.

All paths are relative: the directory may be moved or copied.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import FileEntry, Format, check_digests, check_sizes
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.formats.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.table_files import list_table_files
from nvt_torchrec.formats.vectors import IN_WORKFLOW, list_vector_files, select_vectors
from nvt_torchrec.formats.vocabularies import (
    COPY_AGAIN,
    Generation,
    Vocabulary,
    VocabularyCounts,
    check_lineage,
    describe_vocabularies,
)

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = Format("nvt-torchrec workflow", 2, "a saved workflow of `python -m etl run`")
METADATA_FILE = "metadata.json"
GRAPH_FILE = "graph.json"
EVENT_STATE_FILE = "events/state.json"


@dataclasses.dataclass(frozen=True)
class WorkflowDescription:
    """The description of a saved workflow, without the values of its vocabularies.

    Attributes:
        path: The directory of the workflow.
        spec: The feature spec it was built from.
        statistics: The mean and std of each normalized dense column, float64.
        vocabularies: The vocabulary of each categorical column.
        versions: The versions of the packages that fitted it.
        digest: The SHA-256 of the spec (without file format and split), the statistics and the
            values of the vocabularies; equal for equal transforms.
        files: The size and SHA-256 of the other files, by relative path.
        lineage: The generations it descends from and, last, itself.
    """

    path: Path = dataclasses.field(compare=False)
    spec: FeatureSpec
    statistics: dict[str, dict[str, float]]
    vocabularies: dict[str, Vocabulary]
    versions: dict[str, str]
    digest: str
    files: dict[str, FileEntry]
    lineage: tuple[Generation, ...]

    @classmethod
    def read(cls, path: Path) -> WorkflowDescription:
        """Read the description of the workflow in a directory, without opening its other files.

        Raises:
            BadInputError: There is no saved workflow, or its description is damaged.
            SchemaError: The format has another version.
        """
        file = path / METADATA_FILE
        if (path / "workflow.pkl").exists():
            raise BadInputError(
                f"{path}: saved by NVTabular's own Workflow.save, as a pickle",
                "fit it again with `python -m etl run`; pickles can run code, so none is opened",
            )
        content = FORMAT.read(
            _Metadata,
            file,
            COPY_AGAIN,
            other_format="NVTabular's own saved workflows are opened with nvtabular.Workflow.load",
            other_version="use the version that saved it, or fit it again",
        )
        expected = content.file_names()
        differing = expected ^ content.files.keys()
        if content.spec.events:
            # The state of the events is made with this workflow, so it is listed later.
            differing.discard(EVENT_STATE_FILE)
        if differing:
            name = min(differing)
            what = "missing" if name in expected else "unknown"
            raise BadInputError(
                f"{file}: damaged: it does not list the files of its spec: {name!r} is {what}",
                COPY_AGAIN,
            )
        return cls(
            path=path,
            spec=content.spec,
            statistics=content.statistics,
            vocabularies=describe_vocabularies(
                content.spec,
                content.vocabularies,
                {name: content.directory(name) for name in content.spec.vocabularies},
            ),
            versions=content.versions,
            digest=content.digest,
            files=content.files,
            lineage=content.lineage,
        )

    def write(self) -> None:
        """Write ``metadata.json``, after all other files. Raises :class:`OutputError`."""
        vocabularies = {}
        for vocabulary in self.vocabularies.values():
            counts = {"values": vocabulary.values, "observed": vocabulary.observed}
            vocabularies[vocabulary.name] = counts
        content: dict[str, Any] = {
            "digest": self.digest,
            "versions": self.versions,
            "spec": self.spec.to_dict(),
            "statistics": self.statistics,
            "vocabularies": vocabularies,
            "files": {name: entry.to_dict() for name, entry in self.files.items()},
            "lineage": [generation.to_dict() for generation in self.lineage],
        }
        FORMAT.write(self.path / METADATA_FILE, content)

    def list_event_state(self) -> WorkflowDescription:
        """Add the state of the events, which has been written, to ``metadata.json``.

        The workflow can then be opened only with this state, not with the state of another day.

        Returns:
            The description with the state among its files.

        Raises:
            OutputError: The directory cannot be written.
        """
        entry = FileEntry.from_file(self.path / EVENT_STATE_FILE)
        listed = dataclasses.replace(self, files=self.files | {EVENT_STATE_FILE: entry})
        listed.write()
        return listed

    @property
    def copied_files(self) -> dict[str, FileEntry]:
        """The files that must exist: all, except those of vectors if their directory is missing.

        The bundle of a model that uses no vectors lacks them. Code that needs them checks that they
        exist (:func:`workflows.vector_stores.open_vectors`).
        """
        if (self.path / IN_WORKFLOW).is_dir():
            return self.files
        left_out = select_vectors(self.files)
        return {name: entry for name, entry in self.files.items() if name not in left_out}

    def check_sizes(self) -> None:
        """Raise :class:`BadInputError` unless the files exist and have their sizes."""
        check_sizes(self.path, self.copied_files, COPY_AGAIN)

    def verify(self) -> None:
        """Compare every file with its digest, which reads all of it. Raises BadInputError."""
        check_digests(self.path, self.copied_files, COPY_AGAIN)

    def check_file(self, name: str) -> Path:
        """Compare one file with its digest, and return its path. Raises :class:`BadInputError`."""
        entry = {name: self.files[name]}
        check_sizes(self.path, entry, COPY_AGAIN)
        check_digests(self.path, entry, COPY_AGAIN)
        return self.path / name

    @property
    def generation(self) -> int:
        """The number of its generation."""
        return self.lineage[-1].number

    @property
    def parent(self) -> str | None:
        """The digest of the previous generation; None for generation 0."""
        return self.lineage[-2].digest if len(self.lineage) > 1 else None

    def ancestor(self, digest: str) -> Generation | None:
        """Return the last generation with a digest, which may be this one; None without one.

        Generations with equal digests encode every row in the same way.
        """
        for generation in reversed(self.lineage):
            if generation.digest == digest:
                return generation
        return None

    @property
    def table_schema(self) -> TableSchema:
        """The schema of the parquet that the workflow writes."""
        columns = self.spec.categorical
        return TableSchema(
            labels=tuple(self.spec.labels),
            dense=tuple(self.spec.dense_names),
            categorical=tuple(self.spec.categorical_names),
            table_sizes=tuple(self.vocabularies[c.name].table_size for c in columns),
            multi_hot=tuple(column.name for column in columns if column.multi_hot),
            weight=self.spec.weight,
            histories=tuple(StoredHistory(rule.name, rule.columns) for rule in self.spec.histories),
            vocabularies=tuple(column.vocabulary_name for column in columns),
            vectors=tuple(vector.stored for vector in self.spec.vectors),
            log_q_correction=self.spec.log_q_correction,
        )

    def read_values(self, column: CategoricalColumn) -> tuple[pa.Array, pa.Array]:
        """Read the values of a column's vocabulary, and their numbers of occurrences.

        Returns:
            The values, int64 or string, and the numbers, int64; without nulls.

        Raises:
            BadInputError: The file is missing or damaged.
        """
        import pyarrow as pa

        vocabulary = self.vocabularies[column.name]
        kind = pa.string() if RAW_TYPES[column.raw].is_text else pa.int64()
        kinds = {vocabulary.name: kind, f"{vocabulary.name}_size": pa.int64()}
        values, counts = vocabulary.read(self.path, kinds)
        return values, counts

    def oov_ids(self, column: CategoricalColumn, ids: np.ndarray) -> np.ndarray:
        """Return the out-of-vocabulary ids that values had before they joined the vocabulary.

        Args:
            column: The column, which is not hashed.
            ids: int64 [n], the ids that the values have now.

        Returns:
            int64 [n], the out-of-vocabulary ids of the same values.

        Raises:
            BadInputError: The vocabulary's file is missing or damaged.
        """
        if column.oov_ids == 1 or not len(ids):
            return np.full(len(ids), FIRST_OOV_ID, np.int64)
        from nvt_torchrec.base.arrays import to_arrow, to_numpy
        from nvt_torchrec.base.hashing import murmur3_int, murmur3_string  # imports Numba

        file = self.check_file(self.vocabularies[column.name].file)
        values, _ = self.read_values(column)
        positions = ids - column.reserved_ids
        if positions.min() < 0 or positions.max() >= len(values):
            raise BadInputError(
                f"{file}: damaged: {len(values)} values instead of more than {positions.max()}",
                COPY_AGAIN,
            )
        if RAW_TYPES[column.raw].is_text:
            hashes = murmur3_string(values.take(to_arrow(positions)))
        else:
            hashes = murmur3_int(to_numpy(values)[positions])
        return FIRST_OOV_ID + (hashes % np.uint32(column.oov_ids)).astype(np.int64)


def identify(path: Path) -> WorkflowDescription | None:
    """Read the description of the workflow in a directory; None if NVTabular itself saved it.

    Raises:
        BadInputError: The workflow is damaged.
        SchemaError: The format has another version.
    """
    file = path / METADATA_FILE
    if not file.is_file():
        return None
    value = read_json(file, FORMAT.what)
    if isinstance(value, dict) and not {"format", "format_version"} & value.keys():
        return None
    return WorkflowDescription.read(path)


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """The contents of ``metadata.json``."""

    digest: str
    versions: dict[str, str]
    spec: FeatureSpec
    statistics: dict[str, dict[str, float]]
    vocabularies: dict[str, VocabularyCounts]
    files: dict[str, FileEntry]
    lineage: tuple[Generation, ...]

    def __post_init__(self) -> None:
        for name in self.spec.normalized_names:
            if self.statistics.get(name, {}).keys() != {"mean", "std"}:
                raise ValueError(f"statistics.{name}: expected mean and std")
        missing = self.spec.vocabularies.keys() - self.vocabularies.keys()
        if missing:
            raise ValueError(f"vocabularies.{min(missing)} is missing")
        values = {name: self.vocabularies[name].values for name in self.spec.vocabularies}
        check_lineage(self.lineage, self.digest, values)
        # called for its checks; the result, whose paths are wrong, is not used
        describe_vocabularies(self.spec, self.vocabularies, dict.fromkeys(values, ""))

    def directory(self, vocabulary: str) -> str:
        """Return the directory of a vocabulary's files; ``artifacts`` if no file is listed."""
        ending = f"/unique.{vocabulary}.parquet"
        file = next((name for name in self.files if name.endswith(ending)), f"artifacts{ending}")
        return file.removesuffix(ending)

    def file_names(self) -> set[str]:
        """Return the files that a workflow of this spec and lineage has."""
        names = {GRAPH_FILE}
        for vocabulary in self.spec.vocabularies:
            directory = self.directory(vocabulary)
            names.add(f"{directory}/unique.{vocabulary}.parquet")
            names.add(f"{directory}/meta.{vocabulary}.parquet")
        for vector in self.spec.vectors:
            names |= {*list_vector_files(vector.name, self.files)}
        return names | {*list_table_files(self.spec)}
