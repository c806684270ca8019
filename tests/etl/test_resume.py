from __future__ import annotations

import dataclasses
import errno
import json
import os
import resource
from pathlib import Path
from typing import IO

import pytest

from nvt_torchrec.base.errors import BadInputError, BadRowError, OutputError
from nvt_torchrec.base.files.remote import open_input
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec.spec_variants import replace_policy
from nvt_torchrec.formats.manifest import Manifest
from tests.etl.extended import content
from tests.etl.runs import assert_is, failing, settings, tree
from tests.forks import seen_by
from tests.logs import CRITEO, ROWS, pack, write_day, write_log
from tests.shell import python


@pytest.fixture
def unfinished(tmp_path: Path) -> tuple[Path, Path]:
    """A log, and an output that has all of it but the last split, which has a bad row."""
    raw = tmp_path / "raw"
    write_log(raw, ROWS)
    with open(raw / "day_2", "a") as file:
        file.write("bad\n")
    pack(raw / "day_1")
    with pytest.raises(BadRowError, match="day_2, line 42"):
        run(settings(raw, tmp_path / "out", workers=1))
    return raw, tmp_path / "out"


def test_killed_before_any_kind_of_write(tmp_path: Path) -> None:
    """Byte-identical after resuming. Done twice are at most a unit per worker, and those that were
    being synced or waited for it: each time as many as there are workers.
    """
    seen = seen_by("tests.etl.killed", tmp_path)
    assert {name: found["wrong"] for name, found in seen.items()} == {name: [] for name in seen}
    assert max(found["redone"] for found in seen.values()) <= 3 * 2  # workers
    kinds = {kind for found in seen.values() for kind in found["kinds"]}
    assert {
        "open .work/#/events/_histories/recent/.#.tmp/*.npy",
        "os.rename .work/#/events/_histories/recent/*",
        "os.rename .work/#/fit/*.npz",
        "os.rename .work/#/parts/#/*.parquet",
        "os.rename .work/#/tables/*",
        "os.rename .work/#/units/*.json",
        "os.rename criteo_binary/split/#/*.parquet",
        "os.rename workflow/*.json",
        "os.rename workflow/events/*.npy",
        "os.rename *.json",
    } <= kinds
    assert any("decompressed" in kind for kind in kinds)


def test_a_finished_output_is_never_harmed(raw: Path, done: Path) -> None:
    """The same run has nothing to do, another one is refused."""
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    assert run(settings(raw, done)) == Manifest.read(done / "manifest.json")
    with pytest.raises(OutputError, match=r"block_mb: 64 before, 1 now\n.*another --output_path"):
        run(settings(raw, done, block_mb=1))
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before
    manifest = Manifest.read(done / "manifest.json")
    earlier = {**manifest.settings, "shuffle": "full", "seed": 0}  # an earlier version's
    dataclasses.replace(manifest, settings=earlier).write(done / "manifest.json")
    assert run(settings(raw, done))["settings"] == earlier
    manifest.write(done / "manifest.json")


def test_other_settings_are_refused_by_name(unfinished) -> None:
    raw, output = unfinished
    spec = dataclasses.replace(replace_policy(CRITEO, freq_threshold=3), dense_transform="log")
    columns = list(spec.categorical)
    columns[4] = dataclasses.replace(columns[4], freq_threshold=0)
    other = dataclasses.replace(spec, categorical=tuple(columns))
    with pytest.raises(OutputError) as caught:
        run(settings(raw, output, other, block_mb=2))
    text = str(caught.value)
    for line in (
        "block_mb: 64 before, 2 now",
        "spec.categorical.cat_0.freq_threshold: 0 before, 3 now",
        "more",
        "--restart",
    ):
        assert line in text
    assert "cat_4" not in text
    # what cannot change the result may be another
    allowed = settings(raw, output, workers=2, max_bad_fraction=0.5)
    with pytest.raises(BadRowError, match="day_2, line 42"):
        run(allowed)


def test_other_inputs_are_refused_by_name(unfinished) -> None:
    raw, output = unfinished
    with open(raw / "day_0", "a") as file:
        file.write("more\n")
    os.utime(raw / "day_1.gz", (1, 1))
    write_day(raw / "day_3", [])
    (raw / "day_3").write_text("x")
    with pytest.raises(OutputError) as caught:
        run(settings(raw, output))
    text = str(caught.value)
    size = (raw / "day_0").stat().st_size
    assert f"{raw / 'day_0'} size: {size - 5} before, {size} now" in text
    assert f"{raw / 'day_1.gz'} modified: " in text
    assert f"{raw / 'day_3'}: new" in text
    (raw / "day_3").unlink()
    (raw / "day_2").rename(raw / "day_2.tsv")
    with pytest.raises(OutputError, match=r"day_2: no longer there\n.*day_2.tsv: new"):
        run(settings(raw, output))


