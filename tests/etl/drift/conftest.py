"""The log and its output that the tests of drift share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.etl.drift.days import make_log


@pytest.fixture(scope="package")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Days 0 to 3 in ``raw``, and the output of days 0 to 2 in ``out``."""
    return make_log(tmp_path_factory.mktemp("drift"))


@pytest.fixture(scope="package")
def day(log: Path) -> Path:
    """The new day."""
    return log / "raw" / "day_3"
