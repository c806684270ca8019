"""``python -m etl drift``: what it prints, its file, and its exit status."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.commands.drift import as_text
from nvt_torchrec.etl.day_drift import FORMAT, Drift
from nvt_torchrec.etl.drift_cells import Measure
from tests.etl.drift.days import drift_of, with_larger_int_2
from tests.logs import CRITEO


def test_a_day_without_drift(log: Path, day: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["drift", str(log / "out"), "--input", str(day)]) == 0
    *lines, psi, verdict, file = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "  rows            4,000 -> 4,000" in lines
    assert psi.startswith("  39 columns without drift; highest PSI 0.0")
    assert verdict == "no drift: none of 107 measures is flagged"
    assert Path(file) == log / "out" / "drift" / "day_3.json"
    assert Drift.read(Path(file)) == drift_of(log / "out", day)


def test_a_day_that_drifted(
    log: Path, day: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    other = with_larger_int_2(day, tmp_path / "day_3")
    results = tmp_path / "results"
    arguments = ["drift", str(log / "out"), "--input", str(other), "--output", str(results)]
    assert main(arguments) == 3
    printed = capsys.readouterr().out
    (line,) = (line for line in printed.splitlines() if line.startswith("  int_2 "))
    assert line.startswith("  int_2 PSI ")
    assert line.endswith("<< drift")
    assert "\n  int_3 " not in printed
    assert "\n  38 columns without drift; " in printed
    assert "drift: 1 of 107 measures are flagged" in printed
    result = (results / "day_3.json").read_bytes()
    content = json.loads(result)
    assert content["flags"] == ["int_2 PSI"]
    assert (content["format"], content["format_version"]) == (FORMAT.name, FORMAT.version)
    assert main([*arguments, "--all_columns"]) == 3
    everything = capsys.readouterr().out
    assert all(f"\n  {name} " in everything for name in CRITEO.columns[1:])
    assert "without drift" not in everything
    assert (results / "day_3.json").read_bytes() == result


@pytest.mark.parametrize(
    ("flags", "status"),
    [
        ("--psi inf", 0),
        ("--psi 5", 0),
        ("--psi 0.3", 3),
        ("--ignore int_2", 0),
        ("--ignore int_3", 3),
    ],
)
def test_flags_decide(log: Path, day: Path, tmp_path: Path, flags: str, status: int):
    other = with_larger_int_2(day, tmp_path / "day_3")
    arguments = ["drift", str(log / "out"), "--input", str(other), "--output", str(tmp_path / "r")]
    assert main([*arguments, *flags.split()]) == status


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ignore int_99,int_1", "--ignore int_99: not among the columns"),
        ("--psi -1", "--psi -1"),
        ("--false_alarm_rate 0", "--false_alarm_rate 0"),
    ],
)
def test_flags_that_are_wrong(log: Path, day: Path, capsys, flags: str, says: str):
    assert main(["drift", str(log / "out"), "--input", str(day), *flags.split()]) == 2
    assert says in capsys.readouterr().err


def test_a_file_of_another_name(log: Path, day: Path, tmp_path: Path):
    copy = tmp_path / "yesterday.tsv"
    copy.write_bytes(day.read_bytes())
    assert drift_of(log / "out", copy).name == "yesterday"


def psi(column: str, change: float, limit: float | None = 0.2, *, flagged: bool = False) -> Measure:
    return Measure("PSI", column, [1, 2], [2, 1], change, limit, flagged)


def drift_with(*psis: Measure) -> Drift:
    measures = [Measure("label rate", "", [100, 1000], [90, 1000], 0.0, 0.2, flagged=False)]
    for one in psis:
        measures += [one, Measure("missing rate", one.column, [1, 10], [0, 0], None, 0.05, False)]
    flags = [f"{one.column} PSI" for one in psis if one.flagged]
    return Drift(3, "day_3", "raw/day_3", 1000, 0, "", [0, 1, 2], {}, flags, measures)


def test_the_text_of_a_day_without_drift():
    assert as_text(drift_with(psi("a", 0.01), psi("b", 0.03), psi("c", 0.02))).splitlines() == [
        "raw/day_3: 1,000 rows, compared with days 0 to 2",
        "  label rate  9.0 % -> 10.0 %",
        "  3 columns without drift; highest PSI 0.0300 (limit 0.2000) of b",
        "no drift: none of 7 measures is flagged",
    ]
    assert "1 column without drift; highest PSI 9.0000 (no limit) of a" in as_text(
        drift_with(psi("a", 9.0, None))
    )


def test_measures_are_aligned_and_dates_are_dates():
    drift = drift_with(psi("a", 0.5, flagged=True), psi("a_long_name", 0.1))
    shown = as_text(drift, all_columns=True).splitlines()
    assert len({line.index(".") for line in shown if "PSI" in line}) == 1
    assert not any("without drift" in line for line in shown)
    drift = dataclasses.replace(drift, input="clicks-20260301.csv", baseline_days=[20511, 20512])
    assert "compared with days 2026-02-27 to 2026-02-28" in as_text(drift)