def test_restart_discards(unfinished, monkeypatch) -> None:
    """In a directory of another name; a cluster's worker may still write into that of the old run
    while it is removed.
    """
    raw, output = unfinished
    days = write_log(raw, ROWS)
    (raw / "day_1.gz").unlink()
    (before,) = (output / ".work").iterdir()
    (before / "parts" / "train" / "part.77.parquet").write_text("of the old run")
    with failing("nvt_torchrec.etl.run.move_parts", OutputError("stop here")):
        run(settings(raw, output, restart=True))
    (again,) = (output / ".work").iterdir()
    assert again != before
    rmdir = os.rmdir

    def written_meanwhile(path, **options) -> None:
        if path == again.name:
            (again / "late").write_text("")
        rmdir(path, **options)

    monkeypatch.setattr(os, "rmdir", written_meanwhile)
    run(settings(raw, output, restart=True))
    assert_is(output, days)
    assert not list(output.rglob("part.77*"))


def test_decompressed_days_outlast_a_read_error(tmp_path: Path, monkeypatch) -> None:
    raw, output = tmp_path / "raw", tmp_path / "out"
    write_log(raw, ROWS)
    for day in ("day_0", "day_1", "day_2"):
        pack(raw / day)

    def failing(path: str) -> IO[bytes]:
        if path.endswith("day_2.gz") and list(output.glob(".work/*/decompressed/day_[01]")):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_input(path)

    with monkeypatch.context() as patch:
        patch.setattr("nvt_torchrec.clicklog.readers.lines.open_input", failing)
        with pytest.raises(BadInputError, match=os.strerror(errno.EIO)):
            run(settings(raw, output, workers=1))
    assert list(output.glob(".work/*/decompressed/day_0"))
    run(settings(raw, output))


@pytest.mark.parametrize("lost", ["state.json", "pending.cat_3.parquet"])
def test_a_lost_state_is_made_again(raw: Path, tmp_path: Path, lost: str) -> None:
    """A run that was ended between fitting and transforming, and then lost a file."""
    spec, output = replace_policy(CRITEO, freq_threshold=3), tmp_path / "out"
    run(settings(raw, tmp_path / "whole", spec))
    with failing("nvt_torchrec.etl.engines.host.Threads.encode", OSError("the plug is pulled")):
        run(settings(raw, output, spec))
    (output / "extension" / lost).unlink()
    run(settings(raw, output, spec))
    assert content(output) == content(tmp_path / "whole")


def test_parts_of_another_workflow_are_not_kept(unfinished) -> None:
    raw, output = unfinished
    (record,) = output.glob(".work/*/fit.json")
    record.write_text(json.dumps({"digest": "another"}))
    for _ in range(2):  # the refusal changes nothing
        with pytest.raises(OutputError, match=r"were encoded with another\n.*--restart"):
            run(settings(raw, output))


def test_a_disk_that_fails_now_and_then(raw: Path, tmp_path: Path, monkeypatch) -> None:
    """Each sync is one time the first that fails: every time a clear error, and then resumed."""
    run(settings(raw, tmp_path / "out"))
    (tmp_path / "out").rename(tmp_path / "whole")
    fsync, calls, fails_at = os.fsync, [], 1
    messages: list[str] = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == fails_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", full)
    monkeypatch.setattr(
        "nvt_torchrec.etl.finish.report.write_report", lambda *arguments: None
    )  # slow
    again = settings(raw, tmp_path / "out")
    while not (tmp_path / "out" / "manifest.json").exists():
        calls.clear()
        try:
            run(again)
        except OutputError as error:
            messages.append(str(error))
        fails_at += 3
    assert len(messages) > 10
    assert all(os.strerror(errno.ENOSPC) in message for message in messages)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_file_system_that_takes_no_more(raw: Path, done: Path, tmp_path: Path) -> None:
    """A limit of the kernel's, which every library meets: parquet, npz, JSON."""
    flags = ["--input_path", str(raw), "--output_path", str(tmp_path / "out"), "--resume"]
    for size in (100, 20_000, 60_000):
        failed = python(
            *("-m", "etl", "run", "--engine", "cpu", *flags),
            warm=True,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),  # noqa: B023
        )
        assert failed.returncode == 2, failed.stderr
        assert "cannot be written: File too large" in failed.stderr
        assert "Traceback" not in failed.stderr
    run(settings(raw, tmp_path / "out"))
    assert content(tmp_path / "out") == content(done)
