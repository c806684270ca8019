"""``python -m etl run --shuffle``: both engines, any partitioning, the same order."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.journal import UNITS
from nvt_torchrec.etl.parts.shuffle import permute, round_keys
from nvt_torchrec.etl.state.output import WORK_DIRECTORY
from tests.etl.findings import bad
from tests.etl.runs import etl_run, parts
from tests.logs import CRITEO, write_day, write_log

ROWS = [130, 70, 40]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Days of 130 × 60, 70 × 60 and 40 × 60 rows: more than a block of 1 MiB."""
    directory = tmp_path_factory.mktemp("shuffled")
    for day, rows in enumerate(write_log(directory / "small", ROWS)):
        write_day(directory / "raw" / f"day_{day}", rows * 60)
    return directory / "raw"


def _run(raw: Path, output: Path, *flags: str) -> Path:
    assert etl_run(raw, output, *flags) == 0
    return output


def _read(output: Path, split: str) -> pa.Table:
    return pa.concat_tables(map(pq.read_table, parts(output, split)))


def _exact(table: pa.Table) -> pa.Table:
    """The columns that engines agree on to the bit."""
    return table.select([CRITEO.label, *CRITEO.categorical_names])


def test_parts_that_may_be_shuffled_are_not_encoded_again(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Without the records of the units, a resumed run would overwrite shuffled parts."""

    def write(*_: object) -> None:
        raise OutputError("disk full")

    output = tmp_path / "out"
    flags = ["--engine", "cpu", "--shuffle", "full"]
    with monkeypatch.context() as patch:
        patch.setattr("nvt_torchrec.etl.parts.shuffle.write_part", write)
        assert etl_run(raw, output, *flags) == 2
    (units,) = output.rglob(f"{WORK_DIRECTORY}/*/{UNITS}")
    shutil.rmtree(units)
    assert etl_run(raw, output, *flags, "--resume") == 2
    assert "records of finished parts are damaged" in capsys.readouterr().err


def test_runs(raw: Path, dask_client, tmp_path: Path) -> None:
    plain = _run(raw, tmp_path / "plain", "--engine", "cpu", "--block_mb", "1")
    rows = _read(plain, "train")
    n, first_day = len(rows), 60 * ROWS[0]
    assert n == 60 * (ROWS[0] + ROWS[1])

    def moved(positions: np.ndarray) -> pa.Table:
        order = np.empty(n, np.int64)
        order[positions] = np.arange(n)
        return rows.take(pa.array(order))

    full = moved(permute(0, n, n, round_keys(7)))
    by_day = moved(
        np.concatenate(
            [
                permute(0, first_day, first_day, round_keys(7, 1)),
                first_day + permute(0, n - first_day, n - first_day, round_keys(7, 2)),
            ]
        )
    )
    flags = ("--shuffle", "full", "--seed", "7")
    one = _run(raw, tmp_path / "1", "--engine", "cpu", "--block_mb", "1", *flags)
    assert _read(one, "train").equals(full)
    assert len(parts(one, "train")) > 2
    other = _run(raw, tmp_path / "2", "--engine", "cpu", "--workers", "1", *flags)
    assert _exact(_read(other, "train")).equals(_exact(full))
    days = _run(raw, tmp_path / "3", "--engine", "cpu", *flags, "--shuffle", "file")
    assert _exact(_read(days, "train")).equals(_exact(by_day))
    dask = _run(raw, tmp_path / "4", "--scheduler", dask_client.scheduler.address, *flags)
    assert _exact(_read(dask, "train")).equals(_exact(full))
    for output in (one, other, days, dask):
        for split in ("valid", "test"):  # evaluation keeps the order of the log
            assert _exact(_read(output, split)).equals(_exact(_read(plain, split)))
        assert bad(output) == []
        assert not (output / ".work").exists()
        settings = json.loads((output / "manifest.json").read_text())["settings"]
        assert settings["seed"] == 7
