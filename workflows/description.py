"""What a saved workflow holds, read without NVTabular.

Layout of the directory, JSON and parquet only (NVTabular's own ``Workflow.save`` pickles)::

    workflow.json                         spec, statistics, sizes of the vocabularies, digest
    categories/unique.<column>.parquet    value int64, <column>_size int64; row i has the id
                                          reserved ids + i
    categories/meta.<column>.parquet      NVTabular's account of the ids
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from clicklog.errors import BadInputError, SchemaError
from clicklog.files import read_json
from clicklog.schema import TableSchema
from clicklog.spec import FeatureSpec

FORMAT = "nvt-torchrec workflow"
FORMAT_VERSION = 1
WORKFLOW_FILE = "workflow.json"


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """A column's vocabulary.

    Attributes:
        file: path of its values, relative to the workflow's directory.
        values: how many values have an id of their own.
        table_size: rows of the embedding table: ``values`` + reserved ids.
        observed: rows of the training days that were null, out of vocabulary (too rare), and in
            the vocabulary.
    """

    file: str
    values: int
    table_size: int
    observed: dict[str, int]


@dataclasses.dataclass(frozen=True)
class WorkflowDescription:
    """A saved workflow without its values.

    Attributes:
        spec: the feature spec it was built from.
        statistics: mean and std per normalized dense column, float64.
        vocabularies: per categorical column.
        versions: of the packages that fitted it.
        digest: SHA-256 of spec, statistics and vocabulary values: equal for equal transforms.
    """

    spec: FeatureSpec
    statistics: dict[str, dict[str, float]]
    vocabularies: dict[str, Vocabulary]
    versions: dict[str, str]
    digest: str

    @property
    def table_schema(self) -> TableSchema:
        """The schema of the data it writes."""
        names = self.spec.categorical_names
        return TableSchema(
            label=self.spec.label,
            dense=tuple(self.spec.dense_names),
            categorical=tuple(names),
            table_sizes=tuple(self.vocabularies[name].table_size for name in names),
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "digest": self.digest,
            "versions": self.versions,
            "spec": self.spec.to_dict(),
            "statistics": self.statistics,
            "vocabularies": {
                name: dataclasses.asdict(vocabulary)
                for name, vocabulary in self.vocabularies.items()
            },
        }


def inspect(path: Path | str) -> WorkflowDescription:
    """Read a saved workflow's description.

    Raises:
        BadInputError: no saved workflow there, or a vocabulary file missing.
        SchemaError: saved in a format of another version.
    """
    path = Path(path)
    if (path / "workflow.pkl").exists():
        raise BadInputError(
            f"{path}: saved by NVTabular's own Workflow.save, as a pickle",
            "pickles are not opened; fit it again with `python -m etl run`",
        )
    value = read_json(path / WORKFLOW_FILE, "a workflow saved by `python -m etl run`")
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise BadInputError(f"{path / WORKFLOW_FILE}: not a saved workflow")
    if value.get("format_version") != FORMAT_VERSION:
        raise SchemaError(
            f"{path}: format version {value.get('format_version')}, this program reads "
            f"{FORMAT_VERSION}",
            "use the version that saved it "
            f"({value.get('versions', {}).get('nvt-torchrec', 'unknown')}), or fit it again",
        )
    try:
        description = WorkflowDescription(
            spec=FeatureSpec.from_dict(value["spec"]),
            statistics=value["statistics"],
            vocabularies={name: Vocabulary(**v) for name, v in value["vocabularies"].items()},
            versions=value["versions"],
            digest=value["digest"],
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise BadInputError(
            f"{path / WORKFLOW_FILE}: damaged: {error!r}", "copy it again, or fit it again"
        ) from error
    for name, vocabulary in description.vocabularies.items():
        if not (path / vocabulary.file).is_file():
            raise BadInputError(
                f"{path / vocabulary.file}: missing, the vocabulary of column {name}",
                "copy the whole workflow directory, or fit it again",
            )
    return description
