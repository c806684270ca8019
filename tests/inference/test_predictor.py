"""The Predictor: every form of rows, every raw type, beside NVTabular's Workflow and TorchRec."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.inference.predictor import MODEL_ROWS, Predictor
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.workflows import compiled
from tests.inference.conftest import Trained
from tests.inference.reference import make_scorer, scores, to_serve
from tests.logs import CRITEO, random_rows
from tests.training.runs import model_of, score
from tests.workflows.random_specs import examples, feature_specs
from tests.workflows.test_compiled import odd_rows, save

_CONVERT = {"int32": int, "int": int, "float": float}


def read_dicts(path: Path, spec) -> list[dict]:
    """The rows of a CSV file as JSON would bring them."""
    rows = []
    for row in csv.DictReader(path.open()):
        for column in (*spec.dense, *spec.categorical):
            text = row[column.name]
            convert = _CONVERT.get(column.raw, str)
            if getattr(column, "multi_hot", False):
                row[column.name] = [convert(item) for item in text.split("|") if item]
            else:
                row[column.name] = convert(text) if text else None
        row[spec.label] = int(row[spec.label])
        rows.append(row)
    return rows


def criteo_dicts(rows: list[list[str]]) -> list[dict]:
    """Raw fields as JSON would bring them: counts as numbers, categories as their digits."""
    result = []
    for fields in rows:
        row = dict(zip(CRITEO.columns, fields, strict=True))
        for name in CRITEO.dense_names:
            row[name] = int(row[name]) if row[name] else None
        result.append(row)
    return result


def trainers_scores(parquet: Path, checkpoint: Path) -> np.ndarray:
    """What training's evaluation makes of the last day: loader, checkpoint, TorchRec's model."""
    model = model_of(checkpoint)
    logits = [
        score(model, KJTLoader(parquet / split, 50, device="cpu", virtual_shards=1))[0]
        for split in ("valid", "test")
    ]
    return 1 / (1 + np.exp(-np.concatenate(logits)))


def test_raw_criteo_rows_score_as_in_training(trained: Trained, predictor: Predictor) -> None:
    expected = trainers_scores(trained.parquet, trained.checkpoint)
    assert np.ptp(expected) > 0.1  # the model says something
    rows = criteo_dicts(trained.days[2])
    got = predictor.predict(rows)
    assert got.dtype == np.float32
    assert got.shape == (201,)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    numbers = [
        {k: int(v, 16) if k.startswith("cat") and v else v or None for k, v in row.items()}
        for row in rows
    ]
    np.testing.assert_array_equal(predictor.predict(numbers), got)
    np.testing.assert_array_equal(predictor.predict(trained.raw / "day_2"), got)
    alone = [predictor.predict([row])[0] for row in rows]
    np.testing.assert_allclose(alone, got, atol=1e-6)


def test_rows_of_every_raw_type_score_as_in_training(
    shop: Trained, shop_predictor: Predictor, tmp_path: Path
) -> None:
    """Strings, lists, prices; a checkpoint of two ranks; every container rows may come in."""
    expected = trainers_scores(shop.parquet, shop.checkpoint)
    assert np.ptp(expected) > 0.1
    file = shop.raw / "day_2.csv"
    rows = read_dicts(file, shop_predictor.spec)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    frame = pd.DataFrame(columns)
    table = pa.Table.from_pandas(frame)
    pq.write_table(table, tmp_path / "rows.parquet")
    for form in (
        rows,
        columns,
        {name: np.array(values, object) for name, values in columns.items()},
        frame,
        frame.convert_dtypes(),
        frame.astype({"country": "category"}),
        table,
        table.combine_chunks().to_batches()[0],
        file,
        str(tmp_path / "rows.parquet"),
    ):
        got = shop_predictor.predict(form)
        np.testing.assert_allclose(got, expected, atol=1e-6, err_msg=str(type(form)))
    assert any(row["recent_products"] == [] for row in rows)
    assert any(row["price"] is None for row in rows)


@examples(25)
@given(spec=feature_specs(), seed=st.integers(0, 2**31), count=st.integers(1, 20))
def test_any_spec_scores_as_nvtabular_and_torchrec(
    spec, seed: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unseen, missing and odd values of all raw types, lists, shared and hashed columns."""
    assume(spec.dense)
    rng = np.random.default_rng(seed)
    path = tmp_path_factory.mktemp("any") / "workflow"
    save(path, spec, rng)
    rows = odd_rows(spec, count, rng)
    workflow = compiled.load(path)
    scorer, config = make_scorer(workflow.schema, seed)
    model = to_serve(scorer, config)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = scores(scorer, path, dataclasses.replace(rows))
        if not np.isfinite(expected).all():  # of dense values near the largest
            with pytest.raises(InvalidRowError, match=f"row {np.isfinite(expected).argmin()}: "):
                Predictor(workflow, model).predict_rows(rows)
            return
        got = Predictor(workflow, model).predict_rows(rows)
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_more_rows_than_go_through_the_model_at_once(
    shop: Trained, shop_predictor: Predictor, predictor: Predictor
) -> None:
    rows = read_dicts(shop.raw / "day_2.csv", shop_predictor.spec)
    times = 2 * MODEL_ROWS // len(rows) + 1
    once = shop_predictor.predict(rows)
    got = shop_predictor.predict(pa.Table.from_pandas(pd.DataFrame(rows * times)))
    np.testing.assert_allclose(got, np.tile(once, times), atol=1e-6)
    assert shop_predictor.predict([]).shape == (0,)
    assert predictor.predict([]).shape == (0,)
    assert predictor.predict(pd.DataFrame(columns=CRITEO.columns[1:])).shape == (0,)


