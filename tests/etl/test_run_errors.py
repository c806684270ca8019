from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SettingsError
from nvt_torchrec.etl.engines.cluster import WorkerLostError, readable_errors
from nvt_torchrec.etl.finish.accounting import move_parts
from nvt_torchrec.etl.run import run
from tests.etl.runs import etl_run, settings
from tests.logs import ROWS, write_log


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvt_torchrec.etl.engines.cluster.CONNECT_SECONDS", 2)


def test_an_output_that_holds_something_is_left_alone(raw, done: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    for options in ({}, {"resume": True}, {"restart": True}):
        with pytest.raises(OutputError, match="holds precious"):
            run(settings(raw, tmp_path, **options))
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    with pytest.raises(OutputError, match="a finished run"):
        run(settings(raw, done, restart=True))
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before
    with pytest.raises(OutputError, match="cannot be written"):
        run(settings(raw, Path("/proc/none/out")))


def test_two_runs_in_one_output(raw: Path, tmp_path: Path) -> None:
    """The second is refused while the first lives, and takes over when it is gone."""
    output = tmp_path / "out"
    (output / "workflow").mkdir(parents=True)
    with open(output / ".unfinished", "w") as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        for options in ({"resume": True}, {"restart": True}):
            with pytest.raises(OutputError, match="another run is writing here"):
                run(settings(raw, output, **options))
        assert (output / "workflow").exists()
    nowhere = settings(raw, output, scheduler="tcp://127.0.0.1:1", restart=True)
    with pytest.raises(SettingsError, match=r"--scheduler tcp://127.0.0.1:1: "):
        run(nowhere)
    assert list(output.iterdir()) == []  # nothing was done


def test_a_run_killed_after_its_manifest_is_finished(raw, done: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(done, tmp_path / "out")
    for restart in (False, True):
        (copy / ".unfinished").touch()
        (copy / ".work" / "1234").mkdir(parents=True)
        if restart:
            with pytest.raises(OutputError, match="a finished run"):
                run(settings(raw, copy, restart=True))
        else:
            assert run(settings(raw, copy))["rows"]["in"] == sum(ROWS)
        assert {path.name for path in copy.iterdir()} == {path.name for path in done.iterdir()}
    assert len(list(copy.rglob("*"))) == len(list(done.rglob("*")))


def test_bad_input_is_found_before_anything_is_written(tmp_path: Path, capsys) -> None:
    write_log(tmp_path / "raw", [5, 5, 5])
    (tmp_path / "raw" / "day_1").unlink()
    paths = (tmp_path / "raw", tmp_path / "out")
    assert etl_run(*paths) == 2
    assert "missing day_1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    for extra, message in (
        (["--days", "7"], "or choose the existing days with --days 0"),
        (["--limit_rows", "0"], "--limit_rows 0\n  -> it must be at least 1"),
        (
            ["--max_table_size", "2"],
            "max_table_size = 2\n  -> give more than 2: 3 ids are reserved",
        ),
        (["--days", "a"], "cannot read 'a'"),
        (["--spec", "none.toml"], "none.toml"),
        (["--scheduler", "x", "--workers", "2"], "--workers and --scheduler are both set"),
        (["--scheduler", "x", "--engine", "cpu"], "--engine cpu and --scheduler x are both set"),
        (
            ["--max_bad_fraction", "1.5"],
            "--max_bad_fraction 1.5\n  -> it must be at least 0 and at most 1",
        ),
        (
            ["--freq_threshold", "3", "--max_table_size", "9"],
            "--freq_threshold and --max_table_size are both set",
        ),
        (["--resume", "--restart"], "--resume and --restart are both set"),
        (["--on_bad_rows", "x"], "--on_bad_rows x\n  -> one of error, quarantine"),
        (["--on_bad_row", "error"], "did you mean --on_bad_rows?"),  # no silent abbreviations
    ):
        assert etl_run(*paths, *extra) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "raw" / "day_1").touch()
    assert etl_run(*paths) == 2
    assert "day_1: empty file" in capsys.readouterr().err


def test_an_input_that_changes_during_the_run(tmp_path: Path, monkeypatch) -> None:
    """What was fitted on is not what was transformed, or some rows would be lost."""
    write_log(tmp_path / "raw", ROWS)

    def append(*arguments) -> None:
        with open(tmp_path / "raw" / "day_1", "a") as file:
            file.write("0" + "\t" * 39 + "\n")
        move_parts(*arguments)

    monkeypatch.setattr("nvt_torchrec.etl.run.move_parts", append)
    with pytest.raises(OutputError, match=r"(?s)day_1 size: \d+ before, \d+ now.*--restart"):
        run(settings(tmp_path / "raw", tmp_path / "out"))
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_rows_that_got_lost_are_noticed(raw: Path, tmp_path: Path, monkeypatch) -> None:
    """A part that is not what was written."""

    def lose(parts: Path, split_root: Path, files: dict[str, str]) -> None:
        first = parts / next(iter(files))
        pq.write_table(pq.read_table(first).slice(1), first)
        move_parts(parts, split_root, files)

    monkeypatch.setattr("nvt_torchrec.etl.run.move_parts", lose)
    with pytest.raises(BadInputError, match=r"part.0.parquet: 59 rows, but 60 were written"):
        run(settings(raw, tmp_path / "out"))
    assert not (tmp_path / "out" / "manifest.json").exists()


@pytest.mark.parametrize("error", [MemoryError(), MemoryError("cudaErrorMemoryAllocation")])
def test_memory_that_runs_out_has_a_remedy(error: MemoryError) -> None:
    with (
        pytest.raises(WorkerLostError, match=r"out of memory[^\n]*\n.*--block_mb"),
        readable_errors(),
    ):
        raise error
