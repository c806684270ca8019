"""``python -m etl guess``: how it asks for the label, its events, and splits that are published."""

from __future__ import annotations

import io
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.csv as pacsv
import pyarrow.dataset as pads
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.guess import guess, guess_spec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.runs import etl_run, read_split
from tests.etl.test_guess import guessed_with_text
from tests.lookalikes import tables


class Terminal(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self) -> bool:
        return True


def write_loans(directory: Path) -> Path:
    """Write a log that may be of two labels."""
    return tables.write_table(directory / "log.csv", tables.loans, 400)


def test_candidates_that_are_close_are_named_first_with_a_command_each(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_loans(tmp_path)
    assert main(["guess", str(path), "--output", str(tmp_path / "spec.toml")]) in (0, None)
    first, *commands, taken = caplog.messages[:4]
    assert first == "column Creditability or status could be the label:"
    assert taken == "the spec uses Creditability"
    for command, label in zip(commands, ("Creditability", "status"), strict=True):
        assert main(shlex.split(command)[3:]) in (0, None)
        assert load_spec(tmp_path / f"spec-{label}.toml").labels == [label]
    assert guess_spec(str(path), "status", "", 8, events=False).label_candidates == []


@pytest.mark.parametrize(
    ("typed", "label"),
    [("\n", "Creditability"), ("", "Creditability"), ("2\n", "status"), ("7\nstatus\n", "status")],
)
def test_at_a_terminal_it_asks(
    typed: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    path, spec = write_loans(tmp_path), tmp_path / "spec.toml"
    monkeypatch.setattr(sys, "stdin", Terminal(typed))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["guess", str(path), "--output", str(spec)]) in (0, None)
    assert "Which is the label? [1] " in capsys.readouterr().err
    assert load_spec(spec).labels == [label]


def test_without_doubt_it_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tables.write_table(tmp_path / "log.csv", tables.bank_marketing, 400)
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["guess", str(path), "--output", str(tmp_path / "spec.toml")]) in (0, None)


def test_events_are_written_if_they_are_wanted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, spec = tables.write_table(tmp_path / "log.csv", tables.recbole, 500, "\t"), "spec.toml"
    assert main(["guess", str(path), "--output", str(tmp_path / spec)]) in (0, None)
    assert "--events adds it" in caplog.messages[-1]
    assert load_spec(tmp_path / spec).events is None
    flags = ["--output", str(tmp_path / "events.toml"), "--events"]
    assert main(["guess", str(path), *flags]) in (0, None)
    assert "--events" not in caplog.messages[-1]
    with_events = load_spec(tmp_path / "events.toml")
    columns = [group.columns for group in with_events.groups]
    assert columns == [("user_id:token",), ("item_id:token",)]
    assert with_events.histories[0].columns == ("item_id",)
    text = (tmp_path / "events.toml").read_text()
    assert text.count('values = ["count", "rate", "since"]') == 2
    assert etl_run(path, tmp_path / "out", "--spec", str(tmp_path / "events.toml")) == 0
    path = tables.write_table(tmp_path / "log.csv", tables.german_credit, 500)
    with pytest.raises(BadInputError, match=r"cannot add \[events\]: they need a time"):
        guess(str(path), events=True)


def write_splits(directory: Path, *names: str) -> Path:
    for name in names:
        tables.write_table(directory / name, tables.german_credit, 300)
    return directory


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["train.csv", "validation.csv", "test.csv"], ["train.csv", "validation.csv", "test.csv"]),
        (["log_test.csv", "log_train.csv", "log_dev.csv"],
         ["log_train.csv", "log_dev.csv", "log_test.csv"]),
        (["ml.test.inter", "ml.train.inter", "ml.valid.inter"],
         ["ml.train.inter", "ml.valid.inter", "ml.test.inter"]),
        (["train/0.csv", "train/1.csv", "val/0.csv", "test/0.csv"],
         [["train/0.csv", "train/1.csv"], "val/0.csv", "test/0.csv"]),
        (["train.csv", "test.csv"], ["train.csv", None, "test.csv"]),
        (["train.csv", "valid.csv"], ["train.csv", None, "valid.csv"]),
    ],
)  # fmt: skip
def test_files_that_are_named_for_a_split_keep_to_it(
    names: list[str], expected: list, tmp_path: Path
) -> None:
    raw = write_splits(tmp_path / "raw", *names)
    (raw / "training_notes.md").write_text("no rows")
    for given in (raw, raw / "*.csv") if len(list(raw.glob("*.csv"))) == len(names) else (raw,):
        text, flags, _ = guess(str(given))
        assert flags[1] == str(raw)
        assert "rows of test" not in text
        (tmp_path / "spec.toml").write_text(text)
        split = load_spec(tmp_path / "spec.toml").split
        assert split.by == "files"
        files = [split.train_files, split.valid_files, split.test_files]
        assert [list(each) for each in files] == [
            [] if each is None else [each] if isinstance(each, str) else each for each in expected
        ]
        assert split.valid == (0.1 if expected[1] is None else 0)
    assert etl_run(raw, tmp_path / "out", "--spec", str(tmp_path / "spec.toml")) == 0


