"""Checks of the files and their footers, without reading the data."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.base.files.atomic import TEMPORARY
from nvt_torchrec.etl.check.findings import ERROR, NOTE, WARNING, Finding
from nvt_torchrec.etl.output import EXTENDING_FILE, UNFINISHED_FILE, WORK_DIRECTORY
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.formats.splits import SPLITS

AGAIN = "restore the file, or run the ETL again"
#: Names of splits in other projects, and ours.
_OTHER_NAMES = {"validation": "valid", "val": "valid", "eval": "valid", "training": "train"}


@dataclasses.dataclass
class Output:
    """An output directory, as far as it could be read.

    Attributes:
        path: The path that was given.
        root: The directory of the splits; the paths of files are relative to it.
        splits: The parquet files of each split, ``part.2`` before ``part.10``.
        footers: The footers of the files that have a valid one.
        schema: The columns and table sizes; None without a schema.
        manifest: The manifest; None without one that can be read.
        findings: The findings so far.
        sizes: By file, the table sizes by column when it was written; only for files of which a
            generation is known.
    """

    path: Path
    root: Path
    splits: dict[str, list[str]]
    footers: dict[str, pq.FileMetaData]
    schema: TableSchema | None
    manifest: Manifest | None
    findings: list[Finding]
    sizes: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    @property
    def split_rule(self) -> dict[str, Any] | None:
        """The manifest's rule by which rows were split; None by days, and if it is unknown."""
        rule = self.manifest.split if self.manifest else None
        return rule if rule and isinstance(rule.get("by"), str) else None

    def error(self, kind: str, where: Any, what: str, remedy: str) -> None:
        """Add a finding that training fails on, or is wrong with."""
        self.findings.append(Finding(ERROR, kind, str(where), what, remedy))

    def warning(self, kind: str, where: Any, what: str, remedy: str) -> None:
        """Add a finding that training may be wrong with."""
        self.findings.append(Finding(WARNING, kind, str(where), what, remedy))

    def note(self, kind: str, where: Any, what: str, remedy: str = "") -> None:
        """Add a finding for information."""
        self.findings.append(Finding(NOTE, kind, str(where), what, remedy))


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
    output = Output(path, root, splits, {}, None, None, [])
    for file in [file for files in splits.values() for file in files]:
        try:
            output.footers[file] = pq.read_metadata(root / file)
        except (OSError, pa.ArrowException) as error:
            output.error("footer", file, f"not a parquet file: {error}", AGAIN)
    _read_schema(output)
    _read_manifest(output)
    return output


def _find_splits(path: Path) -> tuple[Path, dict[str, list[str]]]:
    for root in (EtlOutput(path).splits, path):
        names = [*SPLITS, *_OTHER_NAMES]
        splits = {name: _parquet_files(root / name, root) for name in names}
        splits = {name: files for name, files in splits.items() if files}
        if splits:
            return root, splits
    files = _parquet_files(path, path.parent)
    return path.parent, {path.name: files} if files else {}


def _parquet_files(directory: Path, root: Path) -> list[str]:
    """List the files that the loader reads, in its order."""
    files = [path for path in directory.glob("*.parquet") if path.name[0] not in "._"]
    files.sort(
        key=lambda path: [
            int(word) if word.isdigit() else word for word in re.split(r"(\d+)", path.name)
        ]
    )
    return [str(path.relative_to(root)) for path in files]


def _read_schema(output: Output) -> None:
    """Read the schema of all splits: that of their directory, or else of the first split."""
    directories = [output.root, *(output.root / split for split in output.splits)]
    found = [directory for directory in directories if (directory / SCHEMA_FILE).exists()]
    for directory in found:
        try:
            schema = TableSchema.read(directory)
        except ClickLogError as error:
            output.error(
                "schema",
                directory / SCHEMA_FILE,
                error.what,
                "write it with TableSchema.write of nvt_torchrec.formats.schema: it needs "
                "intDomain.max and tags",
            )
            continue
        if output.schema is None:
            output.schema = schema
        elif schema != output.schema:
            output.error(
                "schema",
                directory / SCHEMA_FILE,
                f"different from {found[0] / SCHEMA_FILE}",
                "all splits need the same schema: copy the right one",
            )
    for split in output.splits:
        if not (output.root / split / SCHEMA_FILE).exists():
            output.error(
                "schema",
                output.root / split,
                f"no {SCHEMA_FILE}",
                f"copy it from {found[0]}" if found else "the loader reads table sizes from it",
            )


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
    except SchemaError as error:
        what = error.what.removeprefix(f"{file}: ")
        output.warning("manifest", file, f"{what}; it is not used", error.remedy)
    except BadInputError as error:
        output.error("manifest", file, error.what.removeprefix(f"{file}: "), error.remedy)


