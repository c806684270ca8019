"""The output that is checked, and checks of it without reading the data: of its files, their
footers, the manifest and the workflow.
"""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import BadInputError, ClickLogError, as_called
from nvt_torchrec.base.files.validation import open_regular
from nvt_torchrec.etl.state.output import EXTENDING_FILE, UNFINISHED_FILE, WORK_DIRECTORY
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.histories import HISTORIES
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.workflow_description import WorkflowDescription

AGAIN = "restore the file, or run the ETL again"
#: Severities: training fails or is wrong; training may be wrong; for information only.
ERROR, WARNING, NOTE = "error", "warning", "note"
_TYPES = "write ids as int32 (or lists of int32), dense features and labels as float32"
_SAME_COPY = "workflow and data are of different days: restore both from the same copy"
_OTHER_WORKFLOW = "the data were made with another workflow: restore it, or run the ETL again"


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
            line += f" -> {as_called(self.remedy)}"
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

    def add(
        self, kind: str, where: Any, what: str, remedy: str = "", *, severity: str = ERROR
    ) -> None:
        """Add a finding."""
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
            with open_regular(root / file) as opened:
                output.footers[file] = pq.read_metadata(opened)
        except (OSError, pa.ArrowException) as error:
            output.add("footer", file, f"not a parquet file: {error}", AGAIN)
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
                output.add("schema", directory, f"no {SCHEMA_FILE}", remedy)
            continue
        try:
            schema = TableSchema.read(directory)
        except ClickLogError as error:
            remedy = "write it with TableSchema.write of nvt_torchrec.formats.schema"
            output.add("schema", file, error.what, remedy)
            continue
        if output.schema is None:
            output.schema = schema
        elif schema != output.schema:
            remedy = "all splits need the same schema: copy the right one"
            output.add("schema", file, "different from the one of another split", remedy)


def _read_manifest(output: Output) -> None:
    file = EtlOutput(output.path).manifest
    if not file.exists():
        if not (output.path / UNFINISHED_FILE).exists():
            output.add(
                "manifest",
                output.path,
                f"no {file.name}: made elsewhere, so rows and files are not compared with it",
                severity=NOTE,
            )
        return
    try:
        output.manifest = Manifest.read(file)
    except ClickLogError as error:
        output.add("manifest", file, error.what, error.remedy)


def check_files(output: Output) -> None:
    """Check that all splits exist, the columns of their files, and what describes the files."""
    _check_unfinished(output)
    _check_splits(output)
    _check_columns(output)
    description = _check_workflow(output)
    if output.manifest is not None:
        _check_parts(output, output.manifest)
        if description is not None:
            _check_generations(output, output.manifest, description)


def _check_unfinished(output: Output) -> None:
    unfinished, extending, work = (
        output.path / name for name in (UNFINISHED_FILE, EXTENDING_FILE, WORK_DIRECTORY)
    )
    if unfinished.exists():
        remedy = "finish it by the same command, or begin again with --restart"
        output.add("unfinished", unfinished, "the run has not finished", remedy)
    elif extending.exists():
        what = "a day is being added, or adding it was interrupted; this is the output without it"
        output.add(
            "unfinished",
            extending,
            what,
            "finish it by the same `python -m etl extend`",
            severity=NOTE,
        )
    elif work.exists():
        output.add("leftover", work, "left by a run", "delete it", severity=WARNING)


def _check_splits(output: Output) -> None:
    for name in SPLITS:
        if name not in output.splits and len(output.splits) > 1:
            output.add(
                "splits",
                output.root / name,
                "no parquet file",
                f"add a split {name}",
                severity=WARNING,
            )
    for name, files in output.splits.items():
        if not sum(output.footers[file].num_rows for file in files if file in output.footers):
            output.add("splits", output.root / name, "no rows", AGAIN)