def test_files_without_labels_are_not_tested_on(tmp_path: Path) -> None:
    raw = write_splits(tmp_path / "raw", "train.csv", "test.csv")
    lines = (raw / "test.csv").read_text().splitlines()
    (raw / "test.csv").write_text("".join(line.rpartition(",")[0] + "\n" for line in lines))
    text, flags, _ = guess(str(raw))
    assert 'by = "share"' in text
    assert "test.csv has no label" in text
    assert flags[1] == str(raw / "train.csv")


def test_days_and_parts_are_no_splits(tmp_path: Path) -> None:
    raw = write_splits(tmp_path / "raw", "train-2024-10-30.csv", "train-2024-10-31.csv")
    assert guessed_with_text(raw)[0].split.by == "days"


def subsets(texts: list[str], unlabelled: str = "") -> Callable[[random.Random, int], tables.Row]:
    """Return what makes rows whose column ``subset`` says which of them are for training."""

    def make(rng: random.Random, i: int) -> tables.Row:
        subset = rng.choice(texts)
        row = tables.german_credit(rng, i)
        if subset == unlabelled:
            row["credit_risk"] = ""
        return {"subset": subset, **row}

    return make


@pytest.mark.parametrize(
    ("texts", "train", "valid", "test"),
    [
        (["train", "train", "valid", "test"], ["train"], ["valid"], ["test"]),
        (["Training", "train", "Test"], ["Training", "train"], [], ["Test"]),
        (["train", "train", "val"], ["train"], [], ["val"]),
    ],
)
@pytest.mark.parametrize("header", [True, False])
def test_a_column_that_says_which_rows_are_for_training(
    texts: list[str], train: list[str], valid: list[str], test: list[str], header: bool,
    tmp_path: Path,
) -> None:  # fmt: skip
    """Its values are the split, and no feature; also in a file that names no columns."""
    path = tables.write_table(tmp_path / "log.csv", subsets(texts), 500)
    rows = pacsv.read_csv(path)["subset"].to_pylist()
    if not header:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    spec, text = guessed_with_text(path)
    split = spec.split
    assert (split.by, split.column) == ("values", "subset" if header else "cat_0")
    found = (split.train_values, split.valid_values, split.test_values)
    assert tuple(map(sorted, found)) == (train, valid, test)
    assert split.column not in [*spec.categorical_names, *spec.labels]
    assert f"{split.column}:" not in text  # not among the columns that are not read
    out = tmp_path / "out"
    assert etl_run(path, out, "--spec", str(tmp_path / "spec.toml")) == 0
    written = [len(read_split(out, name)) for name in SPLITS]
    named = [sum(row in own for row in rows) for own in (train, valid, test)]
    assert written[2] == named[2]
    assert written[0] + written[1] == named[0] + named[1]
    assert (written[1] == named[1]) == bool(valid)
    assert written[1] > 0


def test_rows_that_are_published_without_labels(tmp_path: Path) -> None:
    """They are left out, as files without labels are: what is published besides is test."""
    make = subsets(["train", "train", "valid", "test"], unlabelled="test")
    path = tables.write_table(tmp_path / "log.csv", make, 500)
    spec, text = guessed_with_text(path)
    assert (spec.split.test_values, spec.split.valid) == (("valid",), 0.1)
    assert "rows of subset test have no label" in text
    flags = ["--on_bad_rows", "quarantine", "--max_bad_fraction", "0.9"]
    assert etl_run(path, tmp_path / "out", "--spec", str(tmp_path / "spec.toml"), *flags) == 0
    subset = pacsv.read_csv(path)["subset"].to_pylist()
    assert len(read_split(tmp_path / "out", "test")) == subset.count("valid")
    make = subsets(["train", "train", "test"], unlabelled="test")
    tables.write_table(path, make, 500)
    spec, text = guessed_with_text(path)
    assert spec.split.by == "share"
    assert "subset" not in spec.categorical_names


def test_a_log_that_is_sorted_by_its_split(tmp_path: Path) -> None:
    """Its head has rows for training alone; what the guess says of the others is tried."""
    path = tmp_path / "sorted.csv"
    for last in ("test", "holdout"):
        with open(path, "w") as file:
            file.write("click,site,split\n")
            file.writelines(f"{i * i % 7 % 2},s{i % 5},train\n" for i in range(60_000))
            file.writelines(f"{i * i % 7 % 2},s{i % 5},{last}\n" for i in range(9))
        spec, text = guessed_with_text(path)
        assert (spec.split.test_values, spec.split.valid) == (("test",), 0.1)
        assert "the rows that were read are all for training" in text
        status = etl_run(path, tmp_path / last, "--spec", str(tmp_path / "spec.toml"))
        assert (status == 0) == (last == "test")


def test_directories_of_a_split(tmp_path: Path) -> None:
    """Where a directory says it, the split is by files, and its name is no feature."""
    path = tables.write_table(tmp_path / "log.csv", subsets(["train", "train", "test"]), 500)
    table, raw = pacsv.read_csv(path), tmp_path / "raw"
    hive = pads.partitioning(pads.dataset(table).schema.empty_table().select(["subset"]).schema,
                             flavor="hive")  # fmt: skip
    pads.write_dataset(table, raw, format="parquet", partitioning=hive)
    spec, _ = guessed_with_text(raw)
    assert spec.split.by == "files"
    assert spec.split.test_files == ("subset=test/part-0.parquet",)
    assert "subset" not in spec.categorical_names
    assert etl_run(raw, tmp_path / "out", "--spec", str(raw.parent / "spec.toml")) == 0