def check(output: Output) -> None:
    """Check that all splits exist, and the columns of their files."""
    _check_unfinished(output)
    _check_splits(output)
    _check_columns(output)


def _check_unfinished(output: Output) -> None:
    if (output.path / UNFINISHED_FILE).exists():
        output.error(
            "unfinished",
            output.path / UNFINISHED_FILE,
            "the run has not finished",
            "run it again with --resume or --restart",
        )
    elif (output.path / EXTENDING_FILE).exists():
        output.note(
            "unfinished",
            output.path / EXTENDING_FILE,
            "a day is being added, or adding it was interrupted; this is the output without it",
            "finish it with `python -m etl extend … --resume`",
        )
    elif (output.path / WORK_DIRECTORY).exists():
        output.warning("leftover", output.path / WORK_DIRECTORY, "left by a run", "delete it")
    left = {path for place in (output.path, output.root) for path in place.rglob(f"*{TEMPORARY}")}
    for path in sorted(left):
        if WORK_DIRECTORY not in path.parts:
            output.warning("leftover", path, "half written by a process that died", "delete it")


def _check_splits(output: Output) -> None:
    for name in output.splits:
        if name in _OTHER_NAMES:
            output.warning(
                "splits",
                output.root / name,
                f"training reads {_OTHER_NAMES[name]}",
                f"rename the directory to {_OTHER_NAMES[name]}",
            )
    known = {_OTHER_NAMES.get(name, name) for name in output.splits}
    for name in SPLITS:
        if known & set(SPLITS) and name not in known and len(output.splits) > 1:
            output.warning("splits", output.root / name, "no parquet file", f"add a split {name}")
    for name, files in output.splits.items():
        if not sum(output.footers[file].num_rows for file in files if file in output.footers):
            output.error("splits", output.root / name, "no rows", AGAIN)


def _check_columns(output: Output) -> None:
    """Compare names, order, types and nullability with the schema, or else with the first file."""
    wanted = output.schema.arrow if output.schema else None
    report = output.note if output.manifest is None else output.warning
    nullable: dict[tuple, list[str]] = {}
    for file, footer in output.footers.items():
        found = footer.schema.to_arrow_schema()
        if wanted is None:
            wanted = found.remove_metadata()
        for field in wanted:
            _check_column(output, file, found, field)
        extra = [name for name in found.names if name not in wanted.names]
        if extra:
            report(
                "columns",
                file,
                f"columns {', '.join(extra)} are not in the schema",
                "nothing to do: the loader ignores them",
            )
        order = list(dict.fromkeys(name for name in found.names if name in wanted.names))
        if order != [name for name in wanted.names if name in order]:
            report(
                "columns",
                file,
                f"columns in another order than the schema's: {', '.join(order[:5])} …",
                "the loader reads columns by name, HugeCTR by order",
            )
        nullables = {field.name for field in found if field.nullable}
        names = tuple(name for name in order if name in nullables)
        if output.schema and names:
            nullable.setdefault(names, []).append(file)
    for names, files in nullable.items():
        report(
            "columns",
            files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else ""),
            f"nullable columns: {', '.join(names[:5])}" + (" …" if len(names) > 5 else ""),
            "nothing to do as long as they contain no null",
        )


def _check_column(output: Output, file: str, found: pa.Schema, field: pa.Field) -> None:
    index = found.get_field_index(field.name)
    if index < 0:
        count = found.names.count(field.name)
        what = f"occurs {count} times" if count else "missing"
        output.error("columns", f"{file}: column {field.name}", what, AGAIN)
    elif not _same_type(found.field(index).type, field.type):
        output.error(
            "columns",
            f"{file}: column {field.name}",
            f"{found.field(index).type} instead of {field.type}",
            "write ids as int32 (or lists of int32), dense features and labels as float32",
        )


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Compare types without the names of list elements and nullability."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return found.value_type == wanted.value_type
    return found == wanted
