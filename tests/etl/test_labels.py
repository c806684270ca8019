"""A log that is sorted by label: its splits have one label each, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.finish.make_manifest import one_label, one_label_remedy
from nvt_torchrec.etl.run import run
from tests.etl.findings import findings
from tests.etl.runs import settings
from tests.logs import random_rows, write_day, write_log


def _found(output: Path) -> list[tuple[str, str, str]]:
    return [(one.severity, Path(one.where).name, one.what) for one in findings(output)]


@pytest.mark.parametrize("clicks", [10, 35, 80])
def test_one_sorted_file(clicks: int, tmp_path: Path, caplog, capsys) -> None:
    """80/10/10 in the order of the rows: at least two of the three have one label."""
    rows = random_rows(200, 0)
    for i, row in enumerate(rows):
        row[0] = str(int(i >= len(rows) - clicks))
    write_day(tmp_path / "day_0", rows)
    splits = {"train": rows[:160], "valid": rows[160:180], "test": rows[180:]}
    labels = {name: {row[0] for row in own} for name, own in splits.items()}
    one = {name: own.pop() for name, own in labels.items() if len(own) == 1}
    assert len(one) == 2
    run(settings(tmp_path / "day_0", tmp_path / "out"))
    report = (tmp_path / "out" / "report.html").read_text()
    expected = []
    for name, label in one.items():
        what = f"all {len(splits[name])} rows have label {label}, so AUROC is not defined"
        assert f"warning: {name}: {what}" in caplog.text
        assert f"{name}: {what}" in report
        expected.append(("warning", name, what))
    for text in (caplog.text, report):
        assert "sorted by label" in text
        assert "shuf" in text
    assert sorted(_found(tmp_path / "out")) == sorted(expected)
    assert main(["check", str(tmp_path / "out")]) == 1
    assert "shuffle the rows" in capsys.readouterr().out


def test_one_row_of_the_other_label_is_enough(tmp_path: Path, caplog) -> None:
    days = write_log(tmp_path / "raw", [60, 50, 40])
    for row in days[2][:20]:
        row[0] = "1"
    days[2][0][0] = "0"
    write_day(tmp_path / "raw" / "day_2", days[2])
    manifest = run(settings(tmp_path / "raw", tmp_path / "both"))
    assert "warning" not in caplog.text
    assert _found(tmp_path / "both") == []
    assert manifest["splits"]["valid"]["positives"] == 19
    assert one_label(0, 0) == ""


def test_the_remedy_suits_the_split() -> None:
    def remedy(positives: list[int], **split: object) -> str:
        splits = {str(i): {"rows": 10, "positives": count} for i, count in enumerate(positives)}
        return one_label_remedy(splits, split or None)

    assert "sorted by label" in remedy([0, 0, 9])
    assert "more rows" in remedy([3, 4, 0], by="share")
    # shuffling does not help a log that has one label only
    assert "no row has label 0: choose another column" in remedy([10, 10, 10], by="share")
    assert "no row has label 1" in remedy([0, 0, 0])
