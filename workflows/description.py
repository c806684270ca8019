"""The description of a saved workflow, read without NVTabular.

Layout of the directory, JSON and parquet only, that of NVTabular's main branch of 2026 (its
released versions pickle)::

    metadata.json                  versions; feature spec, statistics, vocabularies, digest; size
                                   and SHA-256 of every other file. Written last
    graph.json                     operators, their parameters and fitted state, schemas
    artifacts/node_<id>/categories/unique.<vocabulary>.parquet
                                   <vocabulary> int64 or string, <vocabulary>_size int64 (how often
                                   it occurred); row i has the id reserved ids + i
    artifacts/node_<id>/categories/meta.<vocabulary>.parquet
                                   NVTabular's account of the ids
    lineage/reused.<g>.parquet     vocabulary string, id int64: the ids that generation <g> gave to
                                   other values than before; only if it did
    compiled/                      made from the above, see :mod:`workflows.compiled`; with digests
                                   of its own

``lineage`` in ``metadata.json`` lists the generations of the workflow from 0, itself last
(:class:`clicklog.generations.Generation`): number, digest, the days that were counted in it for
the first time, the number of values of each vocabulary and how many ids were reused. A workflow
that was imported, or made before generations were recorded, has no such key: it encodes rows as
any other, but cannot be extended. In generation 0 a vocabulary is ordered by falling count; what
later generations add follows behind. ``<vocabulary>_size`` and the observed rows are those of all
days counted. Neither they nor the lineage are part of the digest.

No path in it is absolute: the directory may be moved or copied. The spec in ``metadata.json``
determines the graph; a ``graph.json`` that is not the graph of this spec and state is refused.
Nothing that is read is executed: operators and functions are names, looked up in
:mod:`workflows.graph` and :mod:`workflows.functions`.

NVTabular's main branch opens the directory with its own ``Workflow.load``, if this package is
importable there: ``graph.json`` names functions of :mod:`workflows.functions`. (On a CPU its hash
differs from cuDF's; without ``nvt_compat`` hashed ids are others.) NVTabular 23.8 cannot.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from clicklog.errors import BadInputError, SchemaError
from clicklog.files.artifact import FileEntry, Format, check_digests, check_sizes
from clicklog.files.atomic import read_json
from clicklog.generations import Generation, check_lineage, read_reused
from clicklog.schema import LARGEST_TABLE, TableSchema
from clicklog.spec.feature_spec import FeatureSpec
from workflows import nodes
from workflows.moments import normalized_names

if TYPE_CHECKING:
    import numpy as np

FORMAT = Format("nvt-torchrec workflow", 2, "a saved workflow of `python -m etl run`")
METADATA_FILE = "metadata.json"
GRAPH_FILE = "graph.json"
_COPY_AGAIN = "copy the whole workflow directory again, or fit it again"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A column's vocabulary.

    Attributes:
        name: of the vocabulary: the column's, or the one that columns share.
        file: path of its values, relative to the workflow's directory.
        values: how many values have an id of their own.
        table_size: rows of the embedding table: ``values`` + reserved ids.
        observed: rows of the days counted (for lists: ids) that were ``null``, ``oov`` (without an
            id of their own) and ``unique`` (in the vocabulary), over all columns that share it; all
            0 for a hashed column.
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


@dataclasses.dataclass(frozen=True)
class WorkflowDescription:
    """A saved workflow without its values.

    Attributes:
        spec: the feature spec it was built from.
        statistics: mean and std per normalized dense column, float64.
        vocabularies: per categorical column.
        versions: of the packages that fitted it.
        digest: SHA-256 of spec (but for file format and split), statistics and vocabulary values:
            equal for equal transforms.
        files: size and SHA-256 of the other files, by relative path.
        lineage: the generations it descends from and, last, itself; () for a workflow that was
            imported, or made before generations were recorded.
    """

    spec: FeatureSpec
    statistics: dict[str, dict[str, float]]
    vocabularies: dict[str, Vocabulary]
    versions: dict[str, str]
    digest: str
    files: dict[str, FileEntry]
    lineage: tuple[Generation, ...] = ()

    @property
    def generation(self) -> int | None:
        """The number of its generation; None without a lineage."""
        return self.lineage[-1].number if self.lineage else None

    @property
    def parent(self) -> str | None:
        """The digest of the generation before; None if there is none."""
        return self.lineage[-2].digest if len(self.lineage) > 1 else None

    def ancestor(self, digest: str) -> Generation | None:
        """Return the generation with a digest, which may be this one; None if there is none.

        Generations with equal digests encode every row equally; of these it is the last.
        """
        found = (generation for generation in self.lineage[::-1] if generation.digest == digest)
        return next(found, None)

    @property
    def table_schema(self) -> TableSchema:
        """The schema of the data it writes."""
        columns = self.spec.categorical
        return TableSchema(
            label=self.spec.label,
            dense=tuple(self.spec.dense_names),
            categorical=tuple(self.spec.categorical_names),
            table_sizes=tuple(self.vocabularies[c.name].table_size for c in columns),
            multi_hot=tuple(column.name for column in columns if column.multi_hot),
            more_labels=tuple(self.spec.labels[1:]),
            weight=self.spec.weight,
        )

    @property
    def graph(self) -> dict[str, Any]:
        """What ``graph.json`` has to hold."""
        sizes = {vocabulary.name: vocabulary.values for vocabulary in self.vocabularies.values()}
        return nodes.fitted(self.spec, self.statistics, sizes)

    def write(self, path: Path) -> None:
        """Write ``metadata.json`` of the workflow in directory ``path``; its files are there."""
        content: dict[str, Any] = {
            "digest": self.digest,
            "versions": self.versions,
            "spec": self.spec.to_dict(),
            "statistics": self.statistics,
            "vocabularies": {
                vocabulary.name: {"values": vocabulary.values, "observed": vocabulary.observed}
                for vocabulary in self.vocabularies.values()
            },
            "files": {name: entry.to_dict() for name, entry in self.files.items()},
        }
        if self.lineage:
            content["lineage"] = [dataclasses.asdict(one) for one in self.lineage]
        FORMAT.write(path / METADATA_FILE, content)


@dataclasses.dataclass(frozen=True)
class _Statistics:
    mean: float
    std: float


@dataclasses.dataclass(frozen=True)
class _Observed:
    null: int
    oov: int
    unique: int


@dataclasses.dataclass(frozen=True)
class _Counted:
    values: int
    observed: _Observed


@dataclasses.dataclass(frozen=True)
class _Metadata:
    """What ``metadata.json`` holds."""

    digest: str
    versions: dict[str, str]
    spec: FeatureSpec
    statistics: dict[str, _Statistics]
    vocabularies: dict[str, _Counted]
    files: dict[str, FileEntry]
    lineage: tuple[Generation, ...] = ()

    def __post_init__(self) -> None:
        normalized = normalized_names(self.spec)
        for what, wanted in (("statistics", normalized), ("vocabularies", self.spec.vocabularies)):
            missing = sorted(set(wanted) - getattr(self, what).keys())
            if missing:
                raise ValueError(f"{what}.{missing[0]} is missing")
        values = {name: self.vocabularies[name].values for name in self.spec.vocabularies}
        check_lineage(self.lineage, self.digest, values)
        _ = self.description  # which checks the numbers

    @functools.cached_property
    def description(self) -> WorkflowDescription:
        """The same by column."""
        counted = {name: dataclasses.asdict(one) for name, one in self.vocabularies.items()}
        return WorkflowDescription(
            spec=self.spec,
            statistics={
                name: {"mean": float(one.mean), "std": float(one.std)}
                for name, one in self.statistics.items()
            },
            vocabularies=describe_vocabularies(self.spec, counted),
            versions=self.versions,
            digest=self.digest,
            files=self.files,
            lineage=self.lineage,
        )


def describe_vocabularies(
    spec: FeatureSpec, counted: dict[str, dict[str, Any]]
) -> dict[str, Vocabulary]:
    """By column, from ``values`` and ``observed`` by vocabulary.

    Raises:
        ValueError: a number cannot be that of a fitted vocabulary.
    """
    directories = nodes.vocabulary_directories(spec)
    for column in spec.categorical:
        count = counted[column.vocabulary_name]
        most = 0 if column.hash_buckets else LARGEST_TABLE - column.reserved_ids
        if not 0 <= count["values"] <= most or min(count["observed"].values()) < 0:
            raise ValueError(f"the vocabulary of column {column.name} has {count}")
    return {
        column.name: Vocabulary(
            name=(name := column.vocabulary_name),
            file=f"{directories[name]}/unique.{name}.parquet",
            values=(values := int(counted[name]["values"])),
            table_size=column.reserved_ids + values,
            observed={kind: int(n) for kind, n in counted[name]["observed"].items()},
        )
        for column in spec.categorical
    }


def inspect(path: Path | str) -> WorkflowDescription:
    """Read a saved workflow's description; of its files only names and sizes are checked.

    Raises:
        BadInputError: there is no saved workflow, or a file is missing or damaged.
        SchemaError: its format has another version.
    """
    path = Path(path)
    description = _read_metadata(path)
    _check_names(path, description)
    check_sizes(path, description.files, _COPY_AGAIN)
    _check_graph(path, description)
    return description


def verify(path: Path | str, description: WorkflowDescription) -> None:
    """Read every file and compare its SHA-256 with the description's.

    Raises:
        BadInputError: a file differs from the one that was saved.
    """
    check_digests(Path(path), description.files, _COPY_AGAIN)


def reused_ids(
    path: Path | str, description: WorkflowDescription, since: int
) -> dict[str, np.ndarray]:
    """Return the ids that were given to other values after a generation.

    Args:
        path: the workflow's directory.
        description: its description.
        since: the number of that generation.

    Returns:
        By vocabulary, int64 [n] in ascending order; without vocabularies that have no such ids.

    Raises:
        BadInputError: a file of reused ids is damaged.
    """
    import numpy as np

    reserved = {
        name: columns[0].reserved_ids for name, columns in description.spec.vocabularies.items()
    }
    found: dict[str, np.ndarray] = {}
    for generation in description.lineage:
        if generation.number > since:
            for name, ids in read_reused(Path(path), generation, reserved).items():
                found[name] = np.union1d(found[name], ids) if name in found else ids
    return found


def _read_metadata(path: Path) -> WorkflowDescription:
    if (path / "workflow.pkl").exists():
        raise BadInputError(
            f"{path}: saved by NVTabular's own Workflow.save, as a pickle",
            "pickles are not opened; fit it again with `python -m etl run`, or, if you trust "
            "its source, convert it with `python -m etl import --trust_pickle`",
        )
    if (path / "workflow.json").exists() and not (path / METADATA_FILE).exists():
        raise SchemaError(
            f"{path}: format version 1, this program reads {FORMAT.version}",
            "fit it again with `python -m etl run`",
        )
    return FORMAT.read(
        _Metadata,
        path / METADATA_FILE,
        _COPY_AGAIN,
        other_format="NVTabular's own saved workflows are opened with nvtabular.Workflow.load",
        other_version="use the version that saved it, or fit it again",
    ).description


def _check_names(path: Path, description: WorkflowDescription) -> None:
    """The files are those a workflow of this spec has, all of them inside the directory."""
    wanted = {GRAPH_FILE}
    for vocabulary in description.vocabularies.values():
        wanted |= {vocabulary.file, vocabulary.meta_file}
    wanted |= {one.reused_file for one in description.lineage if one.reused_file}
    wrong = sorted(wanted ^ description.files.keys())
    if wrong:
        raise BadInputError(
            f"{path / METADATA_FILE}: damaged: its files are not those of its spec: {wrong[0]!r} "
            f"is {'missing' if wrong[0] in wanted else 'unknown'}",
            _COPY_AGAIN,
        )


def _check_graph(path: Path, description: WorkflowDescription) -> None:
    """``graph.json`` is the graph of the spec, the statistics and the vocabularies."""
    found = read_json(path / GRAPH_FILE, "the graph of a saved workflow")
    # As text: in Python True equals 1.
    expected = json.dumps(description.graph, sort_keys=True)
    if json.dumps(found, sort_keys=True) != expected:
        difference = first_difference(found, json.loads(expected))
        raise BadInputError(
            f"{path / GRAPH_FILE}: not the graph of the spec in {METADATA_FILE}: {difference}",
            _COPY_AGAIN,
        )


def first_difference(found: Any, expected: Any, where: str = "") -> str:
    """Return the first difference of two JSON values in words; "" if there is none."""
    if isinstance(found, dict) and isinstance(expected, dict):
        for key in sorted(found.keys() | expected.keys()):
            if key not in found or key not in expected:
                return f"{where}.{key} is {'missing' if key not in found else 'unknown'}"
            if difference := first_difference(found[key], expected[key], f"{where}.{key}"):
                return difference
        return ""
    if isinstance(found, list) and isinstance(expected, list) and len(found) == len(expected):
        for i, pair in enumerate(zip(found, expected, strict=True)):
            if difference := first_difference(*pair, f"{where}[{i}]"):
                return difference
        return ""
    if isinstance(found, list) and isinstance(expected, list):
        return f"{where} has {len(found)} entries instead of {len(expected)}"
    if type(found) is type(expected) and found == expected:
        return ""
    return f"{where} is {found!r:.60} instead of {expected!r:.60}"
