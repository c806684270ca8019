"""The benchmark of parquet writers, small."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import harness, parquet_writer, parquet_writer_worker
from benchmarks.data import make_criteo_schema, write_rows
from nvt_torchrec.base.errors import ClickLogError
from tests.warm import warm_python


def test_both_writers_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())
    for module in (harness, parquet_writer):
        monkeypatch.setattr(module, "BUILD", tmp_path)
    assert parquet_writer.main(["--rows", "1000", "--repeats", "1"]) == 0
    assert "Writing a file of 1,000 rows" in capsys.readouterr().out
    runs = json.loads((tmp_path / "parquet_writer.json").read_text())["results"]
    measured = {(run["system"], run["case"]): run["output"] for run in runs}
    writers = parquet_writer_worker.WRITERS
    assert measured.keys() == {(name, case) for name in writers for case in ("ids", "lists")}
    assert all(output["rows"] == 1000 and output["mb"] > 0 for output in measured.values())


def test_a_writer_that_loses_a_row_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (part,) = write_rows(tmp_path / "train", make_criteo_schema(multi_hot=("cat_0",)), 50)
    ours = parquet_writer_worker.WRITERS["ours"]
    lossy = {"ours": lambda table, path: ours(table.slice(1), path)}
    monkeypatch.setattr(parquet_writer_worker, "WRITERS", lossy)
    monkeypatch.setattr(sys, "argv", ["", "ours", str(part), str(tmp_path / "written")])
    with pytest.raises(ClickLogError, match="does not have the rows"):
        parquet_writer_worker.main()
