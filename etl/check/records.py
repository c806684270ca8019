"""Checks of the files that describe an output: `_metadata`, manifest, workflow, HugeCTR's."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.check.files import AGAIN, Output
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.schema import SCHEMA_FILE


def check(output: Output) -> None:
    """Compare the files that describe the data with the data files."""
    _check_all_metadata(output)
    _check_manifest(output)
    _check_workflow(output)
    _check_hugectr(output)


def _check_all_metadata(output: Output) -> None:
    """Check ``_metadata`` of all splits together and of each."""
    if list(output.splits) != [output.path.name]:  # else the one above lists other splits too
        _check_metadata(output, output.root, {file: file for file in output.footers})
    for split, files in output.splits.items():
        names = {Path(file).name: file for file in files if file in output.footers}
        _check_metadata(output, output.root / split, names)


def _check_metadata(output: Output, directory: Path, names: dict[str, str]) -> None:
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
        own = output.footers[file]
        rows = [own.row_group(i).num_rows for i in range(own.num_row_groups)]
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


def _check_manifest(output: Output) -> None:
    """Compare files, bytes and rows with the manifest, and check its sums."""
    if output.manifest is None:
        return
    file = EtlOutput(output.path).manifest
    try:
        for difference in _differences(output, output.manifest):
            output.error("rows", *difference)
        _check_rejected(output, output.manifest["rows"]["rejected"])
        expected = output.manifest["num_embeddings_per_feature"]
        if output.schema and output.schema.num_embeddings_per_feature != expected:
            output.error(
                "schema",
                output.root / SCHEMA_FILE,
                f"table sizes {output.schema.num_embeddings_per_feature}, the manifest says "
                f"{expected}",
                AGAIN,
            )
    except (AttributeError, KeyError, TypeError) as error:
        output.error("manifest", file, f"damaged: {error!r}", AGAIN)


def _differences(output: Output, manifest: Manifest) -> Iterator[tuple[Any, str, str]]:
    """Yield where, what and remedy of differences in rows and files."""
    listed = {part["file"]: part for part in manifest["files"]}
    existing = {file for files in output.splits.values() for file in files}
    for name in sorted(listed.keys() - existing):
        yield name, "missing, but listed in the manifest", AGAIN
    for name in sorted(existing - listed.keys()):
        yield name, "not in the manifest", "delete it, or else the loader reads it"
    for name in sorted(listed.keys() & output.footers.keys()):
        rows, size = output.footers[name].num_rows, (output.root / name).stat().st_size
        if rows != listed[name]["rows"]:
            yield name, f"{rows} rows, the manifest says {listed[name]['rows']}", AGAIN
        elif size != listed[name]["bytes"]:
            yield name, f"{size} bytes, the manifest says {listed[name]['bytes']}", AGAIN
    file = EtlOutput(output.path).manifest
    splits: Counter = Counter()
    for name, part in listed.items():
        splits[name.split("/")[0]] += part["rows"]
    for split, rows in splits.items():
        if manifest["splits"][split]["rows"] != rows:
            yield (
                f"{file}: splits.{split}",
                f"{manifest['splits'][split]['rows']} rows, its files have {rows}",
                AGAIN,
            )
    for where, rows in [
        ("rows", manifest["rows"]),
        *((source["path"], source["rows"]) for source in manifest["inputs"]),
    ]:
        if rows["in"] != rows["out"] + rows["rejected"]:
            yield (
                f"{file}: {where}",
                f"{rows['in']} rows in, {rows['out']} out and {rows['rejected']} rejected",
                AGAIN,
            )
    if manifest["rows"]["out"] != sum(splits.values()):
        yield (
            f"{file}: rows",
            f"{manifest['rows']['out']} rows out, the files have {sum(splits.values())}",
            AGAIN,
        )


def _check_rejected(output: Output, expected: int) -> None:
    """Check that ``rejected/`` holds all rejected rows, a line each below a header."""
    directory = EtlOutput(output.path).rejected
    listed = 0
    for path in directory.glob("*.tsv"):
        with open(path, "rb") as lines:
            listed += max(0, sum(1 for _ in lines) - 1)
    if listed != expected:
        output.warning(
            "rows",
            directory,
            f"{listed} rejected rows, the manifest says {expected}",
            "restore the directory if you need the rejected rows",
        )


def _check_workflow(output: Output) -> None:
    """Check the digests of the saved workflow, and that the data were made with it."""
    path = EtlOutput(output.path).workflow
    expected = output.manifest.workflow_digest if output.manifest else None
    if not path.exists():
        if expected:
            output.error("workflow", path, "missing, but inference needs it", AGAIN)
        return
    from nvt_torchrec.workflows.description import inspect

    try:
        description = inspect(path)
        description.verify()
    except ClickLogError as error:
        output.error("workflow", path, error.what, error.remedy)
        return
    if expected and description.digest != expected:
        output.error(
            "workflow",
            path,
            f"digest {description.digest[:12]}…, the manifest says {expected[:12]}…",
            "the data were made with another workflow: restore it, or run the ETL again",
        )
    if output.schema and description.table_schema != output.schema:
        output.error(
            "workflow",
            path,
            f"columns or table sizes other than in {output.root / SCHEMA_FILE}",
            "the data were made with another workflow: restore it, or run the ETL again",
        )
    if not (path / "compiled").exists():
        return
    from nvt_torchrec.workflows import (
        compiled,  # takes long to import, and only some outputs have it
    )

    try:
        compiled.load(path, verify=True)
    except ClickLogError as error:
        output.error("workflow", path / "compiled", error.what, error.remedy)


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
    place = {name: i for i, name in enumerate(output.schema.columns)}
    for kind, names in (
        ("labels", output.schema.labels),
        ("conts", output.schema.dense),
        ("cats", output.schema.categorical),
    ):
        found = [(column["col_name"], column["index"]) for column in value[kind]]
        if found != [(name, place[name]) for name in names]:
            output.error(
                "HugeCTR", path, f"{kind} differ from the schema's columns", "run the ETL again"
            )
