"""More than 64 columns of a kind, from raw rows to scores, against plain Python."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.etl.__main__ import main as main_of_etl
from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.formats.feature_spec import (
    CategoricalColumn,
    DenseColumn,
    FeatureSpec,
    InputFormat,
)
from nvt_torchrec.formats.feature_spec.columns import DENSE_TRANSFORMS
from nvt_torchrec.formats.rows import RawRows, is_missing
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.nvt_loader import KJTLoader
from tests.etl.runs import write_parquet
from tests.inference.test_predictor import trainers_scores
from tests.training.runs import train_here
from tests.workflows.random_specs import Oracle, random_raw_rows

_POLICIES = [
    {}, {"freq_threshold": 2}, {"max_table_size": 6}, {"hash_buckets": 5},
    {"max_table_size": 9, "num_buckets": 3},
]  # fmt: skip
SPEC = FeatureSpec(
    "click",
    tuple(
        DenseColumn(
            f"d{i}",
            fill=i % 3,
            raw="float" if i % 7 == 3 else "int32",
            transform=["", *DENSE_TRANSFORMS][i // 5 % 4],
        )
        for i in range(130)
    ),
    tuple(
        CategoricalColumn(
            f"c{i}",
            raw=("hex32", "int", "string")[i % 3],
            multi_hot=i % 10 == 7,
            **_POLICIES[i // 3 % 5],
        )
        for i in range(200)
    ),
    input=InputFormat("parquet"),
)


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[RawRows]]:
    raw = tmp_path_factory.mktemp("raw")
    days = [random_raw_rows(SPEC, rows, seed) for seed, rows in enumerate((90, 60, 40))]
    for day, rows in enumerate(days):
        write_parquet(raw / f"day_{day}.parquet", SPEC, rows)
    return raw, days


@pytest.fixture(scope="module")
def output(days, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("many") / "out"
    run(EtlSettings(str(days[0]), output, SPEC, engine="cpu", workers=2))
    return output


def _read(output: Path, split: str) -> dict[str, list]:
    root = output / "criteo_binary" / "split" / split
    parts = sorted(root.glob("part.*"), key=lambda path: int(path.name.split(".")[1]))
    return pa.concat_tables(map(pq.read_table, parts)).to_pydict()


def test_parquet_is_what_plain_python_makes(days, output: Path) -> None:
    rows = days[1]
    oracle = Oracle(SPEC, rows[:2])
    first, second, last = map(oracle.transform, rows)
    expected = {
        "train": {name: first[name] + second[name] for name in SPEC.columns},
        "valid": {name: last[name][:20] for name in SPEC.columns},
        "test": {name: last[name][20:] for name in SPEC.columns},
    }
    for split in SPLITS:
        written = _read(output, split)
        assert list(written) == SPEC.columns
        for name, values in written.items():
            if name in SPEC.dense_names:
                np.testing.assert_allclose(values, expected[split][name], rtol=1e-5, atol=1e-6)
            else:
                assert values == expected[split][name], name
    counted = json.loads((output / "manifest.json").read_text())["splits"]["test"]["missing"]
    absent = {
        f"{kind}{j}": int(is_missing(mask, j)[20:].sum())
        for kind, count, mask in (
            ("d", 130, rows[2].dense_missing), ("c", 200, rows[2].categorical_missing)
        )
        for j in range(count)
    }  # fmt: skip
    assert counted == absent
    assert main_of_etl(["check", str(output)]) == 0


def test_loading_training_and_scoring(days, output: Path, tmp_path: Path) -> None:
    split = output / "criteo_binary" / "split"
    rows = _read(output, "valid")
    (batch,) = KJTLoader(split / "valid", 64, device="cpu", virtual_shards=1)
    dense = np.stack([rows[name] for name in SPEC.dense_names], 1)
    np.testing.assert_array_equal(batch.dense_features.numpy(), dense.astype(np.float32))
    features = batch.sparse_features.to_dict()
    for column in SPEC.categorical:
        offsets, values = features[column.name].offsets(), features[column.name].values().tolist()
        ids = [values[a:b] for a, b in pairwise(offsets.tolist())]
        assert ids == [x if column.multi_hot else [x] for x in rows[column.name]], column.name

    train_here(
        f"--binary_path={split}", f"--save_checkpoint_path={tmp_path / 'checkpoint'}", "--adagrad",
        "--dense_bins=0", "--batch_size=64", "--max_steps=2", f"--log_path={tmp_path / 'log'}",
    )  # fmt: skip
    expected = trainers_scores(split, tmp_path / "checkpoint")
    predictor = Predictor.load(output / "workflow", tmp_path / "checkpoint")
    table = pq.read_table(days[0] / "day_2.parquet").drop_columns([SPEC.label])
    np.testing.assert_allclose(predictor.predict(table.to_pylist()), expected, atol=1e-6)
    np.testing.assert_allclose(predictor.predict(table.to_pydict()), expected, atol=1e-6)


def test_the_report_folds_many_columns(days, output: Path) -> None:
    page = (output / "report.html").read_text()
    assert re.findall("<summary>(.*?)</summary>", page) == [
        "All 330 columns", "All 330 columns", "All 130 columns", "All 200 columns",
        "All 200 vocabularies",
    ]  # fmt: skip
    assert page.count("<details>") == page.count("</details>") == 5