def _check_columns(output: Output) -> None:
    """Compare names and types with the schema, or else with the first file."""
    wanted = output.schema.arrow if output.schema else None
    for file, footer in output.footers.items():
        schema = footer.schema.to_arrow_schema()
        wanted = wanted or schema
        for field in wanted:
            count, where = schema.names.count(field.name), f"{file}: column {field.name}"
            if count != 1:
                what = f"occurs {count} times" if count else "missing"
                output.add("columns", where, what, AGAIN)
            elif not _same_type(schema.field(field.name).type, field.type):
                what = f"{schema.field(field.name).type} instead of {field.type}"
                output.add("columns", where, what, _TYPES)


def _same_type(written: pa.DataType, wanted: pa.DataType) -> bool:
    """Compare types without the names of list elements and nullability."""
    if pa.types.is_list(written) and pa.types.is_list(wanted):
        return written.value_type == wanted.value_type
    return written == wanted


def _check_workflow(output: Output) -> WorkflowDescription | None:
    """Check the digests of the saved workflow, and that the data were made with it."""
    path = EtlOutput(output.path).workflow
    expected = output.manifest.workflow_digest if output.manifest else None
    if not path.exists():
        if expected:
            output.add("workflow", path, "missing, but inference needs it", AGAIN)
        return None
    from nvt_torchrec.workflows import compiled  # takes long to import
    from nvt_torchrec.workflows.description import inspect

    try:
        description = inspect(path)
        description.verify()
        if (path / "compiled").exists():
            compiled.load(path, verify=True)
    except ClickLogError as error:
        output.add("workflow", path, error.what, error.remedy)
        return None
    if expected and description.digest != expected:
        what = f"digest {description.digest[:12]}…, the manifest says {expected[:12]}…"
        output.add("workflow", path, what, _OTHER_WORKFLOW)
    if output.schema and description.table_schema != output.schema:
        what = f"columns or table sizes other than in {output.root / SCHEMA_FILE}"
        output.add("workflow", path, what, _OTHER_WORKFLOW)
    return description


def _check_parts(output: Output, manifest: Manifest) -> None:
    """Compare files, bytes, rows and table sizes with the manifest."""
    listed, paths = {part.file: part for part in manifest.files}, EtlOutput(output.path)
    existing = {file for files in output.splits.values() for file in files}
    for name in sorted(listed.keys() - existing):
        output.add("rows", name, "missing, but listed in the manifest", AGAIN)
    for name in sorted(existing - listed.keys()):
        output.add("rows", name, "not in the manifest", "delete it, or else the loader reads it")
    for name in sorted(listed.keys() & output.footers.keys()):
        rows, part = output.footers[name].num_rows, listed[name]
        if rows != part.rows:
            output.add("rows", name, f"{rows} rows, the manifest says {part.rows}", AGAIN)
        elif difference := paths.part_difference(part):
            output.add("rows", name, difference.removeprefix(f"{paths.splits / name}: "), AGAIN)
    # schemas and the state of the extension have checks of their own
    places = ("/_metadata", f"/{HISTORIES}/")
    described = {n: f for n, f in manifest.described.items() if any(at in n for at in places)}
    try:
        of_data = dataclasses.replace(manifest, described=described)
        paths.check_described(of_data, AGAIN, stores=True)
    except BadInputError as error:
        output.add("descriptions", paths.splits, error.what, error.remedy)
    expected = manifest.num_embeddings_per_feature
    sizes = output.schema.num_embeddings_per_feature if output.schema else expected
    if sizes != expected:
        what = f"table sizes {sizes}, the manifest says {expected}"
        output.add("schema", output.root / SCHEMA_FILE, what, AGAIN)


def _check_generations(
    output: Output, manifest: Manifest, description: WorkflowDescription
) -> None:
    """Compare the generation with the workflow's, and check what extensions need."""
    paths = EtlOutput(output.path)
    if description.generation != manifest.generation:
        what = f"generation {description.generation}, the manifest says {manifest.generation}"
        output.add("generations", paths.workflow, what, _SAME_COPY)
    elif manifest.settings.get("engine") != "nvtabular":
        from nvt_torchrec.workflows.extension_state import read_state

        try:
            read_state(paths.extension, description)
        except ClickLogError as error:
            what = f"no day can be added: {error.what}"
            output.add("generations", paths.extension, what, error.remedy, severity=WARNING)
