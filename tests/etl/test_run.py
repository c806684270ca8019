from __future__ import annotations

import dataclasses
import fcntl
import gzip
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

import workflows
from clicklog.errors import BadRowError, ClickLogError, OutputError, SettingsError
from clicklog.schema import TableSchema
from clicklog.splits import SPLITS
from etl.__main__ import main
from etl.engine_dask import WorkerLostError, readable_errors
from etl.run import EtlSettings, run
from tests.logs import CRITEO, Reference, write_day, write_log

ROWS = [60, 50, 41]


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    directory = tmp_path_factory.mktemp("log") / "raw"
    return directory, write_log(directory, ROWS)


@pytest.fixture(scope="module")
def scheduler(dask_client) -> str:
    return dask_client.scheduler.address


@pytest.fixture(scope="module")
def done(raw, scheduler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("etl") / "out"
    run(EtlSettings(str(raw[0]), output, CRITEO, scheduler=scheduler))
    return output


def _read(output: Path, split: str) -> pd.DataFrame:
    root = output / "criteo_binary" / "split" / split
    files = sorted(root.glob("part.*.parquet"), key=lambda path: int(path.name.split(".")[1]))
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True)


def _cut(days: list) -> dict[str, list]:
    half = (len(days[-1]) + 1) // 2
    return {
        "train": [row for day in days[:-1] for row in day],
        "valid": days[-1][:half],
        "test": days[-1][half:],
    }


def _assert_is(output: Path, days: list, spec=CRITEO) -> None:
    """The parquet of ``output`` is what plain Python makes of ``days``."""
    cut = _cut(days)
    reference = Reference(cut["train"], spec)
    schema = TableSchema.read(output / "criteo_binary" / "split")
    assert schema.table_sizes == reference.table_sizes()
    for split in SPLITS:
        expected = reference.transform(cut[split])
        got = _read(output, split)
        assert got.columns.tolist() == spec.columns
        assert got.dtypes.tolist() == expected.dtypes.tolist()
        ids = [spec.label, *spec.categorical_names]
        pd.testing.assert_frame_equal(got[ids], expected[ids])
        np.testing.assert_allclose(
            got[spec.dense_names], expected[spec.dense_names], rtol=3e-7, atol=1e-7
        )


def test_values(raw, done: Path) -> None:
    _assert_is(done, raw[1])


def test_blocks_and_another_cluster_change_nothing(raw, done: Path, tmp_path: Path) -> None:
    """Other partitions, one worker of its own: the same ids and statistics."""
    days = raw[1]
    big = tmp_path / "raw"
    for day, rows in enumerate(days):
        write_day(big / f"day_{day}", rows * 150)
    for name, options in (("one", {"block_mb": 1, "workers": 1}), ("two", {"block_mb": 4})):
        run(EtlSettings(str(big), tmp_path / name, CRITEO, **options))
    first, second = (workflows.inspect(tmp_path / name / "workflow") for name in ("one", "two"))
    assert first.vocabularies == second.vocabularies
    for name, values in first.statistics.items():
        assert values == pytest.approx(second.statistics[name], rel=1e-12)
    for split in SPLITS:
        pd.testing.assert_frame_equal(
            _read(tmp_path / "one", split), _read(tmp_path / "two", split), rtol=1e-6
        )
    parts = list((tmp_path / "one" / "criteo_binary" / "split" / "train").glob("part.*"))
    assert len(parts) > 2


@pytest.mark.parametrize(
    ("flags", "policy", "dense"),
    [
        (["--freq_threshold", "4"], {"freq_threshold": 4}, "log_normalize"),
        (["--max_table_size", "9", "--dense", "log"], {"max_table_size": 9}, "log"),
    ],
)
def test_command_line(raw, scheduler, tmp_path: Path, flags, policy, dense, capsys) -> None:
    arguments = ["--input_path", str(raw[0]), "--output_path", str(tmp_path / "out")]
    assert main(["run", *arguments, "--scheduler", scheduler, *flags]) == 0
    spec = dataclasses.replace(CRITEO.with_policy(**policy), dense_transform=dense)
    _assert_is(tmp_path / "out", raw[1], spec)
    assert f"{sum(ROWS)} rows in, {sum(ROWS)} out, 0 rejected" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "out" / "workflow")]) == 0
    assert "cat_25" in capsys.readouterr().out


