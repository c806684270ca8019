"""What ``python -m etl drift`` prints: the columns that drifted, and a line on the others."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.drift.artifact import ColumnDrift, Drift, PsiDrift, ShareDrift
from nvt_torchrec.etl.drift.table import table
from tests.etl.drift.days import make_log, with_larger_int_2
from tests.logs import CRITEO

_SHARE = ShareDrift(100, 1000, 90, 1000, 0.01, 0.05, by_chance=True, flagged=False)


def column(name: str, psi: float, *, flagged: bool = False, threshold: float | None = 0.2):
    index = PsiDrift(psi, 0.01, 0.05, threshold, [1, 2], [2, 1], flagged)
    return ColumnDrift(name, "dense", sampled=True, psi=index, missing=_SHARE)


def drift(*columns: ColumnDrift, flags: Collection[str] = ()) -> Drift:
    return Drift(
        day=3, name="day_3", input="raw/day_3", rows=1000, limit_rows=None, generation=0,
        workflow_digest="", baseline_days=[0, 1, 2], tests=7, thresholds={}, label_rate=_SHARE,
        malformed=_SHARE, columns=list(columns), flags=list(flags),
    )  # fmt: skip


def test_a_day_without_drift_takes_five_lines():
    lines = table(drift(column("a", 0.01), column("b", 0.03), column("c", 0.02))).splitlines()
    assert lines == [
        "raw/day_3: 1,000 rows, compared with days 0 to 2",
        "  label rate      9.0 % -> 10.0 %",
        "  malformed rows  9.0 % -> 10.0 %",
        "  3 columns without drift; highest PSI 0.0300 of b (limit 0.2000)",
        "no drift: none of 7 measures exceeds its threshold",
    ]


def test_columns_that_drifted_have_a_line_each_and_the_others_one_line():
    columns = [column("a", 0.5, flagged=True), column("b", 0.1), column("long_name_of_a_column", 3)]
    text = table(drift(*columns, flags=["a PSI"]))
    (line,) = (line for line in text.splitlines() if line.startswith("  a "))
    assert line.endswith("<< PSI")
    assert "\n  b " not in text
    assert "\n  2 columns without drift; highest PSI 3.0000 of long_name_of_a_column" in text
    assert text.endswith("\ndrift: 1 of 7 measures exceed their thresholds")


def test_all_columns_have_a_line_if_asked_for():
    name = "a_name_that_is_longer_than_any_heading"
    columns = [column("a", 0.5, flagged=True), column("b", 0.1), column(name, 0.2)]
    lines = table(drift(*columns, flags=["a PSI"]), all_columns=True).splitlines()
    rows = [line for line in lines if "9.0 % -> 10.0 %" in line][2:]
    assert [line.split()[:2] for line in rows] == [
        ["a", "0.5000"], ["b", "0.1000"], [name, "0.2000"],
    ]  # fmt: skip
    assert len({line.index(" 0.2000 ") for line in rows[:2]}) == 1
    assert not any("without drift" in line for line in lines)


def test_a_column_without_a_limit_and_days_on_which_all_columns_drift():
    assert "of a (no limit)" in table(drift(column("a", 9.0, threshold=None)))
    assert "1 column without" in table(drift(column("a", 9.0, threshold=None)))
    everything = table(drift(column("a", 0.5, flagged=True), flags=["a PSI"]))
    assert "without drift" not in everything


def test_the_command_prints_what_drifted(tmp_path: Path, capsys):
    log = make_log(tmp_path)
    day = log / "raw" / "day_3"
    assert main(["drift", str(log / "out"), "--input", str(day)]) == 0
    short = capsys.readouterr().out
    assert "int_2 " not in short
    assert "\n  39 columns without drift; " in short
    assert len(short.splitlines()) == 7
    other = with_larger_int_2(day, tmp_path / "day_3")
    arguments = ["drift", str(log / "out"), "--input", str(other)]
    assert main(arguments) == 3
    printed = capsys.readouterr().out
    assert "\n  int_2 " in printed
    assert "\n  int_3 " not in printed
    assert "\n  38 columns without drift; " in printed
    result = (log / "out" / "drift" / "day_3.json").read_bytes()
    assert main([*arguments, "--all_columns"]) == 3
    everything = capsys.readouterr().out
    assert all(f"\n  {name} " in everything for name in CRITEO.columns[1:])
    assert (log / "out" / "drift" / "day_3.json").read_bytes() == result
