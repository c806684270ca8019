"""Checks that need no data: which files there are, their footers, and what describes them."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import BadInputError, ClickLogError
from clicklog.etl_output import EtlOutput
from clicklog.files.atomic import TEMPORARY
from clicklog.schema import SCHEMA_FILE, TableSchema
from clicklog.splits import SPLITS
from etl.check.findings import ERROR, NOTE, WARNING, Finding
from etl.manifest import MANIFEST_VERSION
from etl.output import UNFINISHED_FILE, WORK_DIRECTORY

AGAIN = "restore the file, or run the ETL again"
#: What a split is called elsewhere.
_OTHER_NAMES = {"validation": "valid", "val": "valid", "eval": "valid", "training": "train"}


@dataclasses.dataclass
class Output:
    """An output directory, as far as it could be read.

    Attributes:
        path: what was given.
        root: the directory of the splits; files are named relative to it.
        splits: per split its parquet files, ``part.2`` before ``part.10``.
        footers: of the files that have one.
        schema: columns and table sizes; None where no schema says.
        manifest: None where there is none, or none that can be read.
        findings: what was found while reading these.
    """

    path: Path
    root: Path
    splits: dict[str, list[str]]
    footers: dict[str, pq.FileMetaData]
    schema: TableSchema | None
    manifest: dict[str, Any] | None
    findings: list[Finding]

    def add(self, severity: str, kind: str, where: Any, what: str, remedy: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(severity, kind, str(where), what, remedy))


def find(path: Path) -> Output:
    """Read what there is at ``path``.

    Raises:
        BadInputError: no such directory, or no parquet file below it.
    """
    if not path.is_dir():
        raise BadInputError(f"{path}: no such directory", "give the OUT of a run")
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
            output.add(ERROR, "footer", file, f"no parquet file: {error}", AGAIN)
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
    """The files that the loader takes, in its order."""
    files = [path for path in directory.glob("*.parquet") if path.name[0] not in "._"]
    files.sort(key=lambda path: [_number(word) for word in re.split(r"(\d+)", path.name)])
    return [str(path.relative_to(root)) for path in files]


def _number(word: str) -> int | str:
    return int(word) if word.isdigit() else word


def _read_schema(output: Output) -> None:
    """The schema of all splits: that of their directory, else the first split's."""
    directories = [output.root, *(output.root / split for split in output.splits)]
    found = [one for one in directories if (one / SCHEMA_FILE).exists()]
    for directory in found:
        try:
            schema = TableSchema.read(directory)
        except ClickLogError as error:
            output.add(
                ERROR,
                "schema",
                directory / SCHEMA_FILE,
                error.what,
                "it needs the tags target, continuous and categorical, and intDomain.max: write it "
                "with clicklog.schema.TableSchema.write",
            )
            continue
        if output.schema is None:
            output.schema = schema
        elif schema != output.schema:
            output.add(
                ERROR,
                "schema",
                directory / SCHEMA_FILE,
                f"not that of {found[0] / SCHEMA_FILE}",
                "splits of one data set have one schema: copy the right one",
            )
    for split in output.splits:
        if not (output.root / split / SCHEMA_FILE).exists():
            output.add(
                ERROR,
                "schema",
                output.root / split,
                f"no {SCHEMA_FILE}",
                f"copy it from {found[0]}" if found else "the loader reads table sizes there",
            )