def test_the_contract_on_disk(raw, done: Path) -> None:
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
        listed = (root / split / "_file_list.txt").read_text().split("\n")
        assert int(listed[0]) == len(listed) - 2
        assert all(Path(path).is_file() for path in listed[1:-1])
        hugectr = json.loads((root / split / "_metadata.json").read_text())
        assert sum(file["num_rows"] for file in hugectr["file_stats"]) == count
        assert [column["index"] for column in hugectr["cats"]] == list(range(14, 40))
        part = pq.ParquetFile(root / split / "part.0.parquet", page_checksum_verification=True)
        assert not any(part.schema_arrow.field(i).nullable for i in range(40))
        part.read()
    manifest = json.loads((done / "manifest.json").read_text())
    assert manifest["rows"] == {"in": 151, "out": 151, "rejected": 0}
    assert manifest["splits"]["train"]["positives"] == sum(
        row[0] == "1" for day in raw[1][:2] for row in day
    )
    missing = manifest["splits"]["valid"]["missing"]
    assert missing["int_3"] == sum(row[4] == "" for row in raw[1][2][:21])
    assert missing["cat_7"] == sum(row[21] == "" for row in raw[1][2][:21])
    oov = sum(manifest["splits"]["test"]["out_of_vocabulary"].values())
    ids = _read(done, "test")[CRITEO.categorical_names]
    assert oov == int((ids == 2).to_numpy().sum()) > 0
    assert manifest["by_day"]["1"]["rows"] == 50
    assert manifest["workflow_digest"] == workflows.inspect(done / "workflow").digest
    assert {path.name for path in done.iterdir()} == {
        "criteo_binary", "workflow", "manifest.json", "report.html"
    }  # fmt: skip
    report = (done / "report.html").read_text()
    assert report.count("data:image/png;base64") == 4
    assert "http" not in report


def test_merlin_reads_it(done: Path) -> None:
    """NVTabular's Dataset and the stock Merlin loader see the same rows."""
    import nvt_compat  # noqa: F401

    import nvtabular
    from merlin.dataloader.torch import Loader

    split = done / "criteo_binary" / "split" / "valid"
    expected = _read(done, "valid")
    dataset = nvtabular.Dataset(str(split), engine="parquet", cpu=True)
    assert dataset.schema.column_names == CRITEO.columns
    assert dataset.num_rows == len(expected)
    got = dataset.to_ddf().compute().reset_index(drop=True)
    pd.testing.assert_frame_equal(got, expected)
    features, label = next(iter(Loader(dataset, batch_size=len(expected), shuffle=False)))
    assert features["cat_3"].reshape(-1).tolist() == expected["cat_3"].tolist()
    assert label.reshape(-1).tolist() == expected["label"].tolist()


def test_compressed_days(raw, scheduler, tmp_path: Path) -> None:
    shutil.copytree(raw[0], tmp_path / "raw")
    text = (tmp_path / "raw" / "day_1").read_bytes()
    (tmp_path / "raw" / "day_1").unlink()
    (tmp_path / "raw" / "day_1.gz").write_bytes(gzip.compress(text))
    run(EtlSettings(str(tmp_path / "raw"), tmp_path / "out", CRITEO, scheduler=scheduler))
    _assert_is(tmp_path / "out", raw[1])
    assert not (tmp_path / "out" / ".work").exists()


def test_a_column_that_is_never_there(scheduler, tmp_path: Path) -> None:
    days = write_log(tmp_path / "raw", [20, 20, 20])
    for number, rows in enumerate(days):
        for row in rows:
            row[14] = ""
            row[1] = ""
            if number == 0:
                row[15] = ""
        write_day(tmp_path / "raw" / f"day_{number}", rows)
    run(EtlSettings(str(tmp_path / "raw"), tmp_path / "out", CRITEO, scheduler=scheduler))
    _assert_is(tmp_path / "out", days)
    assert TableSchema.read(tmp_path / "out/criteo_binary/split").table_sizes[0] == 3


