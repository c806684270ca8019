"""The shipped specs, and those that ``etl guess`` writes: from files as published to parquet."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.formats.feature_spec.toml_file import load_spec, shipped_specs
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.workflows.description import inspect
from tests.etl.extended import content, differences
from tests.etl.findings import bad
from tests.etl.runs import etl_run, read_split
from tests.lookalikes.logs import LOGS, Log

NULL_ID, OOV_ID, FIRST_ID = 1, 2, 3
UNKNOWN = "out of vocabulary"


def run(spec: str, path: Path, out: Path, *options: str) -> None:
    assert etl_run(path, out, "--spec", spec, *options) == 0


@pytest.fixture(scope="module", params=LOGS)
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The name of a spec, a log, and the output of the cpu engine."""
    folder = tmp_path_factory.mktemp(request.param)
    log = LOGS[request.param](folder / "raw", 900, 3)
    run(request.param, log.path, folder / "out", "--engine", "cpu")
    return request.param, log, folder / "out"


def vocabulary_of(out: Path, column: str) -> list:
    found = inspect(out / "workflow").vocabularies[column]
    return pq.read_table(out / "workflow" / found.file)[found.name].to_pylist()


def map_in_order(values: list, counts: Counter) -> list:
    """Return values by falling count; ties by value: unsigned integer, or UTF-8 bytes."""
    return sorted(
        values, key=lambda v: (-counts[v], v.encode() if isinstance(v, str) else int(v) % 2**64)
    )


def rows_of(label: list, columns: dict[str, list]) -> list[tuple]:
    return list(zip(label, *(columns[name] for name in sorted(columns)), strict=True))


def test_the_output_holds_the_values_of_the_files(done) -> None:
    name, log, out = done
    assert bad(out) == []
    spec, splits = load_spec(name), [read_split(out, split) for split in SPLITS]
    assert set(spec.dense_names) == set(log.dense)
    assert set(spec.categorical_names) == set(log.categorical)
    expected, found = {}, {}
    for column, values in log.categorical.items():
        vocabulary = vocabulary_of(out, column)
        known = {FIRST_ID + i: value for i, value in enumerate(vocabulary)}
        known |= {NULL_ID: None, OOV_ID: UNKNOWN}
        decoded = [[known[i] for i in split[column]] for split in splits]
        counts = Counter(decoded[0])
        assert map_in_order(vocabulary, counts) == vocabulary
        assert min(counts[value] for value in vocabulary) >= log.threshold
        assert log.threshold or counts[UNKNOWN] == 0
        kept = {None, *vocabulary}
        expected[column] = [value if value in kept else UNKNOWN for value in values]
        found[column] = [value for split in decoded for value in split]
    labels = [int(label) for split in splits for label in split[spec.label]]
    rows, wanted = rows_of(labels, found), rows_of(log.labels, expected)
    assert Counter(rows) == Counter(wanted)
    sizes = tuple(len(split[spec.label]) for split in splits)
    if log.sizes:
        assert sizes == log.sizes
        assert rows == wanted
    elif name not in ("census", "criteo_1tb"):  # cut by files
        assert sizes[1:] == pytest.approx((90, 90), abs=36)
    for column in spec.dense_names:
        compare_dense(log, column, [split[column] for split in splits])


def compare_dense(log: Log, column: str, splits: list[np.ndarray]) -> None:
    """Compare a column, whose mean and deviation in ``train`` are 0 and 1, up to these two."""
    values = np.array([value or 0.0 for value in log.dense[column]])
    if column.startswith(("int_", "capital_")):
        values = np.log(np.maximum(values, -2) + 3)
    found, expected = np.sort(np.concatenate(splits)), np.sort(values)
    scale = np.ptp(found) / np.ptp(expected)
    np.testing.assert_allclose(found, found[0] + (expected - expected[0]) * scale, atol=1e-4)
    assert splits[0].mean() == pytest.approx(0, abs=1e-4)
    assert splits[0].std(ddof=1) == pytest.approx(1, abs=1e-4)


def test_a_cluster_writes_the_same(dask_client, tmp_path: Path) -> None:
    """Of files that decide the splits, with derived columns."""
    log = LOGS["census"](tmp_path / "raw", 900, 3)
    run("census", log.path, tmp_path / "cpu", "--engine", "cpu")
    run("census", log.path, tmp_path / "dask", "--scheduler", dask_client.scheduler.address)
    assert differences(content(tmp_path / "cpu"), content(tmp_path / "dask")) == ["manifest.json"]


@pytest.mark.parametrize("name", LOGS)
def test_a_guessed_spec_is_much_as_the_shipped_one_and_runs(name: str, tmp_path: Path) -> None:
    path = LOGS[name](tmp_path / "raw", 3000, 5).path
    if path.is_dir():
        path = min(path.iterdir())
    out = tmp_path / "out"
    assert main(["guess", str(path), "--output", str(tmp_path / "spec.toml")]) in (0, None)
    spec, shipped = load_spec(tmp_path / "spec.toml"), load_spec(name)
    assert spec.input.delimiter == shipped.input.delimiter
    assert spec.input.header == shipped.input.header
    assert [rule.threshold for rule in spec.label_rules] == [
        rule.threshold for rule in shipped.label_rules
    ]
    if name not in ("criteo_x4", "census"):
        for kind in ("dense", "categorical"):
            guessed, expected = (
                Counter((column.raw, column.derive) for column in getattr(one, kind))
                for one in (spec, shipped)
            )
            if name == "avazu":  # ten days are too few for weekdays
                expected = Counter({k: n for k, n in expected.items() if "weekday" not in str(k)})
            assert guessed == expected
    if name.startswith("criteo_") and not spec.input.header:
        assert spec.is_criteo_format
        assert spec.columns == load_spec("criteo_1tb").columns
    if name == "avazu":
        assert "id: all values are distinct" in (tmp_path / "spec.toml").read_text()
    by_time = dict.fromkeys(("avazu", "movielens", "movielens_latest"), "time")
    assert spec.split.by == {**by_time, "criteo_1tb": "days"}.get(name, "share")
    input_path = path.parent if spec.split.by == "days" else path
    run(str(tmp_path / "spec.toml"), input_path, out, "--engine", "cpu")
    assert bad(out) == []
    assert json.loads((out / "manifest.json").read_text())["rows"]["rejected"] == 0


@pytest.mark.parametrize("name", sorted(set(shipped_specs()) - {"retail"}))
def test_comments_of_a_spec_name_source_and_recipe(name: str) -> None:
    text = shipped_specs()[name].read_text()
    assert "# From https://" in text
    page = (
        Path(__file__).parents[2] / "docs" / "recipes" / text.split("docs/recipes/")[1].split()[0]
    )
    assert f"--spec {name}" in page.read_text() or name == "criteo_1tb"
