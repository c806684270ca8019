"""The log and its output that tests of the ETL share, and the engines that they run with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from tests.etl.event_logs import BY_DAYS, DAY, make_rows, spec_of, write
from tests.etl.runs import settings
from tests.logs import ROWS, write_log


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list]:
    """Days of Criteo's format and the fields of their rows; nothing is written there."""
    raw = tmp_path_factory.mktemp("log") / "raw"
    return raw, write_log(raw, ROWS)


@pytest.fixture(scope="session")
def raw(log: tuple[Path, list]) -> Path:
    return log[0]


@pytest.fixture(scope="session")
def done(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the cpu engine makes of the log; nothing is written there either."""
    output = tmp_path_factory.mktemp("etl") / "out"
    run(settings(raw, output))
    return output


@pytest.fixture(scope="session")
def event_outputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A log of three days, and what a run makes of it; nothing is written there."""
    root = tmp_path_factory.mktemp("events")
    (root / "log").mkdir()
    for day in range(3):
        rows = make_rows(400, 3, seed=4)
        write(root / f"log/day_{day}.csv", [r for r in rows if r.time // DAY == day])
    spec = spec_of(root, BY_DAYS, 'known = "1h"')
    run(EtlSettings(str(root / "log"), root / "out", spec, engine="cpu", workers=1))
    return root / "log", root / "out"


@pytest.fixture(scope="session")
def engine_options(request: pytest.FixtureRequest) -> Callable[[str], dict]:
    """Make the settings of a run with an engine, by its name."""

    def options(engine: str) -> dict:
        if engine == "cpu":
            return {"engine": engine}
        address = request.getfixturevalue("dask_client").scheduler.address
        return {"engine": engine, "scheduler": address}

    return options