def _read_manifest(output: Output) -> None:
    file = EtlOutput(output.path).manifest
    if not file.exists():
        if not (output.path / UNFINISHED_FILE).exists():
            output.add(
                NOTE,
                "manifest",
                output.path,
                f"no {file.name}: made elsewhere, so rows and files are compared with nothing",
            )
        return
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        version = manifest["format_version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        output.add(ERROR, "manifest", file, f"damaged: {error!r}", AGAIN)
        return
    if version != MANIFEST_VERSION:
        output.add(
            WARNING,
            "manifest",
            file,
            f"format version {version}, this program reads {MANIFEST_VERSION}; it is not used",
            "check with the version that wrote it",
        )
        return
    output.manifest = manifest


def check(output: Output) -> None:
    """Check which files there are, and their columns."""
    _markers(output)
    _splits(output)
    _columns(output)


def _markers(output: Output) -> None:
    if (output.path / UNFINISHED_FILE).exists():
        output.add(
            ERROR,
            "unfinished",
            output.path / UNFINISHED_FILE,
            "the run has not finished",
            "run it again with --resume or --restart",
        )
    elif (output.path / WORK_DIRECTORY).exists():
        output.add(WARNING, "leftover", output.path / WORK_DIRECTORY, "left by a run", "delete it")
    left = {path for place in (output.path, output.root) for path in place.rglob(f"*{TEMPORARY}")}
    for path in sorted(left):
        if WORK_DIRECTORY not in path.parts:
            output.add(
                WARNING, "leftover", path, "half written, by a process that died", "delete it"
            )


def _splits(output: Output) -> None:
    for name in output.splits:
        if name in _OTHER_NAMES:
            output.add(
                WARNING,
                "splits",
                output.root / name,
                f"training looks for {_OTHER_NAMES[name]}",
                f"rename the directory to {_OTHER_NAMES[name]}",
            )
    known = {_OTHER_NAMES.get(name, name) for name in output.splits}
    for name in SPLITS:
        if known & set(SPLITS) and name not in known and len(output.splits) > 1:
            output.add(
                WARNING, "splits", output.root / name, "no parquet file", f"make a split {name}"
            )
    for name, files in output.splits.items():
        if not sum(output.footers[file].num_rows for file in files if file in output.footers):
            output.add(ERROR, "splits", output.root / name, "no rows", AGAIN)


def _columns(output: Output) -> None:
    """Names, order, types, nullability of each file against the schema, or the first file's."""
    wanted = output.schema.arrow if output.schema else None
    strict = output.manifest is not None
    nullable: dict[tuple, list[str]] = {}
    for file, footer in output.footers.items():
        found = footer.schema.to_arrow_schema()
        if wanted is None:
            wanted = found.remove_metadata()
        for field in wanted:
            _column(output, file, found, field)
        extra = [name for name in found.names if name not in wanted.names]
        if extra:
            output.add(
                WARNING if strict else NOTE,
                "columns",
                file,
                f"columns {', '.join(extra)} are not in the schema",
                "the loader leaves them out; nothing to do",
            )
        order = list(dict.fromkeys(name for name in found.names if name in wanted.names))
        if order != [name for name in wanted.names if name in order]:
            output.add(
                WARNING if strict else NOTE,
                "columns",
                file,
                f"columns in another order than the schema's: {', '.join(order[:5])} …",
                "the loader goes by name; HugeCTR by order",
            )
        nullables = {field.name for field in found if field.nullable}
        names = tuple(name for name in order if name in nullables)
        if output.schema and names:
            nullable.setdefault(names, []).append(file)
    for names, files in nullable.items():
        output.add(
            WARNING if strict else NOTE,
            "columns",
            files[0] + (f" and {len(files) - 1} more" if len(files) > 1 else ""),
            f"nullable columns: {', '.join(names[:5])}" + (" …" if len(names) > 5 else ""),
            "harmless as long as no null is in them",
        )


def _column(output: Output, file: str, found: pa.Schema, field: pa.Field) -> None:
    index = found.get_field_index(field.name)
    if index < 0:
        twice = found.names.count(field.name)
        what = f"there {twice} times" if twice else "missing"
        output.add(ERROR, "columns", f"{file}: column {field.name}", what, AGAIN)
    elif not _same_type(found.field(index).type, field.type):
        output.add(
            ERROR,
            "columns",
            f"{file}: column {field.name}",
            f"{found.field(index).type} instead of {field.type}",
            "write ids as int32 (or lists of them), dense features and labels as float32",
        )


def _same_type(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Equal but for names of list elements and nullability, which are checked elsewhere."""
    if pa.types.is_list(found) and pa.types.is_list(wanted):
        return found.value_type == wanted.value_type
    return found == wanted
