"""The shipped specs: from the raw files as published to parquet, by a spec alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.recipes.lookalikes import LOOKALIKES
from nvt_torchrec import workflows
from nvt_torchrec.etl.__main__ import main
from nvt_torchrec.formats.spec.toml_file import load_spec, shipped_specs
from tests.lookalikes.plain_python import READERS, Log, Row, dense_columns, encode, vocabularies

SPLITS = ("train", "valid", "test")
ROWS = 900


def read_split(out: Path, split: str) -> dict[str, np.ndarray]:
    folder = out / "criteo_binary" / "split" / split
    parts = sorted(folder.glob("part.*.parquet"), key=lambda part: int(part.name.split(".")[1]))
    columns = [pq.read_table(part).to_pydict() for part in parts]
    return {name: np.concatenate([part[name] for part in columns]) for name in columns[0]}


def run(name: str, path: Path, out: Path, options: list[str]) -> None:
    arguments = ["--input_path", str(path), "--output_path", str(out), "--spec", name, *options]
    assert main(["run", *arguments]) == 0


@pytest.fixture(scope="module", params=READERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The name of a spec, and the raw files."""
    folder = tmp_path_factory.mktemp(request.param) / "raw"
    folder.mkdir()
    return request.param, LOOKALIKES[request.param](folder, ROWS, 3)


@pytest.fixture(scope="module", params=["cpu", "dask"])
def done(made, request, tmp_path_factory: pytest.TempPathFactory):
    """The raw files and the output of an engine."""
    name, path = made
    out = tmp_path_factory.mktemp("out") / "out"
    options = ["--engine", "cpu"]
    if request.param == "dask":
        options = ["--scheduler", request.getfixturevalue("dask_client").scheduler.address]
    run(name, path, out, options)
    return name, path, out


def placed(log: Log, data: dict[str, dict[str, np.ndarray]], ids: list, label: str) -> list[str]:
    """Return the split of each row of the log.

    Rows are in the order of the log in each split, so that the splits are merged like sorted
    lists; where a row could be in two of them, both are followed.
    """
    written = {
        split: list(
            zip(
                data[split][label].astype(int).tolist(),
                *(data[split][name].tolist() for name in log.categories),
                strict=True,
            )
        )
        for split in SPLITS
    }
    bounds = bounds_of_times(log, {split: len(written[split]) for split in SPLITS})
    states: dict[tuple[int, int, int], tuple | None] = {(0, 0, 0): None}
    history = []
    for i, row in enumerate(log.rows):
        wanted = (row.label, *encode(row, ids))
        following: dict[tuple[int, int, int], tuple | None] = {}
        for state in states:
            for k, split in enumerate(SPLITS):
                there = state[k] < len(written[split]) and written[split][state[k]] == wanted
                if there and split in row.split and split in bounds(i, row):
                    after = (*state[:k], state[k] + 1, *state[k + 1 :])
                    following[after] = (state, split)
        assert following, f"row {i} is in no split where it should be: {row}"
        history.append(following)
        states = following
    state = tuple(len(written[split]) for split in SPLITS)
    assert sum(state) == len(log.rows)
    assert state in states
    result = []
    for step in reversed(history):
        state, split = step[state]
        result.append(split)
    return result[::-1]


def bounds_of_times(log: Log, sizes: dict[str, int]):
    """Return a function from a row's number and row to the splits in which it may be."""
    if log.split == "order":
        valid, test = sizes["train"], sizes["train"] + sizes["valid"]
        return lambda i, row: (SPLITS[(i >= valid) + (i >= test)],)
    if log.split == "time":
        times = sorted(row.time for row in log.rows)
        valid, test = times[sizes["train"]], times[sizes["train"] + sizes["valid"]]
        return lambda i, row: (SPLITS[(row.time >= valid) + (row.time >= test)],)
    return lambda i, row: SPLITS


def test_output_is_that_of_plain_python(done) -> None:
    name, path, out = done
    log, spec = READERS[name](path), load_spec(name)
    assert (spec.dense_names, spec.categorical_names) == (log.dense, log.categories)
    data = {split: read_split(out, split) for split in SPLITS}
    description = workflows.inspect(out / "workflow")
    fitted = fitted_ids(log, out)
    splits = placed(log, data, fitted, spec.label)
    rows: dict[str, list[Row]] = {
        split: [row for row, own in zip(log.rows, splits, strict=True) if own == split]
        for split in SPLITS
    }
    shares = {split: len(rows[split]) / len(log.rows) for split in SPLITS}
    if log.split in ("share", "time"):
        assert shares["valid"] == pytest.approx(0.1, abs=0.04)
        assert shares["test"] == pytest.approx(0.1, abs=0.04)
    ids = vocabularies(log, rows["train"])
    assert ids == fitted
    for column, own in zip(log.categories, ids, strict=True):
        assert description.vocabularies[column].values == len(own)
    for split in SPLITS:
        wanted = dense_columns(log, rows[split], rows["train"])
        for column, values in zip(log.dense, wanted, strict=True):
            np.testing.assert_allclose(data[split][column], values, rtol=1e-5, atol=1e-5)
        encoded = [encode(row, ids) for row in rows[split]]
        for j, column in enumerate(log.categories):
            assert data[split][column].tolist() == [row[j] for row in encoded]


def fitted_ids(log: Log, out: Path) -> list[dict]:
    """Return the ids of all values of the log by the saved workflow: those that it does not know
    are left out."""
    import pyarrow as pa

    from nvt_torchrec.workflows.compiled import workflow as compiled

    saved = compiled.load(out / "workflow")
    result = []
    for j, column in enumerate(log.categories):
        values = list(dict.fromkeys(row.categories[j] for row in log.rows))
        values = [value for value in values if value is not None]
        texts = bool(values) and isinstance(values[0], str)
        cells = pa.array(values) if texts else np.array(values, np.int64)
        places = saved.find(column, cells).tolist()
        known = sorted(
            (place, value) for place, value in zip(places, values, strict=True) if place >= 0
        )
        assert [place for place, _ in known] == list(range(len(known)))
        result.append({value: 3 + place for place, value in known})
    return result


def test_check_finds_nothing(done, capsys: pytest.CaptureFixture) -> None:
    _, _, out = done
    assert main(["check", str(out)]) == 0
    assert "no problems found" in capsys.readouterr().out


def test_both_engines_write_the_same(made, dask_client, tmp_path: Path) -> None:
    name, path = made
    for engine in (["--engine", "cpu"], ["--scheduler", dask_client.scheduler.address]):
        run(name, path, tmp_path / engine[0], engine)
    one, other = (tmp_path / option for option in ("--engine", "--scheduler"))
    files = [file.relative_to(one) for file in (one / "workflow").rglob("*") if file.is_file()]
    parts = [file.relative_to(one) for file in (one / "criteo_binary").rglob("part.*.parquet")]
    assert len(parts) >= 3
    for file in files + parts:
        assert (one / file).read_bytes() == (other / file).read_bytes(), file


@pytest.mark.parametrize("name", sorted(shipped_specs()))
def test_comments_of_a_spec_name_source_and_recipe(name: str) -> None:
    text = shipped_specs()[name].read_text()
    root = Path(__file__).parents[2]
    if name == "retail":
        assert "synthetic" in text
        return
    assert "# From https://" in text
    page = text.split("docs/recipes/")[1].split()[0]
    assert (
        f"--spec {name}" in (root / "docs" / "recipes" / page).read_text() or name == "criteo_1tb"
    )
