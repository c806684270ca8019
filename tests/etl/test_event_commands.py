"""What ``etl export``, ``guess`` and ``check`` make of events."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.guess import guess
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.event_logs import DAY, make_rows, parquet, read_lists, write
from tests.etl.findings import bad


@pytest.mark.parametrize("pad", [False, True])
def test_an_export_has_the_newest_events_as_lists(
    tmp_path: Path, event_outputs: tuple[Path, Path], pad: bool
) -> None:
    """Of each row, oldest first, after padding if it is asked for; all else is as it was."""
    flags = [
        "export",
        str(event_outputs[1]),
        f"--output_path={tmp_path / 'lists'}",
        "--max_events=3",
    ]
    assert main([*flags, *["--pad"] * pad]) == 0
    for split in SPLITS:
        table, there = (
            pq.read_table(tmp_path / f"lists/{split}.parquet"),
            parquet(event_outputs[1], split),
        )
        for feature, rows in read_lists(event_outputs[1], split).items():
            newest = [row[-3:] for row in rows]
            assert 3 in map(len, newest)
            if pad:
                newest = [[0] * (3 - len(row)) + row for row in newest]
            assert table[feature.replace(".", "__")].to_pylist() == newest
        for name in set(table.column_names) & there.keys():
            np.testing.assert_array_equal(table[name].to_numpy(), there[name])
        assert {"user_count", "item", "clicked"} <= {*table.column_names}
    assert main(flags) == 2


@pytest.mark.parametrize("damage", ["a named pipe", "cut short", "a flipped byte", "other ids"])
def test_an_export_refuses_damaged_files(
    tmp_path: Path,
    event_outputs: tuple[Path, Path],
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing is written, and whoever reads a pipe does not wait for its writer."""
    output = tmp_path / "out"
    shutil.copytree(event_outputs[1], output)
    part = output / "criteo_binary/split/train/part.0.parquet"
    content = bytearray(part.read_bytes())
    if damage == "a named pipe":
        part.unlink()
        os.mkfifo(part)
    elif damage == "cut short":
        part.write_bytes(content[:-100])
    elif damage == "a flipped byte":
        content[len(content) // 3] ^= 1
        part.write_bytes(content)
    else:
        part = next((output / "criteo_binary/split/_histories/recent").iterdir()) / "item.npy"
        np.save(part, np.load(part)[::-1])
    assert main(["export", str(output), f"--output_path={tmp_path / 'lists'}"]) == 2
    printed = capsys.readouterr().err
    assert str(part) in printed
    assert "or run the ETL again" in printed
    assert not (tmp_path / "lists").exists()


@pytest.mark.parametrize("names", [["log.csv"], ["day_0.csv", "day_1.csv"]])
def test_a_guess_proposes_events_as_comments(tmp_path: Path, names: list[str]) -> None:
    rows = [dataclasses.replace(row, time=row.time + 20_000 * DAY) for row in make_rows(300, 3)]
    for name in names:
        write(tmp_path / name, rows)
    spec, _, _ = guess(str(tmp_path / names[0]), label="clicked")
    assert ('by = "days"' in spec) == (len(names) > 1)
    head, mark, proposed = spec.partition("# What happened before a row")
    assert mark
    assert load_spec(_as_file(tmp_path, spec)).groups == []
    lines = proposed.partition("\n\n")[0].splitlines()[2:]
    uncommented = "\n".join(line.removeprefix("# ") for line in lines)
    with_events = load_spec(_as_file(tmp_path, f"{head}\n{uncommented}\n"))
    assert [group.columns for group in with_events.groups] == [
        ("user",),
        ("shop",),
    ]  # of more values than the items
    assert with_events.histories[0].columns == ("shop",)


def _as_file(tmp_path: Path, text: str) -> Path:
    (tmp_path / "guess.toml").write_text(text)
    return tmp_path / "guess.toml"


def test_check_finds_pointers_that_lead_nowhere(
    tmp_path: Path, event_outputs: tuple[Path, Path]
) -> None:
    output = tmp_path / "out"
    shutil.copytree(event_outputs[1], output)
    assert bad(output) == []
    store = next((output / "criteo_binary/split/_histories/recent").iterdir())
    names = ("offsets", "item", "shop")
    offsets, ids, shops = (np.load(store / f"{name}.npy") for name in names)
    np.save(store / "offsets.npy", np.minimum(offsets, offsets[-1] - 40))
    for name in ("item", "shop"):
        np.save(store / f"{name}.npy", np.load(store / f"{name}.npy")[:-40])
    assert any("events of key" in finding for finding in bad(output))
    np.save(store / "offsets.npy", offsets)
    np.save(store / "item.npy", np.full_like(ids, 10**6))
    np.save(store / "shop.npy", shops)
    assert any("outside of the table" in finding for finding in bad(output))
    np.save(store / "item.npy", ids[::-1])  # other ids that are there
    assert any("digest differs" in finding for finding in bad(output))
