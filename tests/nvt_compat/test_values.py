"""Every operator of ``workflows``, and those whose values were wrong, against plain pandas."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import dask.dataframe as dd
import numpy as np
import nvtabular
import pandas as pd
import pytest
from nvtabular import ops

from nvt_torchrec.formats.schema import TableSchema


@pytest.fixture
def without_client():
    """No Dask client, where Merlin would find the session's cluster."""
    from merlin.core.utils import set_dask_client

    set_dask_client(None)
    try:
        yield
    finally:
        set_dask_client("auto")


@pytest.fixture(params=["synchronous", "distributed"])
def client(request: pytest.FixtureRequest):
    """Without a Dask client, and with one."""
    if request.param == "synchronous":
        yield request.getfixturevalue("without_client")
    else:
        with request.getfixturevalue("dask_client").as_current() as current:
            yield current


def _fit_transform(node, frame: pd.DataFrame, partitions: int = 3) -> pd.DataFrame:
    ddf = dd.from_pandas(frame, npartitions=partitions, sort=False)
    dataset = nvtabular.Dataset(ddf, cpu=True)
    workflow = nvtabular.Workflow(node)
    workflow.fit(dataset)
    result = workflow.transform(dataset).to_ddf().compute().reset_index(drop=True)
    # one frame at a time must give the same as a Dataset
    pd.testing.assert_frame_equal(workflow.transform(frame), result, check_like=True)
    return result


def _column(rows: int = 200, seed: int = 0, missing: float = 0.2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    values = (rng.zipf(1.4, rows) % 40).astype(float)
    values[rng.random(rows) < missing] = np.nan
    return values


def _expected_ids(values, *, threshold=0, keep=None) -> list[int]:
    counts = Counter(v for v in values if not np.isnan(v))
    vocabulary = [
        v for v in sorted(counts, key=lambda v: (-counts[v], v)) if counts[v] >= threshold
    ][:keep]
    ids = {v: 3 + i for i, v in enumerate(vocabulary)}
    return [1 if np.isnan(v) else ids.get(v, 2) for v in values]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"freq_threshold": 4}, {"threshold": 4}),
        ({"max_size": 10}, {"keep": 7}),
        ({"max_size": 1000}, {}),
    ],
)
def test_categorify(client, tmp_path: Path, options: dict, expected: dict) -> None:
    values = _column()
    node = ["c"] >> ops.Categorify(out_path=str(tmp_path), dtype=np.dtype("int32"), **options)
    result = _fit_transform(node, pd.DataFrame({"c": values}))
    assert result["c"].tolist() == _expected_ids(values, **expected)
    assert result["c"].dtype == np.int32


def test_a_combination_with_a_null_comes_first(tmp_path: Path) -> None:
    """Of combinations that are equally frequent."""
    frame = pd.DataFrame({"a": [None, "E", "B"], "b": ["C", "B", "A"]})
    node = nvtabular.ColumnSelector([("a", "b")]) >> ops.Categorify(
        encode_type="combo", out_path=str(tmp_path)
    )
    workflow = nvtabular.Workflow(node)
    workflow.fit(nvtabular.Dataset(frame, cpu=True))
    assert workflow.transform(frame)["a_b"].tolist() == [3, 5, 4]


def test_a_joint_vocabulary_names_its_columns_domain(tmp_path: Path) -> None:
    """By which a schema of NVTabular says that they have one table (formats.schema)."""
    frame = pd.DataFrame({"a": [1, 2], "b": [2, 3], "c": [1, 1]})
    joint = [("a", "b"), "c"] >> ops.Categorify(out_path=str(tmp_path))
    data = nvtabular.Workflow(joint).fit_transform(nvtabular.Dataset(frame, cpu=True))
    data.to_parquet(str(tmp_path / "data"))
    value = json.loads((tmp_path / "data" / ".merlin" / "schema.json").read_text())
    label = {"name": "y", "annotation": {"tag": ["target"]}}
    schema = TableSchema.from_dict({"feature": [label, *value["feature"]]}, "")
    domains = dict(zip(schema.categorical, schema.vocabularies, strict=True))
    assert domains == {"a": "a_b", "b": "a_b", "c": "c"}


