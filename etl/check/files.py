"""Checks of the files and their footers, without reading the data."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.files.atomic import TEMPORARY
from nvt_torchrec.etl.check.output import AGAIN, Output
from nvt_torchrec.etl.output import EXTENDING_FILE, UNFINISHED_FILE, WORK_DIRECTORY
from nvt_torchrec.formats.splits import SPLITS


def check(output: Output) -> None:
    """Check that all splits exist, the columns of their files, and what describes the files."""
    _check_unfinished(output)
    _check_splits(output)
    _check_columns(output)
    _check_metadata(output)


def _check_unfinished(output: Output) -> None:
    if (output.path / UNFINISHED_FILE).exists():
        output.error(
            "unfinished",
            output.path / UNFINISHED_FILE,
            "the run has not finished",
            "finish it by the same command, or begin again with --restart",
        )
    elif (output.path / EXTENDING_FILE).exists():
        output.note(
            "unfinished",
            output.path / EXTENDING_FILE,
            "a day is being added, or adding it was interrupted; this is the output without it",
            "finish it by the same `python -m etl extend`",
        )
    elif (output.path / WORK_DIRECTORY).exists():
        output.warning("leftover", output.path / WORK_DIRECTORY, "left by a run", "delete it")
    left = {path for place in (output.path, output.root) for path in place.rglob(f"*{TEMPORARY}")}
    for path in sorted(left):
        if WORK_DIRECTORY not in path.parts:
            output.warning("leftover", path, "half written by a process that died", "delete it")


def _check_splits(output: Output) -> None:
    for name in SPLITS:
        if name not in output.splits and len(output.splits) > 1:
            output.warning("splits", output.root / name, "no parquet file", f"add a split {name}")
    for name, files in output.splits.items():
        if not sum(output.footers[file].num_rows for file in files if file in output.footers):
            output.error("splits", output.root / name, "no rows", AGAIN)


def _check_columns(output: Output) -> None:
    """Compare names and types with the schema, or else with the first file."""
    wanted = output.schema.arrow if output.schema else None
    for file, footer in output.footers.items():
        schema = footer.schema.to_arrow_schema()
        if wanted is None:
            wanted = schema.remove_metadata()
        for field in wanted:
            _check_column(output, file, schema, field)


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
    listed: Counter[str] = Counter()
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        listed[group.column(0).file_path] += group.num_rows
    expected = Counter({name: output.footers[file].num_rows for name, file in names.items()})
    for name in sorted(listed.keys() | expected.keys()):
        if listed[name] != expected[name]:
            what = f"lists {listed[name]} rows in {name}, it has {expected[name]}"
            remedy = "delete it if the files are right, or run the ETL again"
            output.error("_metadata", path, what, remedy)
