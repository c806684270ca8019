"""Checks of the files and their footers, without reading the data."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.files.artifact import FileEntry
from nvt_torchrec.base.files.atomic import TEMPORARY
from nvt_torchrec.etl.check.output import AGAIN, OTHER_NAMES, Output
from nvt_torchrec.etl.output import EXTENDING_FILE, UNFINISHED_FILE, WORK_DIRECTORY
from nvt_torchrec.formats.manifest import PartFile
from nvt_torchrec.formats.splits import SPLITS


def check(output: Output, *, workers: int) -> None:
    """Check that all splits exist, the columns of their files, and what describes the files."""
    _check_unfinished(output)
    _check_splits(output)
    _check_columns(output)
    _check_metadata(output)
    _check_hugectr(output)
    _check_digests(output, workers)


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
        if name in OTHER_NAMES:
            output.warning(
                "splits",
                output.root / name,
                f"training reads {OTHER_NAMES[name]}",
                f"rename the directory to {OTHER_NAMES[name]}",
            )
    known = {OTHER_NAMES.get(name, name) for name in output.splits}
    for name in SPLITS:
        if known & set(SPLITS) and name not in known and len(output.splits) > 1:
            output.warning("splits", output.root / name, "no parquet file", f"add a split {name}")
    for name, files in output.splits.items():
        if not sum(output.footers[file].num_rows for file in files if file in output.footers):
            output.error("splits", output.root / name, "no rows", AGAIN)


def _check_columns(output: Output) -> None:
    """Compare names, types and order with the schema, or else with the first file."""
    wanted = output.schema.arrow if output.schema else None
    for file, footer in output.footers.items():
        schema = footer.schema.to_arrow_schema()
        if wanted is None:
            wanted = schema.remove_metadata()
        for field in wanted:
            _check_column(output, file, schema, field)
        if output.manifest is None:
            continue  # files made elsewhere may have more columns, in any order
        if extra := [name for name in schema.names if name not in wanted.names]:
            output.warning(
                "columns", file, f"columns {', '.join(extra)} are not in the schema", AGAIN
            )
        order = list(dict.fromkeys(name for name in schema.names if name in wanted.names))
        if order != [name for name in wanted.names if name in order]:
            output.warning(
                "columns",
                file,
                f"columns in another order than the schema's: {', '.join(order[:5])} …",
                "the loader reads columns by name, HugeCTR by order",
            )


def _check_column(output: Output, file: str, schema: pa.Schema, field: pa.Field) -> None:
    index = schema.get_field_index(field.name)
    if index < 0:
        count = schema.names.count(field.name)
        what = f"occurs {count} times" if count else "missing"
        output.error("columns", f"{file}: column {field.name}", what, AGAIN)
    elif not _same_type(schema.field(index).type, field.type):
        output.error(
            "columns",
            f"{file}: column {field.name}",
            f"{schema.field(index).type} instead of {field.type}",
            "write ids as int32 (or lists of int32), dense features and labels as float32",
        )


def _same_type(written: pa.DataType, wanted: pa.DataType) -> bool:
    """Compare types without the names of list elements and nullability."""
    if pa.types.is_list(written) and pa.types.is_list(wanted):
        return written.value_type == wanted.value_type
    return written == wanted


def _check_metadata(output: Output) -> None:
    """Check ``_metadata`` of all splits together and of each."""
    if list(output.splits) != [output.path.name]:  # else the one above lists other splits too
        _check_metadata_file(output, output.root, {file: file for file in output.footers})
    for split, files in output.splits.items():
        names = {Path(file).name: file for file in files if file in output.footers}
        _check_metadata_file(output, output.root / split, names)


def _check_metadata_file(output: Output, directory: Path, names: dict[str, str]) -> None:
    """Compare ``_metadata`` with the footers; ``names`` are the files by their name in it."""
    path = directory / "_metadata"
    if not path.exists():
        if output.manifest is not None:
            output.error("_metadata", path, "missing", AGAIN)
        return
    try:
        footer = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        output.error("_metadata", path, f"not parquet metadata: {error}", "delete it")
        return
    listed: dict[str, list[int]] = {}
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        listed.setdefault(group.column(0).file_path, []).append(group.num_rows)
    remedy = "delete it if the files are right, or run the ETL again"
    for name in sorted(listed.keys() - names.keys()):
        output.error("_metadata", path, f"lists {name}, which does not exist", remedy)
    for name, file in names.items():
        file_footer = output.footers[file]
        rows = [file_footer.row_group(i).num_rows for i in range(file_footer.num_row_groups)]
        if name not in listed and rows:
            output.error("_metadata", path, f"does not list {name}", remedy)
        elif rows != listed.get(name, []):
            output.error(
                "_metadata",
                path,
                f"lists row groups of {_short(listed[name])} rows in {name}, it has {_short(rows)}",
                remedy,
            )


def _short(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return f"{shown} … ({len(values)})" if len(values) > 4 else shown or "0"


def _check_hugectr(output: Output) -> None:
    """Check HugeCTR's two files, where they exist or should."""
    for split, files in output.splits.items():
        directory = output.root / split
        checks = (("_file_list.txt", _check_file_list), ("_metadata.json", _check_metadata_json))
        for name, check_file in checks:
            path = directory / name
            if path.exists():
                _check_readable(output, path, check_file, files)
            elif output.manifest is not None:
                output.error("HugeCTR", path, "missing", AGAIN)


