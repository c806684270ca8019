"""The output that is checked: its files as far as they can be read, and the findings so far."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import BadInputError, ClickLogError
from nvt_torchrec.etl.output import UNFINISHED_FILE
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.formats.splits import SPLITS

AGAIN = "restore the file, or run the ETL again"
#: Severities: training fails or is wrong; training may be wrong; for information only.
ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A line of a check's report.

    Attributes:
        severity: :data:`ERROR`, :data:`WARNING` or :data:`NOTE`.
        kind: The kind of the finding, in one or two words; similar findings share it.
        where: The file, and the row group, row or column in it.
        what: What is wrong there, with the value.
        remedy: What to do about it.
    """

    severity: str
    kind: str
    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        line = f"{self.severity}: {self.where}: {self.what}"
        if self.remedy:
            line += f" -> {self.remedy}"
        return " ".join(line.split())


@dataclasses.dataclass
class Output:
    """An output directory, as far as it could be read.

    Attributes:
        path: The path that was given.
        root: The directory of the splits; the paths of files are relative to it.
        splits: The parquet files of each split.
        footers: The footers of the files that have a valid one.
        schema: The columns and table sizes; None without a schema.
        manifest: The manifest; None without one that can be read.
        findings: The findings so far.
    """

    path: Path
    root: Path
    splits: dict[str, list[str]]
    footers: dict[str, pq.FileMetaData] = dataclasses.field(default_factory=dict)
    schema: TableSchema | None = None
    manifest: Manifest | None = None
    findings: list[Finding] = dataclasses.field(default_factory=list)

    def error(self, kind: str, where: Any, what: str, remedy: str) -> None:
        """Add a finding that training fails on, or is wrong with."""
        self._add(ERROR, kind, where, what, remedy)

    def warning(self, kind: str, where: Any, what: str, remedy: str) -> None:
        """Add a finding that training may be wrong with."""
        self._add(WARNING, kind, where, what, remedy)

    def note(self, kind: str, where: Any, what: str, remedy: str = "") -> None:
        """Add a finding for information."""
        self._add(NOTE, kind, where, what, remedy)

    def _add(self, severity: str, kind: str, where: Any, what: str, remedy: str) -> None:
        what = what.removeprefix(f"{where}: ")
        self.findings.append(Finding(severity, kind, str(where), what, remedy))


def find(path: Path) -> Output:
    """Find the splits at ``path``; read footers, schema and manifest.

    Raises:
        BadInputError: The directory does not exist, contains no parquet file, or is between two
            generations.
    """
    if not path.is_dir():
        raise BadInputError(f"{path}: no such directory", "give the OUT of a run")
    EtlOutput(path).check_whole()
    root, splits = _find_splits(path)
    if not splits and not (path / UNFINISHED_FILE).exists():
        raise BadInputError(
            f"{path}: no parquet file in it, nor in train, valid or test below it",
            "give the OUT of a run, or a directory of splits",
        )
    output = Output(path, root, splits)
    for file in itertools.chain(*splits.values()):
        try:
            output.footers[file] = pq.read_metadata(root / file)
        except (OSError, pa.ArrowException) as error:
            output.error("footer", file, f"not a parquet file: {error}", AGAIN)
    _read_schema(output)
    _read_manifest(output)
    return output


def _find_splits(path: Path) -> tuple[Path, dict[str, list[str]]]:
    for root in (EtlOutput(path).splits, path):
        splits = {name: _parquet_files(root / name, root) for name in SPLITS}
        splits = {name: files for name, files in splits.items() if files}
        if splits:
            return root, splits
    files = _parquet_files(path, path.parent)
    return path.parent, {path.name: files} if files else {}


def _parquet_files(directory: Path, root: Path) -> list[str]:
    """List the files that the loader reads."""
    paths = sorted(path for path in directory.glob("*.parquet") if path.name[0] not in "._")
    return [str(path.relative_to(root)) for path in paths]


def _read_schema(output: Output) -> None:
    """Read the schema of all splits: that of their directory, or else of the first split."""
    for directory in (output.root, *(output.root / split for split in output.splits)):
        file = directory / SCHEMA_FILE
        if not file.exists():
            if directory != output.root:
                remedy = "the loader reads table sizes from it: copy it from another split"
                output.error("schema", directory, f"no {SCHEMA_FILE}", remedy)
            continue
        try:
            schema = TableSchema.read(directory)
        except ClickLogError as error:
            remedy = "write it with TableSchema.write of nvt_torchrec.formats.schema"
            output.error("schema", file, error.what, remedy)
            continue
        if output.schema is None:
            output.schema = schema
        elif schema != output.schema:
            remedy = "all splits need the same schema: copy the right one"
            output.error("schema", file, "different from the one of another split", remedy)


def _read_manifest(output: Output) -> None:
    file = EtlOutput(output.path).manifest
    if not file.exists():
        if not (output.path / UNFINISHED_FILE).exists():
            output.note(
                "manifest",
                output.path,
                f"no {file.name}: made elsewhere, so rows and files are not compared with it",
            )
        return
    try:
        output.manifest = Manifest.read(file)
    except ClickLogError as error:
        output.error("manifest", file, error.what, error.remedy)
