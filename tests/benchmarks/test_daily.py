"""`make daily`, small: once with every command, and its bookkeeping with fakes of them."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.daily import __main__ as daily
from benchmarks.daily import ways
from benchmarks.daily.ways import STAGES, Calendar, Morning
from benchmarks.process import Run
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import write_json
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest


@pytest.fixture(autouse=True)
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.BUILD", tmp_path / "bench")
    monkeypatch.setattr("benchmarks.harness.start_logging", lambda: None)  # it handles signals


def test_the_last_days_of_the_log_are_used() -> None:
    calendar = Calendar(days=21, first_days=10)
    assert calendar.first == 3
    assert calendar.initial == Morning(newest=12, served=13)
    assert calendar.mornings[0] == Morning(newest=13, served=14)
    assert calendar.mornings[-1] == Morning(newest=22, served=23)
    assert len(calendar.mornings) == 10
    assert Calendar(days=4, first_days=2).mornings == [Morning(22, 23)]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--days", "25"], "--days 25"),
        (["--days", "12", "--first_days", "11"], "--first_days 11 of --days 12"),
        (["--ways", "weekly"], "--ways weekly"),
    ],
)
def test_settings(flags: list[str], said: str, tmp_path: Path, capsys) -> None:
    output = tmp_path / "out"
    assert daily.main(["--output", str(output), *flags]) == 2
    assert said in capsys.readouterr().err
    assert not output.exists()


def test_a_directory_of_somebody_else_is_left_alone(tmp_path: Path, capsys) -> None:
    (tmp_path / "precious").write_text("x")
    assert daily.main(["--output", str(tmp_path)]) == 2
    assert "not empty, and not made by this benchmark" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


# ---- the whole benchmark, with commands that are fakes


class Commands:
    """Stands for :func:`benchmarks.process.run` and notes the commands."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, command: list[str], **_: Any) -> Run:
        self.seen.append(" ".join(command[1:]))
        for flag in ("--output_path", "--save_checkpoint_path"):
            if flag in command:
                output = Path(command[command.index(flag) + 1])
                output.mkdir(parents=True, exist_ok=True)
        if "synthesize" in command:
            files = [{"file": f"day_{day}", "auroc": 0.83 + day / 1e6} for day in range(24)]
            write_json(output / "synthetic.json", {"files": files})
        return Run(2.0, 3.0, 100.0, {})


AUROC = {"first": 0.70, "daily": 0.799, "refit": 0.80}


def fake_score(bundle: Path, day: Path) -> dict[str, Any]:
    way = bundle.parts[bundle.parts.index("out") + 1]
    return {"auroc": AUROC[way] + int(day.name[4:]) / 1e6, "log_loss": 0.5, "calibration": 1.0}


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Commands:
    fake = Commands()
    monkeypatch.setattr(ways, "run", fake)
    monkeypatch.setattr(ways, "score", fake_score)
    return fake


FLAGS = ["--days", "5", "--first_days", "2", "--rows_per_day", "40"]


def start(tmp_path: Path, *flags: str) -> int:
    return daily.main(["--output", str(tmp_path / "out"), *FLAGS, *flags])


def test_each_way_does_its_work_each_morning(commands: Commands, tmp_path: Path, capsys) -> None:
    assert start(tmp_path, "--", "--days", "new", "--replay", "0.2") == 0
    extended = [line for line in commands.seen if "etl extend" in line]
    assert [line.partition("--input_path ")[2] for line in extended] == [
        f"{tmp_path}/out/raw/day_{day}" for day in (21, 22)
    ]
    fitted = [line for line in commands.seen if "etl run" in line]
    assert [line.partition("--days ")[2] for line in fitted] == ["19-20", "19-21", "19-22"]
    continued = [line for line in commands.seen if "--continue_from" in line]
    assert [line.partition("--continue_from ")[2] for line in continued] == [
        f"{tmp_path}/out/daily/checkpoint.{day} --days new --replay 0.2" for day in (20, 21)
    ]
    published = [line for line in commands.seen if "publish" in line]
    assert len(published) == 5
    said = capsys.readouterr().out
    assert re.search(r"less refitted +-0\.10000 +-0\.00100 +\+0\.00000", said)
    assert re.search(r"refitted daily +all +8\.0 +12\.0 +100", said)
    written = json.loads((tmp_path / "bench" / "daily.json").read_text())
    assert written["mean_auroc"]["never"] == pytest.approx(written["mean_auroc"]["refit"] - 0.1)
    assert written["update_flags"] == ["--days", "new", "--replay", "0.2"]
    values = {(r["system"], r["case"], r["metric"]): r["median"] for r in written["results"]}
    assert values["updated daily", "day 23", "auroc"] == pytest.approx(0.799023)
    assert values["refitted daily", "day 22", "cpu_s"] == 3 * len(STAGES)
    assert values["never updated", "day 22", "cpu_s"] == 0
    assert values["oracle", "day 22", "auroc"] == pytest.approx(0.830022)


# ---- every command, once


def test_with_the_commands_of_a_user(tmp_path: Path, capsys) -> None:
    logging.getLogger("benchmarks").setLevel(logging.INFO)
    output = tmp_path / "out"
    flags = ["--days", "4", "--first_days", "2", "--rows_per_day", "400", "--ways", "daily"]
    assert daily.main(["--output", str(output), *flags]) == 0
    said = capsys.readouterr().out
    written = json.loads((tmp_path / "bench" / "daily.json").read_text())
    aurocs = [r["median"] for r in written["results"] if r["metric"] == "auroc"]
    assert len(aurocs) == 2
    assert all(0 < auroc < 1 for auroc in aurocs)
    days = Manifest.read(EtlOutput(output / "daily" / "out").manifest).days
    assert days == {"train": [20, 21], "valid": [22], "test": [22]}
    assert re.search(rf"day 23 +{aurocs[0]:.5f} ", said)
    with pytest.raises(SettingsError):
        daily.DailySettings(ways=())