@pytest.mark.parametrize("day", [0, 2], ids=["in fit", "in transform"])
def test_a_bad_row_stops_the_run(raw, scheduler, tmp_path: Path, day: int) -> None:
    days = [[list(row) for row in rows] for rows in raw[1]]
    days[day][30][5] = "1.5"
    for number, rows in enumerate(days):
        write_day(tmp_path / "raw" / f"day_{number}", rows)
    settings = EtlSettings(str(tmp_path / "raw"), tmp_path / "out", CRITEO, scheduler=scheduler)
    with pytest.raises(BadRowError, match=rf"day_{day}, line 31: column int_4: '1.5'"):
        run(settings)
    assert not (tmp_path / "out" / "manifest.json").exists()
    # corrected, the same command goes through
    write_log(tmp_path / "raw", ROWS)
    run(settings)
    _assert_is(tmp_path / "out", raw[1])
    assert not (tmp_path / "out" / ".unfinished").exists()


def test_an_output_made_again_with_other_settings(raw, scheduler, tmp_path: Path) -> None:
    """Workers that live on must not remember the workflow that was there before."""
    for policy, dense in (({}, "log_normalize"), ({"max_table_size": 9}, "log")):
        spec = dataclasses.replace(CRITEO.with_policy(**policy), dense_transform=dense)
        run(EtlSettings(str(raw[0]), tmp_path / "out", spec, scheduler=scheduler))
        _assert_is(tmp_path / "out", raw[1], spec)
        shutil.rmtree(tmp_path / "out")


def test_relative_output(raw, scheduler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(EtlSettings(str(raw[0]), Path("out"), CRITEO, scheduler=scheduler))
    _assert_is(tmp_path / "out", raw[1])


def test_many_bad_rows(raw, scheduler, tmp_path: Path) -> None:
    days = [[list(row) for row in rows] for rows in raw[1]]
    days[1] = days[1] + [["x"]] * 150 + days[1]
    days[2][0] = ["y"]
    for number, rows in enumerate(days):
        write_day(tmp_path / "raw" / f"day_{number}", rows)
    text = (tmp_path / "raw" / "day_1").read_bytes()
    (tmp_path / "raw" / "day_1").unlink()
    (tmp_path / "raw" / "day_1.gz").write_bytes(gzip.compress(text))
    settings = EtlSettings(
        str(tmp_path / "raw"), tmp_path / "out", CRITEO, scheduler=scheduler, reject=True
    )
    assert run(settings)["rows"]["rejected"] == 151
    rejected = (tmp_path / "out" / "rejected.tsv").read_text().split("\n")
    assert len(rejected) == 1 + 100 + 1 + 1 + 1
    source = tmp_path / "raw" / "day_1.gz"
    assert rejected[1] == f"{source}\t51\t1 fields instead of 40"
    assert rejected[101] == f"{source}\t\tand 50 more up to line 250"
    assert rejected[102].endswith("day_2\t1\t1 fields instead of 40")


def test_bad_rows_can_be_left_out(raw, scheduler, tmp_path: Path) -> None:
    days = [[list(row) for row in rows] for rows in raw[1]]
    days[1][10][0] = "7"
    days[2][40].append("more")
    for number, rows in enumerate(days):
        write_day(tmp_path / "raw" / f"day_{number}", rows)
    manifest = run(
        EtlSettings(
            str(tmp_path / "raw"), tmp_path / "out", CRITEO, scheduler=scheduler, reject=True
        )
    )
    assert manifest["rows"] == {"in": 151, "out": 149, "rejected": 2}
    rejected = (tmp_path / "out" / "rejected.tsv").read_text().split("\n")
    assert rejected[1].endswith("day_1\t11\tcolumn label: '7': a label is 0 or 1")
    assert rejected[2].endswith("day_2\t41\t41 fields instead of 40")
    cut = _cut(days)
    reference = Reference([row for row in cut["train"] if row[0] != "7"])
    expected = reference.transform(cut["test"][:-1])
    pd.testing.assert_frame_equal(
        _read(tmp_path / "out", "test")[CRITEO.categorical_names],
        expected[CRITEO.categorical_names],
    )


def test_an_output_that_holds_something_is_left_alone(raw, done: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(OutputError, match="holds precious"):
        run(EtlSettings(str(raw[0]), tmp_path, CRITEO))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    with pytest.raises(OutputError, match="a finished run"):
        run(EtlSettings(str(raw[0]), done, CRITEO))
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before
    with pytest.raises(OutputError, match="cannot be written"):
        run(EtlSettings(str(raw[0]), Path("/proc/none/out"), CRITEO))


def test_two_runs_in_one_output(raw, tmp_path: Path) -> None:
    """The second is refused while the first lives, and takes over when it is gone."""
    settings = EtlSettings(str(raw[0]), tmp_path / "out", CRITEO, scheduler="tcp://127.0.0.1:1")
    (tmp_path / "out" / "workflow").mkdir(parents=True)
    with open(tmp_path / "out" / ".unfinished", "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another run is writing here"):
            run(settings)
        assert (tmp_path / "out" / "workflow").exists()
    with pytest.raises(SettingsError, match="--scheduler"):
        run(settings)
    assert not (tmp_path / "out" / "workflow").exists()


def test_a_run_killed_after_its_manifest_is_finished(raw, done: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(done, tmp_path / "out")
    (copy / ".unfinished").touch()
    with pytest.raises(OutputError, match="a finished run"):
        run(EtlSettings(str(raw[0]), copy, CRITEO))
    assert {path.name for path in copy.iterdir()} == {path.name for path in done.iterdir()}
    assert len(list(copy.rglob("*"))) == len(list(done.rglob("*")))


def test_bad_input_is_found_before_anything_is_written(tmp_path: Path, capsys) -> None:
    write_log(tmp_path / "raw", [5, 5, 5])
    (tmp_path / "raw" / "day_1").unlink()
    flags = ["run", "--input_path", str(tmp_path / "raw"), "--output_path", str(tmp_path / "out")]
    assert main(flags) == 2
    assert "missing day_1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for extra, message in (
        (["--limit_rows", "0"], "--limit_rows 0: at least 1"),
        (["--max_table_size", "2"], "max_table_size = 2 leaves no room"),
        (["--days", "a"], "cannot read 'a'"),
        (["--spec", "none.toml"], "none.toml: not a feature spec"),
        (["--scheduler", "x", "--workers", "2"], "--workers and --scheduler are both set"),
    ):
        assert main([*flags, *extra]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "raw" / "day_1").touch()
    assert main(flags) == 2
    assert "day_1: empty file" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etl.cluster.CONNECT_SECONDS", 2)


def test_no_scheduler(raw, tmp_path: Path) -> None:
    settings = EtlSettings(str(raw[0]), tmp_path / "out", CRITEO, scheduler="tcp://127.0.0.1:1")
    with pytest.raises(SettingsError, match=r"--scheduler tcp://127.0.0.1:1: "):
        run(settings)


def test_dry_run_writes_nothing(raw, tmp_path: Path, capsys) -> None:
    flags = ["--input_path", str(raw[0]), "--output_path", str(tmp_path / "out"), "--dry_run"]
    assert main(["run", *flags]) == 0
    text = capsys.readouterr().out
    for word in ("day_0", "train", "valid", "test", "disk", "memory", "time"):
        assert word in text
    rows = int(text.split("rows  : about ")[1].split("\n")[0].replace(",", ""))
    assert abs(rows - sum(ROWS)) < 20
    assert list(tmp_path.iterdir()) == []


def test_dry_run_refuses_what_the_run_would(raw, done: Path, capsys) -> None:
    flags = ["--input_path", str(raw[0]), "--output_path", str(done), "--dry_run"]
    assert main(["run", *flags]) == 2
    assert "a finished run" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("cudaErrorMemoryAllocation")])
