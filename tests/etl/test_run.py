from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.clicklog.synthetic.click_model import SyntheticSettings
from nvt_torchrec.clicklog.synthetic.log import synthesize
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec.spec_variants import replace_policy
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.workflows.description import inspect
from tests.etl.extended import content
from tests.etl.runs import assert_is, etl_run, read_split, settings
from tests.logs import CRITEO, ROWS, write_day, write_log
from tests.shell import python


@pytest.fixture(scope="module", params=["cpu", "dask", "nvtabular"])
def options(request: pytest.FixtureRequest, engine_options) -> dict:
    """Of each engine."""
    return engine_options(request.param)


@pytest.fixture(scope="module")
def done(raw: Path, options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("etl") / "out"
    run(settings(raw, output, **options))
    return output


_FREQUENT = ["--freq_threshold", "4"], {"freq_threshold": 4}, "log_normalize"
_NVIDIA = ["--freq_threshold", "3", "--dense", "log_plus_2"], {"freq_threshold": 3}, "log_plus_2"
_SMALL = ["--max_table_size", "9", "--dense", "log"], {"max_table_size": 9}, "log"


@pytest.mark.parametrize(
    ("options", "flags", "policy", "dense"),
    [
        *(("cpu", *given) for given in (_FREQUENT, _NVIDIA, _SMALL)),
        ("dask", *_NVIDIA),
        ("nvtabular", *_SMALL),
    ],
    indirect=["options"],
)
def test_command_line(log, options, tmp_path: Path, flags, policy, dense, capsys) -> None:
    engine = [f"--{name}={value}" for name, value in options.items()]
    assert etl_run(log[0], tmp_path / "out", *engine, *flags) == 0
    spec = dataclasses.replace(replace_policy(CRITEO, **policy), dense_transform=dense)
    assert_is(tmp_path / "out", log[1], spec)
    assert f"{sum(ROWS)} rows in, {sum(ROWS)} out, 0 rejected" in capsys.readouterr().out


def test_the_contract_on_disk(log, done: Path, options: dict) -> None:
    assert_is(done, log[1])
    root = done / "criteo_binary" / "split"
    schema = TableSchema.read(root)
    rows = {"train": 110, "valid": 21, "test": 20}
    metadata = pq.read_metadata(root / "_metadata")
    assert metadata.num_rows == sum(rows.values())
    paths = {metadata.row_group(i).column(0).file_path for i in range(metadata.num_row_groups)}
    assert paths == {"train/part.0.parquet", "train/part.1.parquet"} | {
        "valid/part.0.parquet", "test/part.0.parquet"
    }  # fmt: skip
    for split, count in rows.items():
        own = pq.read_metadata(root / split / "_metadata")
        assert own.num_rows == count
        assert own.row_group(0).column(0).file_path == "part.0.parquet"
        assert TableSchema.read(root / split) == schema
        part = pq.ParquetFile(root / split / "part.0.parquet", page_checksum_verification=True)
        assert not any(part.schema_arrow.field(i).nullable for i in range(40))
        part.read()
    manifest = json.loads((done / "manifest.json").read_text())
    assert manifest["rows"] == {"in": 151, "out": 151, "rejected": 0}
    assert [one["rows"]["in"] for one in manifest["inputs"]] == ROWS
    assert sum(one["rows"]["out"] for one in manifest["inputs"]) == 151
    for one in manifest["files"]:
        assert (root / one["file"]).stat().st_size == one["bytes"]
        assert pq.read_metadata(root / one["file"]).num_rows == one["rows"]
    assert manifest["splits"]["train"]["positives"] == sum(
        row[0] == "1" for day in log[1][:2] for row in day
    )
    missing = manifest["splits"]["valid"]["missing"]
    assert missing["int_3"] == sum(row[4] == "" for row in log[1][2][:21])
    assert missing["cat_7"] == sum(row[21] == "" for row in log[1][2][:21])
    oov = sum(manifest["splits"]["test"]["out_of_vocabulary"].values())
    ids = read_split(done, "test")[CRITEO.categorical_names]
    assert oov == int((ids == 2).to_numpy().sum()) > 0
    assert manifest["by_day"]["1"]["rows"] == 50
    assert manifest["workflow_digest"] == inspect(done / "workflow").digest
    names = {"criteo_binary", "workflow", "manifest.json", "report.html", "timings.json"}
    if options["engine"] != "nvtabular":
        names.add("extension")
    assert {path.name for path in done.iterdir()} == names
    assert "<svg" in (done / "report.html").read_text()


@pytest.mark.parametrize("options", ["cpu"], indirect=True)
def test_merlin_reads_it(done: Path) -> None:
    """NVTabular's Dataset and the stock Merlin loader see the same rows."""
    import nvt_torchrec.nvt_compat  # noqa: F401

    import nvtabular
    from merlin.dataloader.torch import Loader

    split = done / "criteo_binary" / "split" / "valid"
    expected = read_split(done, "valid")
    dataset = nvtabular.Dataset(str(split), engine="parquet", cpu=True)
    assert dataset.schema.column_names == CRITEO.columns
    assert dataset.num_rows == len(expected)
    got = dataset.to_ddf().compute().reset_index(drop=True)
    pd.testing.assert_frame_equal(got, expected)
    features, label = next(iter(Loader(dataset, batch_size=len(expected), shuffle=False)))
    assert features["cat_3"].reshape(-1).tolist() == expected["cat_3"].tolist()
    assert label.reshape(-1).tolist() == expected["label"].tolist()


def test_a_remote_log(log, tmp_path: Path) -> None:
    """Through fsspec, whose memory filesystem tells no time of change; compressed days too."""
    memory = fsspec.filesystem("memory")
    for path in log[0].iterdir():
        memory.pipe(f"/etl-run/{path.name}", path.read_bytes())
    text = memory.cat("/etl-run/day_0")
    memory.rm("/etl-run/day_0")
    memory.pipe("/etl-run/day_0.zst", pa.compress(text, "zstd", asbytes=True))
    try:
        remote = EtlSettings("memory://etl-run", tmp_path / "out", CRITEO, engine="cpu")
        inputs = run(remote)["inputs"]
    finally:
        memory.rm("/etl-run", recursive=True)
    assert_is(tmp_path / "out", log[1])
    assert {"size", "sha256 of its ends"} == inputs[0]["fingerprint"].keys()


def test_a_column_that_is_never_there(options, tmp_path: Path) -> None:
    days = write_log(tmp_path / "raw", [20, 20, 20])
    for number, rows in enumerate(days):
        for row in rows:
            row[14] = ""
            row[1] = ""
            if number == 0:
                row[15] = ""
        write_day(tmp_path / "raw" / f"day_{number}", rows)
    run(settings(tmp_path / "raw", tmp_path / "out", **options))
    assert_is(tmp_path / "out", days)
    assert TableSchema.read(tmp_path / "out/criteo_binary/split").table_sizes[0] == 3


def test_the_same_run_writes_the_same_bytes(
    raw: Path, done: Path, options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with other workers, and to a relative path."""
    monkeypatch.chdir(tmp_path)
    threads = {} if "scheduler" in options else {"workers": 3}
    for again in (raw, raw / ".." / raw.name):  # done once, under whatever name
        run(settings(again, Path("out"), **options, **threads))
    assert content(tmp_path / "out") == content(done)


@pytest.mark.parametrize("events", [False, True])
def test_the_cpu_engine_imports_no_other(raw: Path, tmp_path: Path, events: bool) -> None:
    """Neither NVTabular, Dask, pandas nor torch; installed they are."""
    flags = ["run", "--output_path", str(tmp_path / "out"), "--engine", "cpu", "--input_path"]
    if events:
        log = tmp_path / "log"
        synthesize(log, SyntheticSettings(days=3, rows_per_day=1000, events=True))
        flags += [str(log), "--spec", str(log / "spec.toml")]
    else:
        flags.append(str(raw))
    program = f"""
import sys
from nvt_torchrec.etl.__main__ import main
assert main({flags}) == 0
banned = {{"nvtabular", "merlin", "dask", "distributed", "pandas", "torch",
          "nvt_torchrec.nvt_compat"}}
print("imported:", sorted(banned & set(sys.modules)))
"""
    done = python("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported: []\n")


def test_progress_is_for_terminals(raw: Path, tmp_path: Path) -> None:
    """Rows/s and the time left of each stage on one; none of it in a log."""
    told = []
    for name in ("terminal", "log"):
        command = [sys.executable, "-m", "etl", "run", "--engine", "cpu"]
        command += ["--input_path", str(raw), "--output_path", str(tmp_path / name)]
        reader, writer = pty.openpty() if name == "terminal" else os.pipe()
        if name == "terminal":
            fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 150, 0, 0))
        with subprocess.Popen(command, stderr=writer, stdout=subprocess.DEVNULL) as process:
            os.close(writer)
            text = b""
            with contextlib.suppress(OSError):  # how a terminal ends
                while chunk := os.read(reader, 1 << 16):
                    text += chunk
        os.close(reader)
        assert process.returncode == 0
        told.append(text.decode())
    for stage in ("fit", "transform"):
        lines = [line for line in re.split("[\r\n]", told[0]) if line.startswith(f"{stage}: ")]
        assert any(re.search(r" rows/s\]", line) for line in lines), lines
    assert "rows/s" not in told[1]
    assert "transform: " in told[1]  # how long it took


@pytest.mark.parametrize("options", ["nvtabular"], indirect=True)
def test_an_output_of_nvtabular_is_whole_but_cannot_be_extended(
    log, done: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["check", str(done)]) == 0
    assert "no problems found" in capsys.readouterr().out
    write_day(tmp_path / "day_3", log[1][0])
    flags = ["--output_path", str(done), "--input_path", str(tmp_path / "day_3")]
    assert main(["extend", *flags]) == 2
    message = capsys.readouterr().err
    assert "made with --engine nvtabular" in message
    assert "--engine cpu" in message
