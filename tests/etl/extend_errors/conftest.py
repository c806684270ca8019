"""A log of days, an output of the first ones, and a copy that each test may spoil."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.etl.extended import add, copy_of, make_base, write_days

ROWS = {0: 60, 1: 50, 2: 41, 3: 45, 4: 52}


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("log") / "raw"
    write_days(directory, ROWS)
    return directory


@pytest.fixture(scope="module")
def base(raw: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generation 1, of days 0 to 3."""
    output = make_base(raw, tmp_path_factory.mktemp("base") / "out")
    add(output, raw / "day_3")
    return output


@pytest.fixture
def output(base: Path, tmp_path: Path) -> Path:
    return copy_of(base, tmp_path)