def test_memory_that_runs_out_has_a_remedy(error: MemoryError) -> None:
    with (
        pytest.raises(WorkerLostError, match=r"out of memory[^\n]*\n.*--block_mb"),
        readable_errors(),
    ):
        raise error


def test_dry_run_of_a_bad_log(raw, tmp_path: Path, capsys) -> None:
    write_log(tmp_path / "raw", [5, 5])
    text = (tmp_path / "raw" / "day_0").read_text().replace("\n", "\tmore\n", 2)
    (tmp_path / "raw" / "day_0").write_text(text)
    flags = ["--input_path", str(tmp_path / "raw"), "--output_path", str(tmp_path / "out")]
    assert main(["run", *flags, "--dry_run"]) == 2
    assert "day_0, line 1: 41 fields instead of 40" in capsys.readouterr().err


def test_truncated_parquet_is_noticed(done: Path, tmp_path: Path) -> None:
    from nvt_loader import KJTLoader

    copy = shutil.copytree(done / "criteo_binary" / "split", tmp_path / "split")
    part = copy / "valid" / "part.0.parquet"
    part.write_bytes(part.read_bytes()[:-100])
    with pytest.raises(ClickLogError, match=r"part.0.parquet"):
        list(KJTLoader(copy / "valid", 8, device="cpu"))
