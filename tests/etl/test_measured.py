"""Which engine ``auto`` takes after both were measured."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.etl.engines import choice, measured
from nvt_torchrec.etl.engines.measured import (
    Hardware,
    Measurement,
    measurement_file,
    read_measurement,
)
from nvt_torchrec.etl.settings import EtlSettings
from tests.logs import CRITEO


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _remember(hardware: Hardware, **rows_per_s: float) -> None:
    found = Measurement(hardware, "2026-11-22", 1000, rows_per_s)
    measured.FORMAT.write(measurement_file(), dataclasses.asdict(found))


def _auto(tmp_path: Path, **options: object) -> EtlSettings:
    return EtlSettings(str(tmp_path), tmp_path / "out", CRITEO, **options)


@pytest.mark.parametrize("winner", ["cpu", "dask"])
def test_auto_takes_the_faster_engine_and_says_why(
    tmp_path: Path, winner: str, caplog: pytest.LogCaptureFixture
) -> None:
    _remember(Hardware.here(), **{"cpu": 5e5, "dask": 5e5, winner: 1.5e6})
    with caplog.at_level(logging.INFO, "nvt_torchrec.etl"):
        assert choice.resolve(_auto(tmp_path)).engine == winner
    assert f"engine {winner}: measured here on 2026-11-22: cpu" in caplog.text
    assert f"{winner} 1,500,000 rows/s" in caplog.text
    assert choice.resolve(_auto(tmp_path, scheduler="tcp://host:8786")).engine == "dask"
    assert choice.resolve(_auto(tmp_path, engine="cpu")).engine == "cpu"


def test_a_measurement_of_other_hardware_does_not_count(tmp_path: Path) -> None:
    here = Hardware.here()
    for other in (
        dataclasses.replace(here, host="another"),
        dataclasses.replace(here, cores=here.cores + 1),
        dataclasses.replace(here, gpus=here.gpus + 1),
    ):
        _remember(other, cpu=1.0, dask=2.0)
        assert read_measurement() is None
        assert choice.resolve(_auto(tmp_path)).engine == "cpu"


@pytest.mark.parametrize(
    "change", [{"rows_per_s": {"cpu": 1.0}}, {"rows_per_s": {"cpu": 1, "dask": -1}}, {"rows": "x"}]
)
def test_a_damaged_measurement_is_left_out_with_a_remedy(
    tmp_path: Path, change: dict, caplog: pytest.LogCaptureFixture
) -> None:
    _remember(Hardware.here(), cpu=1.0, dask=2.0)
    value = json.loads(measurement_file().read_text())
    measurement_file().write_text(json.dumps(value | change))
    assert choice.resolve(_auto(tmp_path)).engine == "cpu"
    assert "doctor --measure" in caplog.text


def test_both_engines_are_measured_on_the_same_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(measured, "DAY_ROWS", 2000)
    monkeypatch.setattr("nvt_torchrec.etl.commands.doctor.examine", list)
    assert main(["doctor", "--measure", "--seconds", "0.001"]) == 0
    found = read_measurement()
    assert found is not None
    assert found.rows == 3 * 2000
    assert f"auto takes {found.winner}: measured here on" in capsys.readouterr().out
    assert choice.resolve(_auto(tmp_path)).engine == found.winner


def test_an_engine_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "DAY_ROWS", 100)
    monkeypatch.setattr(measured, "ENGINES", ("none",))
    with pytest.raises(BadInputError, match="the none engine fails on a synthetic log"):
        measured.measure(1.0)
    assert not measurement_file().exists()
