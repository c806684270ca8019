"""Checks of what describes an output: `_metadata`, manifest, workflow, HugeCTR's files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from clicklog.errors import ClickLogError
from clicklog.etl_output import EtlOutput
from clicklog.schema import SCHEMA_FILE
from etl.check.files import AGAIN, Output
from etl.check.findings import ERROR, WARNING


def check(output: Output) -> None:
    """Compare what describes the files with what they are."""
    _collected(output)
    _manifest(output)
    _workflow(output)
    _hugectr(output)


def _collected(output: Output) -> None:
    """``_metadata`` above all splits and in each."""
    if list(output.splits) != [output.path.name]:  # of one split alone, others are listed above it
        _collected_in(output, output.root, {file: file for file in output.footers})
    for split, files in output.splits.items():
        names = {Path(file).name: file for file in files if file in output.footers}
        _collected_in(output, output.root / split, names)


def _collected_in(output: Output, directory: Path, names: dict[str, str]) -> None:
    """Compare ``_metadata`` with the footers of the files it has to list, by their name there."""
    path = directory / "_metadata"
    if not path.exists():
        if output.manifest is not None:
            output.add(ERROR, "_metadata", path, "missing", AGAIN)
        return
    try:
        footer = pq.read_metadata(path)
    except (OSError, pa.ArrowException) as error:
        output.add(ERROR, "_metadata", path, f"no parquet metadata: {error}", "delete it")
        return
    listed: dict[str, list[int]] = {}
    for i in range(footer.num_row_groups):
        group = footer.row_group(i)
        listed.setdefault(group.column(0).file_path, []).append(group.num_rows)
    remedy = "delete it if the files are right, or run the ETL again"
    for name in sorted(listed.keys() - names.keys()):
        output.add(ERROR, "_metadata", path, f"lists {name}, which is not there", remedy)
    for name, file in names.items():
        own = output.footers[file]
        rows = [own.row_group(i).num_rows for i in range(own.num_row_groups)]
        if name not in listed and rows:
            output.add(ERROR, "_metadata", path, f"does not list {name}", remedy)
        elif rows != listed.get(name, []):
            output.add(
                ERROR,
                "_metadata",
                path,
                f"says {name} has row groups of {_short(listed[name])} rows, it has {_short(rows)}",
                remedy,
            )


def _short(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:4]))
    return f"{shown} … ({len(values)})" if len(values) > 4 else shown or "0"


def _manifest(output: Output) -> None:
    """Files, bytes and rows against the manifest, and its own sums."""
    if output.manifest is None:
        return
    file = EtlOutput(output.path).manifest
    try:
        for what in _differences(output, output.manifest):
            output.add(ERROR, "rows", *what)
        _rejected(output, output.manifest["rows"]["rejected"])
        expected = output.manifest["num_embeddings_per_feature"]
        if output.schema and output.schema.num_embeddings_per_feature != expected:
            output.add(
                ERROR,
                "schema",
                output.root / SCHEMA_FILE,
                f"table sizes {output.schema.num_embeddings_per_feature}, the manifest says "
                f"{expected}",
                AGAIN,
            )
    except (AttributeError, KeyError, TypeError) as error:
        output.add(ERROR, "manifest", file, f"damaged: {error!r}", AGAIN)


def _differences(output: Output, manifest: dict[str, Any]) -> Iterator[tuple[Any, str, str]]:
    """Where, what and remedy of differences in rows and files."""
    listed = {one["file"]: one for one in manifest["files"]}
    there = {file for files in output.splits.values() for file in files}
    for name in sorted(listed.keys() - there):
        yield name, "missing, the manifest lists it", AGAIN
    for name in sorted(there - listed.keys()):
        yield name, "not in the manifest", "the loader would take it: delete it if it is not yours"
    for name in sorted(listed.keys() & output.footers.keys()):
        rows, size = output.footers[name].num_rows, (output.root / name).stat().st_size
        if rows != listed[name]["rows"]:
            yield name, f"{rows} rows, the manifest says {listed[name]['rows']}", AGAIN
        elif size != listed[name]["bytes"]:
            yield name, f"{size} bytes, the manifest says {listed[name]['bytes']}", AGAIN
    file = EtlOutput(output.path).manifest
    splits: Counter = Counter()
    for name, one in listed.items():
        splits[name.split("/")[0]] += one["rows"]
    for split, rows in splits.items():
        if manifest["splits"][split]["rows"] != rows:
            yield (
                f"{file}: splits.{split}",
                f"{manifest['splits'][split]['rows']} rows, its files have {rows}",
                AGAIN,
            )
    for where, rows in [
        ("rows", manifest["rows"]),
        *((one["path"], one["rows"]) for one in manifest["inputs"]),
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


def _rejected(output: Output, expected: int) -> None:
    """Rows that were left out are all in ``rejected/``: a line each, below one of names."""
    directory = EtlOutput(output.path).rejected
    listed = 0
    for path in directory.glob("*.tsv"):
        with open(path, "rb") as lines:
            listed += max(0, sum(1 for _ in lines) - 1)
    if listed != expected:
        output.add(
            WARNING,
            "rows",
            directory,
            f"{listed} rejected rows, the manifest says {expected}",
            "restore the directory if you want to know which rows were left out",
        )


def _workflow(output: Output) -> None:
    """The saved workflow's digests, and that it is the one the data were made with."""
    path = EtlOutput(output.path).workflow
    expected = (output.manifest or {}).get("workflow_digest")
    if not path.exists():
        if expected:
            output.add(ERROR, "workflow", path, "missing", "inference needs it: " + AGAIN)
        return
    from workflows.description import inspect, verify

    try:
        description = inspect(path)
        verify(path, description)
    except ClickLogError as error:
        output.add(ERROR, "workflow", path, error.what, error.remedy)
        return
    if expected and description.digest != expected:
        output.add(
            ERROR,
            "workflow",
            path,
            f"digest {description.digest[:12]}…, the manifest says {expected[:12]}…",
            "the data were made with another workflow: restore it, or run the ETL again",
        )
    if output.schema and description.table_schema != output.schema:
        output.add(
            ERROR,
            "workflow",
            path,
            f"columns or table sizes other than those of {output.root / SCHEMA_FILE}",
            "the data were made with another workflow: restore it, or run the ETL again",
        )
    _compiled(output, path)


