"""Adding days: what is written, and that it does not depend on how or where it was made."""

from __future__ import annotations

import json
import logging
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.check import check
from nvt_torchrec.etl.engines.nvtabular import transform_frame
from nvt_torchrec.etl.finish.report import collect
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.etl_output import PREVIOUS, EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.store import load
from nvt_torchrec.workflows.workflow_frames import to_frame
from tests.etl.extended import (
    SMALL,
    add,
    assert_sound,
    content,
    copy_of,
    differences,
    make_base,
    write_days,
)
from tests.etl.findings import bad
from tests.etl.runs import QUARANTINE, change_json, failing, read_split, settings
from tests.logs import pack, read_block

ROWS = {0: 60, 1: 50, 2: 41, 3: 45, 4: 52, 5: 38}
NEW = (3, 4, 5)


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list]]:
    directory = tmp_path_factory.mktemp("log") / "raw"
    return directory, write_days(directory, ROWS)


@pytest.fixture(scope="module")
def base(raw, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 0, of days 0 to 2."""
    return make_base(raw[0], tmp_path_factory.mktemp("base") / "out")


@pytest.fixture(scope="module")
def extended(raw, base, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 3, made by one command."""
    output = copy_of(base, tmp_path_factory.mktemp("extended"))
    add(output, raw[0])
    return output


def test_one_by_one_is_all_at_once(raw, base, tmp_path: Path) -> None:
    """Also in pairs."""
    seen = []
    for i, groups in enumerate(([NEW], [(3,), (4,), (5,)], [(3, 4), (5,)])):
        output = copy_of(base, tmp_path / str(i))
        for group in groups:
            add(output, raw[0], days=group)
        assert not {path.name for path in output.iterdir()} & {".work", ".extending"}
        seen.append(content(output))
    assert_sound(output)
    for other in seen[1:]:
        assert differences(seen[0], other) == []


def test_an_interrupted_day_is_finished_by_the_other_engine(
    raw, base, dask_client, tmp_path: Path, monkeypatch
) -> None:
    """What was counted stays counted."""
    output, other = copy_of(base, tmp_path), copy_of(base, tmp_path / "other")
    extend_workflow = "nvt_torchrec.workflows.extend_workflow.extend_workflow"
    with failing(extend_workflow, OutputError("stop here")):
        add(output, raw[0] / "day_3")
    assert list(output.glob(".work/*/fit/*.npz"))

    def counted_again(*arguments, **options) -> None:
        raise AssertionError("this block was counted before")

    monkeypatch.setattr("nvt_torchrec.etl.engines.workers._count_block", counted_again)
    add(output, raw[0] / "day_3", scheduler=dask_client.scheduler.address)
    add(other, raw[0] / "day_3")
    assert differences(content(output), content(other)) == []


def test_the_generation_before(raw, base, tmp_path: Path) -> None:
    """It is kept, for --undo and for a training that began with it; so is one that was undone."""
    output = copy_of(base, tmp_path)
    before = _without_previous(output)
    valid = EtlOutput(output).splits / "valid"
    dataset = read_dataset(valid)
    early, late, last = (KJTLoader(valid, 8, device="cpu") for _ in range(3))
    labels = [label for batch in early for label in batch.labels.tolist()]
    add(output, raw[0] / "day_3")
    assert not dataset.files.paths[0].exists()
    assert [label for batch in late for label in batch.labels.tolist()] == labels
    assert differences(before, _without_previous(output / PREVIOUS)) == []
    assert main(["extend", "--output_path", str(output), "--undo"]) == 0
    assert differences(before, _without_previous(output)) == []
    add(output, raw[0])
    assert [label for batch in last for label in batch.labels.tolist()] == labels
    newest = read_dataset(valid)
    gone = KJTLoader(valid, 8, device="cpu")
    add(output, "", undo=True)
    assert newest.files.read_footer(0).rows.tolist() == newest.source.row_counts
    shutil.rmtree(output / PREVIOUS)
    with pytest.raises(BadInputError, match=r"since the loader was made(.|\n)*days were added"):
        list(gone)
    other = copy_of(base, tmp_path / "other")
    add(other, raw[0], days=(3, 4))
    assert differences(_without_previous(output), _without_previous(other)) == []
    assert_sound(output)


def _without_previous(output: Path) -> dict[str, bytes]:
    """Its content, but for what the newest day replaced."""
    files = content(output).items()
    return {name: of for name, of in files if not name.startswith(PREVIOUS)}


def test_an_undoing_that_was_interrupted(raw, base, tmp_path: Path) -> None:
    output = copy_of(base, tmp_path)
    before = _without_previous(output)
    rename, broken = "nvt_torchrec.etl.extend.claim._rename", OSError(5, "Input/output error")
    for after in range(1, 12, 3):
        add(output, raw[0] / "day_3")
        with failing(rename, broken, after=after, expected=OutputError):
            add(output, "", undo=True)
        assert add(output, "", resume=True)["generation"] == 0
        assert differences(before, _without_previous(output)) == []


def test_values_get_ids_behind_the_old_ones(raw, base, extended) -> None:
    """By the policy over all days counted, computed with plain counters."""
    fields = raw[1]
    fit_days = (0, 1)  # day 2 was for validation and test when the workflow was fitted
    column = 1 + len(SMALL.dense)
    for j, threshold in ((3, 1), (2, 3)):
        ids: dict[str, int] = {}
        seen: Counter = Counter()
        for days in (fit_days, *((day,) for day in NEW)):
            for row in (row for day in days for row in fields[day]):
                if row[column + j]:
                    seen[row[column + j]] += 1
            earned = [value for value in seen if seen[value] >= threshold and value not in ids]
            for value in sorted(earned, key=lambda value: (-seen[value], int(value, 16))):
                ids[value] = 3 + len(ids)
        expected = [ids.get(row[column + j], 2) if row[column + j] else 1 for row in fields[5]]
        found = pd.concat([read_split(extended, split) for split in ("valid", "test")])
        assert found[f"cat_{j}"].tolist() == expected
    moved = read_split(extended, "train")
    first = read_split(base, "train")
    pd.testing.assert_frame_equal(moved[: len(first)], first)
    assert len(moved) == sum(ROWS[day] for day in range(5))


def test_nvtabular_gives_the_same_ids(raw, extended) -> None:
    """The genuine Workflow of the extended directory, on the raw rows of the newest day."""
    path = raw[0] / "day_5"
    rows = read_block(Block(str(path), 0, path.stat().st_size, "day_5"), SMALL)
    workflow = load(extended / "workflow")
    schema = inspect(extended / "workflow").table_schema
    frame = to_frame(rows, SMALL)
    expected = transform_frame(frame, workflow, schema, gpu=False).to_pandas()
    found = pd.concat(
        [read_split(extended, split) for split in ("valid", "test")], ignore_index=True
    )
    ids = [SMALL.label, *SMALL.categorical_names]
    pd.testing.assert_frame_equal(found[ids], expected[ids])
    np.testing.assert_allclose(found[SMALL.dense_names], expected[SMALL.dense_names], rtol=3e-7)


def test_the_manifest(raw, extended) -> None:
    manifest = json.loads((extended / "manifest.json").read_text())
    assert manifest["format_version"] == 4
    assert manifest["generation"] == 3
    assert manifest["days"] == {"train": [0, 1, 2, 3, 4], "valid": [5], "test": [5]}
    assert [(one["generation"], one["day"]) for one in manifest["extensions"]] == [
        (1, 3), (2, 4), (3, 5)
    ]  # fmt: skip
    assert [file["day"] for file in manifest["inputs"]] == list(ROWS)
    assert manifest["rows"]["in"] == sum(ROWS.values())
    assert {int(day): one["rows"] for day, one in manifest["by_day"].items()} == ROWS
    description = inspect(extended / "workflow")
    assert manifest["workflow_digest"] == description.digest
    assert [generation.number for generation in description.lineage] == [0, 1, 2, 3]
    for split in SPLITS:
        frame, counts = read_split(extended, split), manifest["splits"][split]
        assert counts["rows"] == len(frame)
        assert counts["positives"] == int(frame["label"].sum())
        assert counts["missing"]["cat_1"] == int((frame["cat_1"] == 1).sum())
        assert counts["out_of_vocabulary"]["cat_2"] == int((frame["cat_2"] == 2).sum())


def test_parts_by_day(base, extended) -> None:
    output = EtlOutput(extended)
    output.check_whole()
    train = output.parts("train")
    assert (train[0].file, train[0].rows) == ("train/part.0.parquet", 60)
    assert [(part.day, part.generation) for part in train] == [
        (0, 0), (1, 0), (2, 0), (2, 0), (3, 1), (3, 1), (4, 2), (4, 2)
    ]  # fmt: skip
    for part in train + output.parts("valid") + output.parts("test"):
        assert pq.read_metadata(output.splits / part.file).num_rows == part.rows
    # numbers are never reused: those of days 2 to 4 are gone
    assert [part.file for part in output.parts("valid")] == ["valid/part.3.parquet"]
    assert [part.generation for part in EtlOutput(base).parts("test")] == [0]


def test_descriptions_are_of_all_days(extended) -> None:
    root = extended / "criteo_binary" / "split"
    assert pq.read_metadata(root / "_metadata").num_rows == sum(ROWS.values())
    page = (extended / "report.html").read_text()
    assert "split by days: train 0 to 4, valid 5, test 5" in page
    data = collect(
        extended, Manifest.read(extended / "manifest.json"), inspect(extended / "workflow")
    )
    (column,) = [column for column in data.categorical if column.name == "cat_3"]
    counted = pq.read_table(
        extended / "workflow" / inspect(extended / "workflow").vocabularies["cat_3"].file
    )
    counts = np.sort(counted["cat_3_size"].to_numpy())[::-1]
    assert [count for _, count, *_ in column.top] == counts[:5].tolist()
    assert column.values_for_99 == 1 + int(np.searchsorted(np.cumsum(counts), 0.99 * counts.sum()))


def test_a_log_of_one_day_can_be_extended(raw, tmp_path: Path) -> None:
    output = tmp_path / "out"
    run(settings(raw[0], output, SMALL, days=frozenset({0})))
    assert add(output, raw[0], days={1})["days"] == {"train": [0], "valid": [1], "test": [1]}
    assert_sound(output)
    assert len(read_split(output, "train")) == 60


def test_a_compressed_day_with_bad_rows(raw, base, tmp_path: Path) -> None:
    """Rejected rows of earlier days stay; without the bad row, the day is what it was."""
    mine = tmp_path / "raw"
    shutil.copytree(raw[0], mine)
    with open(mine / "day_1", "a") as file:
        file.write("bad row\n")
    output = make_base(mine, tmp_path / "out", **QUARANTINE)
    lines = (raw[0] / "day_3").read_bytes().splitlines(keepends=True)
    (mine / "day_3").write_bytes(b"".join([*lines[:7], b"bad row\n", *lines[7:]]))
    manifest = add(output, pack(mine / "day_3"), **QUARANTINE)
    assert manifest["rows"] == {"in": 198, "out": 196, "rejected": 2}
    assert manifest["inputs"][-1]["rows"] == {"in": 46, "out": 45, "rejected": 1}
    assert {path.name for path in (output / "rejected").iterdir()} == {"day_1.tsv", "day_3.gz.tsv"}
    rejected = (output / "rejected" / "day_3.gz.tsv").read_bytes().splitlines()
    assert rejected[1].split(b"\t")[1:] == [b"8", b"1 field instead of 7", b"bad row"]
    assert_sound(output)
    other = copy_of(base, tmp_path / "other")
    add(other, raw[0] / "day_3")
    found, expected = (
        pd.concat([read_split(one, split) for split in SPLITS], ignore_index=True)
        for one in (output, other)
    )
    pd.testing.assert_frame_equal(found, expected)


def test_the_settings_of_the_run_hold(raw, tmp_path: Path) -> None:
    """Its first rows of each day only, and the size of its blocks."""
    options = {"limit_rows": 20, "block_mb": 1}
    output = make_base(raw[0], tmp_path / "out", **options)
    manifest = add(output, raw[0])
    assert [one["rows"] for one in manifest["by_day"].values()] == [20] * 6
    assert {one["settings"]["block_mb"] for one in manifest["extensions"]} == {1}
    labels = [float(row[0]) for row in raw[1][3][:20]]
    assert read_split(output, "train")["label"].tolist()[60:80] == labels
    assert_sound(output)


def test_only_the_newest_days_are_kept(raw, base, tmp_path: Path) -> None:
    """Ids, and the parts of the days that are kept, are those of an output with all days."""
    for name in ("all", "kept"):
        shutil.copytree(base, tmp_path / name)
    for day in (3, 4):
        whole = add(tmp_path / "all", raw[0] / f"day_{day}")
        manifest = add(tmp_path / "kept", raw[0] / f"day_{day}", keep_days=3)
    assert manifest["days"] == {"train": [2, 3], "valid": [4], "test": [4]}
    assert {file["day"] for file in manifest["inputs"]} == {2, 3, 4}
    assert manifest["rows"]["in"] == sum(
        file["rows"]["in"] for file in whole["inputs"] if file["day"] >= 2
    )
    assert manifest["splits"]["valid"] == whole["splits"]["valid"]
    all_files, kept = content(tmp_path / "all"), content(tmp_path / "kept")
    workflow = [name for name in all_files | kept if name.startswith("workflow/")]
    all_parts, parts = (
        [name for name in files if "/part." in name and PREVIOUS not in name]
        for files in (all_files, kept)
    )
    assert len(parts) < len(all_parts)
    assert all(kept.get(name) == all_files.get(name) for name in workflow + parts)
    assert_sound(tmp_path / "kept")
    assert add(tmp_path / "kept", "", undo=True)["days"]["valid"] == [3]


def test_the_run_says_that_it_is_finished(raw, base, extended, tmp_path: Path, caplog) -> None:
    """With the directory that has the new days too, and with that of the first days."""
    with caplog.at_level(logging.INFO):
        manifest = run(settings(raw[0], extended, SMALL, days=frozenset({0, 1, 2})))
    assert "finished already" in caplog.text
    assert manifest["generation"] == 3
    every_day, directory = tmp_path / "out", tmp_path / "raw"
    directory.mkdir()
    for day in range(3):
        shutil.copy2(raw[0] / f"day_{day}", directory)
    run(settings(directory, every_day, SMALL))
    shutil.copy2(raw[0] / "day_3", directory)
    add(every_day, directory)
    assert run(settings(directory, every_day, SMALL))["generation"] == 1
    shutil.copy2(raw[0] / "day_4", directory)
    with pytest.raises(OutputError, match=r"day_4: new\n.*etl extend"):
        run(settings(directory, every_day, SMALL))


def test_command_line(raw, base, tmp_path: Path, capsys) -> None:
    output = copy_of(base, tmp_path)
    flags = ["--output_path", str(output), "--input_path", str(raw[0]), "--days", "3-4"]
    assert main(["extend", *flags]) == 0
    text = capsys.readouterr().out
    assert "generation 2" in text
    assert "train: 196 rows of days 0,1,2,3" in text
    assert "valid: 26 rows of days 4" in text
    sizes = inspect(output / "workflow").table_schema.num_embeddings_per_feature
    assert f"--num_embeddings_per_feature {sizes}" in text
    assert main(["extend", *flags, "--json"]) == 0  # has them already
    printed = json.loads(capsys.readouterr().out)
    assert (printed["generation"], printed["days"]["valid"]) == (2, [4])
    assert_sound(output)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda value: value.update(generation=2), "generation 3, but the manifest says 2"),
        (lambda value: value.pop("days"), "damaged: days is missing"),
    ],
)
def test_check_finds_damaged_generations(extended, tmp_path: Path, change, what: str) -> None:
    output = copy_of(extended, tmp_path)
    change_json(output / "manifest.json", change)
    assert what in "".join(bad(output))


def test_check_warns_without_the_state(extended, tmp_path: Path) -> None:
    output = copy_of(extended, tmp_path)
    shutil.rmtree(output / "extension")
    (found,) = [finding for finding in check(output) if finding.kind == "generations"]
    assert "no day can be added" in str(found)
