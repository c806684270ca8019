"""Outputs that days are added to, small, and what must become of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.etl.state.output import EXTENDING_FILE
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from tests.etl.findings import bad
from tests.etl.runs import settings, tree
from tests.logs import random_rows, write_day

#: Few columns, so that a run takes no time; each kind of policy.
SMALL = FeatureSpec(
    label="label",
    dense=(DenseColumn("int_0"), DenseColumn("int_1")),
    categorical=(
        CategoricalColumn("cat_0", hash_buckets=10),
        CategoricalColumn("cat_1", max_table_size=9),
        CategoricalColumn("cat_2", freq_threshold=3),
        CategoricalColumn("cat_3"),
    ),
)


def write_days(raw: Path, rows: dict[int, int], spec: FeatureSpec = SMALL) -> dict[int, list]:
    """Write ``day_<number>`` with so many rows; returns their fields.

    The last column has new values every day; of the one before, some occur twice a day.
    """
    days = {day: random_rows(count, 100 + day, spec) for day, count in rows.items()}
    for day, fields in days.items():
        for i in range(10):
            fields[i][-1] = f"{0xA0000000 + 16 * day + i % 5:08x}"
            fields[i][-2] = f"{0xB0000000 + i % 5:08x}"
        write_day(raw / f"day_{day}", fields)
    return days


def make_base(raw: Path, output: Path, spec: FeatureSpec = SMALL, **options: Any) -> Path:
    """Run the ETL on days 0 to 2."""
    run(settings(raw, output, spec, days=frozenset({0, 1, 2}), **options))
    return output


def copy_of(base: Path, directory: Path) -> Path:
    """A copy that can be extended; the base itself may be used again."""
    shutil.copytree(base, directory / "out", symlinks=True)
    return directory / "out"


def add(output: Path, input_path: Path | str, **options: Any) -> dict[str, Any]:
    """Extend an output; days may be any collection. Returns the manifest."""
    if "days" in options:
        options["days"] = frozenset(options["days"])
    options.setdefault("engine", "dask" if "scheduler" in options else "cpu")
    return extend(ExtendSettings(output_path=output, input_path=str(input_path), **options))


def content(output: Path) -> dict[str, bytes]:
    """The files of an output."""
    return tree(output)


def differences(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """The names of files that differ."""
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def assert_sound(output: Path) -> None:
    """``etl check`` finds nothing wrong."""
    assert bad(output) == []


def refused(output: Path, path: Path | str, match: str, kind=ClickLogError, **options) -> None:
    """Extending raises an error, which has a remedy, and changes nothing."""
    before = content(output)
    with pytest.raises(kind, match=match) as caught:
        add(output, path, **options)
    assert caught.value.remedy
    assert differences(before, content(output)) == []
    assert not (output / EXTENDING_FILE).exists()