def test_order_of_columns_and_columns_more(predictor: Predictor) -> None:
    rows = criteo_dicts(random_rows(30, 7))
    expected = predictor.predict(rows)
    other = [
        {"more": object(), **dict(sorted(row.items(), reverse=True)), "label": "x"} for row in rows
    ]
    np.testing.assert_array_equal(predictor.predict(other), expected)
    frame = pd.DataFrame(rows)[CRITEO.columns[:0:-1]].assign(more=1)
    np.testing.assert_array_equal(predictor.predict(frame), expected)


def test_missing_columns_are_named(predictor: Predictor) -> None:
    rows = criteo_dicts(random_rows(3, 7))
    frame = pd.DataFrame(rows)
    with pytest.raises(SchemaError, match="no column int_3, cat_9") as error:
        predictor.predict(frame.drop(columns=["cat_9", "int_3"]))
    assert "did you mean" not in error.value.remedy  # another column of the spec
    with pytest.raises(SchemaError, match=r"no column cat_9\n.*did you mean 'CAT_9'"):
        predictor.predict(frame.rename(columns={"cat_9": "CAT_9"}))
    del rows[2]["cat_9"]
    for few_or_many in (rows, rows * 50):
        with pytest.raises(SchemaError, match=r"row 2 has no column cat_9\n.*null"):
            predictor.predict(few_or_many)
    with pytest.raises(SchemaError, match="column cat_0 has 2 rows, column int_0 3"):
        predictor.predict({**dict(frame.items()), "cat_0": ["1", "2"]})
    with pytest.raises(SchemaError, match="'1' is not a column"):
        predictor.predict({**dict(frame.items()), "cat_0": "1"})
    with pytest.raises(SchemaError, match="rows of type int"):
        predictor.predict(3)


def test_what_is_no_bundle(trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"a saved workflow, not a bundle\n.*checkpoint"):
        Predictor.load(trained.workflow)
    with pytest.raises(BadInputError, match=r"bundle.json: no such file"):
        Predictor.load(tmp_path)
    with pytest.raises(BadInputError, match=r"metadata.json: no such file"):
        Predictor.load(tmp_path, trained.checkpoint)
    with pytest.raises(BadInputError, match="no such checkpoint"):
        Predictor.load(trained.workflow, tmp_path / "none")
