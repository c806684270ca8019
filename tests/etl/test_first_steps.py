"""What the commands say to somebody who has a log of their own."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.etl.__main__ import main
from tests.logs import write_log


@pytest.mark.parametrize("name", ["clicks.csv", "clicks.parquet"])
def test_without_a_spec_guess_is_named(tmp_path: Path, capsys, name: str) -> None:
    path = tmp_path / name
    if name == "clicks.csv":
        path.write_text("click,user\n1,a\n0,b\n")
    else:
        pq.write_table(pa.table({"click": pa.array([1, 0])}), path)
    assert main(["run", "--input_path", str(path), "--output_path", str(tmp_path / "out")]) == 2
    assert f"`python -m etl guess {path} --output spec.toml`" in capsys.readouterr().err


def test_the_next_command_is_printed(tmp_path: Path, caplog) -> None:
    write_log(tmp_path / "raw", [20, 10])
    flags = ["--input_path", str(tmp_path / "raw"), "--output_path", str(tmp_path / "out")]
    with caplog.at_level(logging.INFO):
        assert main(["run", *flags, "--engine", "cpu"]) == 0
    splits = tmp_path / "out" / "criteo_binary" / "split"
    assert caplog.messages[-1] == f"python train_torchrec.py --binary_path {splits}"