def _compiled(output: Output, path: Path) -> None:
    if not (path / "compiled").exists():
        return
    from workflows import compiled

    try:
        compiled.load(path, verify=True)
    except ClickLogError as error:
        output.add(ERROR, "workflow", path / "compiled", error.what, error.remedy)


def _hugectr(output: Output) -> None:
    """HugeCTR's two files, where they are or should be."""
    for split, files in output.splits.items():
        directory = output.root / split
        for name, one in (("_file_list.txt", _file_list), ("_metadata.json", _metadata_json)):
            path = directory / name
            if path.exists():
                _guarded(output, path, one, files)
            elif output.manifest is not None:
                output.add(ERROR, "HugeCTR", path, "missing", AGAIN)


def _guarded(output: Output, path: Path, one: Callable, files: list[str]) -> None:
    try:
        one(output, path, files)
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        output.add(ERROR, "HugeCTR", path, f"damaged: {error!r}", AGAIN)


def _file_list(output: Output, path: Path, files: list[str]) -> None:
    count, *listed = path.read_text(encoding="utf-8").splitlines()
    wanted = [Path(file).name for file in files]
    if int(count) != len(listed) or [Path(one).name for one in listed] != wanted:
        output.add(
            ERROR,
            "HugeCTR",
            path,
            f"says {count} files and lists {len(listed)}, {len(files)} are here",
            "run the ETL again",
        )
    elsewhere = [one for one in listed if not Path(one).exists()]
    if elsewhere:
        output.add(
            WARNING,
            "HugeCTR",
            path,
            f"{len(elsewhere)} paths lead nowhere, the first is {elsewhere[0]}",
            "the directory was moved: in this file, replace "
            f"{Path(elsewhere[0]).parent} by {path.parent.resolve()}",
        )


def _metadata_json(output: Output, path: Path, files: list[str]) -> None:
    value = json.loads(path.read_text(encoding="utf-8"))
    listed = {one["file_name"]: one["num_rows"] for one in value["file_stats"]}
    wanted = {
        Path(file).name: output.footers[file].num_rows for file in files if file in output.footers
    }
    if listed != wanted:
        name = sorted(dict(listed.items() ^ wanted.items()))[0]
        output.add(
            ERROR,
            "HugeCTR",
            path,
            f"says {name} has {listed.get(name)} rows, it has {wanted.get(name)}",
            "run the ETL again",
        )
    if output.schema is None:
        return
    place = {name: i for i, name in enumerate(output.schema.columns)}
    for kind, names in (
        ("labels", [output.schema.label]),
        ("conts", output.schema.dense),
        ("cats", output.schema.categorical),
    ):
        found = [(one["col_name"], one["index"]) for one in value[kind]]
        if found != [(name, place[name]) for name in names]:
            output.add(
                ERROR, "HugeCTR", path, f"{kind} are not the schema's columns", "run the ETL again"
            )
