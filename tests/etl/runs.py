"""Runs of the ETL, read back and compared with what plain Python makes of the log."""

from __future__ import annotations

import contextlib
import itertools
import json
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.engines.engine import Job
from nvt_torchrec.etl.engines.host import Threads
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.units.unit_plan import UnitPlan
from nvt_torchrec.etl.units.writing import UnitResult
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.manifest import FORMAT
from nvt_torchrec.formats.rows import RawRows, is_missing
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows.writer import Fitted
from tests.logs import CRITEO, Reference

#: Files that tell of the run rather than of its result.
OF_THE_RUN = {"timings.json", "report.html"}
#: Options by which some bad rows are left out.
QUARANTINE = {"on_bad_rows": "quarantine", "max_bad_fraction": 0.1}


def settings(raw: Path, output: Path, spec=CRITEO, **options: Any) -> EtlSettings:
    """Settings of a run with the cpu engine, or of dask with ``scheduler``."""
    options.setdefault("engine", "dask" if "scheduler" in options else "cpu")
    return EtlSettings(str(raw), output, spec, **options)


def etl_run(raw: Path, output: Path, *flags: str) -> int:
    """Run the command; return its exit status."""
    return main(["run", "--input_path", str(raw), "--output_path", str(output), *flags])


@contextlib.contextmanager
def failing(
    name: str, error: BaseException, *, after: int = 0, expected: type[BaseException] | None = None
) -> Iterator[None]:
    """Let a function raise an error after so many calls; the block must end by it."""
    function, calls = pkgutil.resolve_name(name), itertools.count()

    def fail(*arguments: Any, **options: Any) -> Any:
        if next(calls) == after:
            raise error
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(name, fail)
        message = getattr(error, "strerror", None) or str(error)
        with pytest.raises(expected or type(error), match=re.escape(message)):
            yield


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def fit(
    blocks: list[Block],
    spec: FeatureSpec,
    directory: Path,
    workers: int = 2,
    max_bad_rows: int = 0,
    report: Callable[[float], object] = lambda rows: None,
) -> Fitted:
    """What the cpu engine fits on blocks."""
    return Threads(Job(spec, directory, max_bad_rows, workers)).fit(blocks, report)


def encode(
    plan: UnitPlan, workflow: Path, work: Path, workers: int = 2, max_bad_rows: int = 0
) -> list[UnitResult]:
    """What the cpu engine writes to ``work / "parts"`` for the units of a plan."""
    return list(Threads(Job(CRITEO, work, max_bad_rows, workers)).encode(plan.units, workflow))


def parts(output: Path, split: str) -> list[Path]:
    """The parts of a split in their order."""
    root = output / "criteo_binary" / "split" / split
    return sorted(root.glob("part.*.parquet"), key=lambda path: int(path.name.split(".")[1]))


def read_split(output: Path, split: str) -> pd.DataFrame:
    """The rows of a split in their order."""
    return pd.concat([pd.read_parquet(file) for file in parts(output, split)], ignore_index=True)


def cut(days: list) -> dict[str, list]:
    """The rows of each split."""
    half = (len(days[-1]) + 1) // 2
    return {
        "train": [row for day in days[:-1] for row in day],
        "valid": days[-1][:half],
        "test": days[-1][half:],
    }


def assert_is(output: Path, days: list, spec=CRITEO) -> None:
    """The parquet of ``output`` is what plain Python makes of ``days``."""
    rows = cut(days)
    reference = Reference(rows["train"], spec)
    schema = TableSchema.read(output / "criteo_binary" / "split")
    assert schema.table_sizes == reference.table_sizes()
    for split in SPLITS:
        expected = reference.frame(rows[split])
        got = read_split(output, split)
        assert got.columns.tolist() == spec.columns
        assert got.dtypes.tolist() == expected.dtypes.tolist()
        ids = [spec.label, *spec.categorical_names]
        pd.testing.assert_frame_equal(got[ids], expected[ids])
        np.testing.assert_allclose(
            got[spec.dense_names], expected[spec.dense_names], rtol=3e-7, atol=1e-7
        )


def tree(output: Path) -> dict[str, bytes]:
    """All files of an output directory but those of the run itself, by path."""
    return {
        str(path.relative_to(output)): path.read_bytes()
        for path in sorted(output.rglob("*"))
        if path.is_file() and path.name not in OF_THE_RUN
    }


def change_json(file: Path, change: Callable[[dict], object]) -> None:
    """Change what a file says; a manifest gets the digest of what it says then."""
    value = json.loads(file.read_text())
    change(value)
    if FORMAT.digest_key in value:
        value[FORMAT.digest_key] = FORMAT.digest(value)
    file.write_text(json.dumps(value))


def write_parquet(path: Path, spec: FeatureSpec, rows: RawRows) -> None:
    """Rows of any raw type as a day of a log."""
    columns = {spec.label: rows.labels[0].astype(np.int32)}
    for j, column in enumerate(spec.dense):
        absent = is_missing(rows.dense_missing, j)
        values = rows.dense[j] if column.raw == "float" else rows.dense[j].astype(np.int32)
        columns[column.name] = pa.array(values, mask=absent)
    for j, column in enumerate(spec.categorical):
        values, absent = rows.categorical[j], is_missing(rows.categorical_missing, j)
        if column.multi_hot:
            flat, at = values.values.tolist(), values.offsets.tolist()
            kind = {"string": pa.string(), "hex32": pa.uint32(), "int": pa.int64()}[column.raw]
            lists = [flat[at[i] : at[i + 1]] or None for i in range(len(values))]
            columns[column.name] = pa.array(lists, pa.list_(kind))
        elif column.raw == "string":
            listed = [None if gone else v for v, gone in zip(values.tolist(), absent, strict=True)]
            columns[column.name] = pa.array(listed, pa.string())
        else:
            columns[column.name] = pa.array(values, mask=absent)
    pq.write_table(pa.table(columns), path, row_group_size=7)
