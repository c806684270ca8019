"""The cpu engine: one answer for any cut and any number of threads, and the one NVTabular gives."""

from __future__ import annotations

from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, BadRowError
from nvt_torchrec.clicklog.readers.days import find_days
from nvt_torchrec.etl.engines import runs as cpu_runs
from nvt_torchrec.etl.engines.engine import Job, add_up
from nvt_torchrec.etl.units import counting
from nvt_torchrec.etl.units.unit_plan import UnitPlan, make_plan
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.etl.runs import encode, fit
from tests.logs import CRITEO, Reference, random_rows, write_day, write_log


def _settings(examples: int) -> settings:
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=examples, deadline=None, suppress_health_check=checks)


def plan_of(log: Path, spec: FeatureSpec = CRITEO, block_bytes: int = 1 << 20) -> UnitPlan:
    return make_plan(find_days(str(log)), spec, block_bytes=block_bytes)


def vocabulary(fitted: Fitted, name: str) -> tuple[list, list, dict]:
    found = fitted.vocabularies[name]
    return found.values.tolist(), found.counts.tolist(), found.observed


def assert_same(one: Fitted, other: Fitted, *, exactly: bool) -> None:
    assert one.vocabularies.keys() == other.vocabularies.keys()
    for name in one.vocabularies:
        assert vocabulary(one, name) == vocabulary(other, name)
    if exactly:
        assert one.statistics == other.statistics
        return
    assert one.statistics.keys() == other.statistics.keys()
    for name, values in one.statistics.items():
        assert values == pytest.approx(other.statistics[name], rel=1e-12, abs=1e-13)


@_settings(5)
@given(
    rows=st.lists(st.integers(3, 40), min_size=2, max_size=3),
    seed=st.integers(0, 10**6),
    block_bytes=st.sampled_from([1_500, 4_000, 1 << 20]),
    piece_bytes=st.sampled_from([400, 1_500, 8 << 20]),
    workers=st.integers(1, 4),
    fan_in=st.sampled_from([2, 8]),
)
def test_any_cut_and_any_workers(
    tmp_path_factory, rows, seed, block_bytes, piece_bytes, workers, fan_in
) -> None:
    """The reference is plain Python's; one thread, one block give the same, to the last bit."""
    directory = tmp_path_factory.mktemp("log")
    days = write_log(directory / "raw", rows, seed)
    plan = plan_of(directory / "raw", block_bytes=block_bytes)
    whole = fit(plan_of(directory / "raw").train_blocks, CRITEO, directory / "whole", workers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counting, "PIECE_BYTES", piece_bytes)
        patch.setattr(cpu_runs, "FAN_IN", fan_in)
        cut = fit(plan.train_blocks, CRITEO, directory / "cut", workers=workers)
        alone = fit(plan.train_blocks, CRITEO, directory / "alone", workers=1)
        assert_same(cut, alone, exactly=True)
        assert_same(cut, whole, exactly=False)
        reference = Reference([row for day in days[:-1] for row in day])
        for name in CRITEO.categorical_names:
            assert vocabulary(cut, name)[0] == list(reference.ids[name])
        for j, name in enumerate(CRITEO.dense_names):
            expected = {"mean": reference.mean[j], "std": reference.std[j]}
            assert cut.statistics[name] == pytest.approx(expected, rel=1e-12, abs=1e-13)
        write_workflow(directory / "workflow", CRITEO, cut)
        results = encode(plan, directory / "workflow", directory / "cut", workers=workers)
        encode(plan, directory / "workflow", directory / "alone", workers=1)
    assert [result.unit for result in results] == plan.units
    raw = [row for day in days for row in day]
    begin = 0
    for unit, result in zip(plan.units, results, strict=True):
        part = directory / "cut" / "parts" / unit.file
        assert part.read_bytes() == (directory / "alone" / "parts" / unit.file).read_bytes()
        own, begin = raw[begin : begin + result.rows], begin + result.rows
        got, expected = pq.ParquetFile(part).read().to_pydict(), reference.frame(own)
        for name in [CRITEO.label, *CRITEO.categorical_names]:
            assert got[name] == expected[name].tolist()
        for name in CRITEO.dense_names:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-6, atol=1e-6)
        assert result.positives == sum(row[0] == "1" for row in own)
        assert result.oov == [got[name].count(2) for name in CRITEO.categorical_names]
        assert result.null == [got[name].count(1) for name in CRITEO.categorical_names]
    assert begin == len(raw)


def test_row_groups_are_those_of_one_table(tmp_path: Path, monkeypatch) -> None:
    write_log(tmp_path / "raw", [60, 6])
    plan = plan_of(tmp_path / "raw")
    write_workflow(tmp_path / "workflow", CRITEO, fit(plan.train_blocks, CRITEO, tmp_path / "fit"))
    monkeypatch.setattr("nvt_torchrec.etl.units.part_files.ROW_GROUP_ROWS", 25)
    monkeypatch.setattr(counting, "PIECE_BYTES", 2000)
    results = encode(plan, tmp_path / "workflow", tmp_path)
    part = tmp_path / "parts" / plan.units[0].file
    groups = pq.ParquetFile(part).metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [25, 25, 10]
    assert results[0].size == part.stat().st_size


def test_the_first_bad_row_is_named(tmp_path: Path, monkeypatch) -> None:
    days = [random_rows(60, 1), random_rows(40, 2), random_rows(4, 3)]
    days[0][31][4] = "x1"  # line 32
    days[0][33] = ["0", "1"]
    days[1][7][20] = "zz"
    for number, rows in enumerate(days):
        write_day(tmp_path / "raw" / f"day_{number}", rows)
    plan = plan_of(tmp_path / "raw", block_bytes=3000)
    monkeypatch.setattr(counting, "PIECE_BYTES", 700)
    for workers in (1, 4):
        with pytest.raises(BadRowError, match=r"day_0, line 32: .*int_3.*'x1'"):
            fit(plan.train_blocks, CRITEO, tmp_path / f"fit{workers}", workers=workers)


def test_workers_that_write_elsewhere(tmp_path: Path) -> None:
    write_log(tmp_path / "raw", [60, 6])
    blocks = plan_of(tmp_path / "raw").train_blocks
    with pytest.raises(BadInputError, match=r"no counts of 1 of 1 blocks\n.*same path"):
        add_up(Job(CRITEO, tmp_path), blocks, lambda *_: None)