def _check_readable(output: Output, path: Path, check_file: Callable, files: list[str]) -> None:
    try:
        check_file(output, path, files)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        output.error("HugeCTR", path, f"damaged: {error!r}", AGAIN)


def _check_file_list(output: Output, path: Path, files: list[str]) -> None:
    count, *listed = path.read_text(encoding="utf-8").splitlines()
    wanted = [Path(file).name for file in files]
    if int(count) != len(listed) or [Path(file).name for file in listed] != wanted:
        output.error(
            "HugeCTR",
            path,
            f"counts {count} files and lists {len(listed)}, but {len(files)} exist",
            "run the ETL again",
        )
    missing = [file for file in listed if not Path(file).exists()]
    if missing:
        output.warning(
            "HugeCTR",
            path,
            f"{len(missing)} of its paths do not exist, the first is {missing[0]}",
            "if the directory was moved, replace in this file "
            f"{Path(missing[0]).parent} by {path.parent.resolve()}",
        )


def _check_metadata_json(output: Output, path: Path, files: list[str]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    listed = {file["file_name"]: file["num_rows"] for file in value["file_stats"]}
    wanted = {
        Path(file).name: output.footers[file].num_rows for file in files if file in output.footers
    }
    if listed != wanted:
        name = sorted(dict(listed.items() ^ wanted.items()))[0]
        output.error(
            "HugeCTR",
            path,
            f"lists {name} with {listed.get(name)} rows, it has {wanted.get(name)}",
            "run the ETL again",
        )
    if output.schema is None:
        return
    index = {name: i for i, name in enumerate(output.schema.columns)}
    for kind, names in (
        ("labels", output.schema.labels),
        ("conts", output.schema.dense),
        ("cats", output.schema.categorical),
    ):
        columns = [(column["col_name"], column["index"]) for column in value[kind]]
        if columns != [(name, index[name]) for name in names]:
            output.error(
                "HugeCTR", path, f"{kind} differ from the schema's columns", "run the ETL again"
            )


def _check_digests(output: Output, workers: int) -> None:
    """Compare the digests of parts that a GPU wrote, which have no page checksums."""
    files = output.manifest.files if output.manifest else []
    parts = [part for part in files if part.sha256 and part.file in output.footers]

    def difference(part: PartFile) -> str:
        entry = FileEntry(part.bytes, sha256=part.sha256)
        try:
            return entry.difference(output.root / part.file)
        except OSError as error:
            return f"cannot be read: {error}"

    with ThreadPoolExecutor(workers, "check") as pool:
        for part, what in zip(parts, pool.map(difference, parts), strict=True):
            if what:
                output.error("digest", part.file, what, AGAIN)