_WORDS = [None if np.isnan(value) else f"é{value:02.0f}" for value in _column(300)]


@pytest.mark.parametrize(
    "values",
    [
        _column(300, missing=0.0),
        _column(300),
        pd.Series(_WORDS, dtype=object),
        np.full(20, np.nan),
        [np.array([5, 7]), np.array([], int), np.array([7])] * 4,
    ],
    ids=["integers", "nulls", "strings", "only nulls", "lists"],
)
@pytest.mark.parametrize(
    "options", [{}, {"freq_threshold": 4}, {"max_size": 12, "num_buckets": 3}], ids=str
)
def test_a_vocabulary_in_several_files_is_that_of_one(
    tmp_path: Path, without_client, values, options: dict
) -> None:
    """Ids, table size and what NVTabular says of the ids in meta.c.parquet."""
    frame = pd.DataFrame({"c": values})
    found = []
    for files in (1, 3):
        path = tmp_path / str(files)
        node = ["c"] >> ops.Categorify(out_path=str(path), split_out=files, **options)
        workflow = nvtabular.Workflow(node)
        workflow.fit(nvtabular.Dataset(dd.from_pandas(frame, npartitions=3, sort=False), cpu=True))
        found.append(
            {
                "ids": [np.asarray(ids).tolist() for ids in workflow.transform(frame)["c"]],
                "meta": pd.read_parquet(path / "categories" / "meta.c.parquet").to_dict("list"),
                "size": workflow.output_schema["c"].properties["embedding_sizes"],
            }
        )
    assert found[0] == found[1]


def test_categorify_all_null_partition_and_column(client, tmp_path: Path) -> None:
    values = np.array([np.nan] * 10 + [7.0, 7.0, 8.0] + [np.nan] * 7)
    frame = pd.DataFrame({"c": values, "empty": np.full(20, np.nan)})
    node = ["c", "empty"] >> ops.Categorify(out_path=str(tmp_path))
    result = _fit_transform(node, frame, partitions=4)
    assert result["c"].tolist() == [1] * 10 + [3, 3, 4] + [1] * 7
    assert result["empty"].tolist() == [1] * 20


def test_categorify_integers_without_nulls_meet_floats_with(tmp_path: Path) -> None:
    """A vocabulary of integers encodes a column with missing values."""
    node = ["c"] >> ops.Categorify(out_path=str(tmp_path))
    workflow = nvtabular.Workflow(node)
    workflow.fit(nvtabular.Dataset(pd.DataFrame({"c": np.array([5, 5, 2**32 - 1])}), cpu=True))
    frame = pd.DataFrame({"c": [np.nan, 2.0**32 - 1, 5.0, 6.0]})
    assert workflow.transform(frame)["c"].tolist() == [1, 4, 3, 2]


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(1).integers(0, 2**31, 5000).astype(float),
        # large beside their spread: a difference of sums of squares would be noise
        1.6e9 + np.arange(5000.0) % 10,
        np.full(200_000, np.log(3.0)),
        np.where(np.arange(5000) < 4000, np.nan, 1e8 + np.arange(5000.0)),
    ],
)
def test_statistics_are_exact_to_float64(client, values: np.ndarray) -> None:
    workflow = nvtabular.Workflow(["x"] >> (normalize := ops.Normalize()))
    ddf = dd.from_pandas(pd.DataFrame({"x": values}), npartitions=7)
    workflow.fit(nvtabular.Dataset(ddf, cpu=True))
    present = values[~np.isnan(values)]
    mean = math.fsum(present) / len(present)
    variance = math.fsum((present - mean) ** 2) / (len(present) - 1)
    constant = np.ptp(present) == 0
    np.testing.assert_allclose(normalize.means["x"], mean, rtol=1e-14)
    np.testing.assert_allclose(
        normalize.stds["x"], 0.0 if constant else math.sqrt(variance), rtol=1e-12
    )
