"""Rows that have vectors: those of the tables beside the workflow, or of their own."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.encoder import MANY_ROWS, Encoder
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.export.triton import export_triton
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.model.scoring import ServingModel
from nvt_torchrec.inference.named_tensors import list_inputs, list_inputs_without_tables, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.publish.trial import try_bundle
from nvt_torchrec.inference.scorer import Scorer
from nvt_torchrec.inference.server.bodies import RefusedError, parse_body
from nvt_torchrec.inference.server.protocol import describe_model, parse_tensors
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.models.config import OwnModel
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.head import build_head
from nvt_torchrec.models.onnx_head import OnnxHead
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.workflows.inspection import report
from tests.etl.runs import read_split
from tests.etl.vector_logs import (
    DAY,
    expected_vectors,
    make_items,
    make_rows,
    read_rows,
    read_vectors,
    write_days,
    write_items,
    write_log,
)
from tests.inference.bundles import make_origin
from tests.inference.exported import score
from tests.inference.serving import request_of
from tests.inference.vector_shops import (
    HOUR,
    TEXT,
    VectorShop,
    load_daily_spec,
    make_model,
    make_vector_shop,
    request_row,
)

HEADERS = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> VectorShop:
    return make_vector_shop(tmp_path_factory.mktemp("shop"))


def ask(shop: VectorShop, body: dict[str, Any], parse: Any = parse_body) -> np.ndarray:
    """Return what the server answers."""
    content = bytearray(json.dumps(body).encode())
    encoded, _ = parse(content, HEADERS, shop.predictor, ServerSettings())
    return shop.predictor.predict_parts([encoded])[:, 0]


# ---- vectors of tables


def test_rows_have_the_vectors_that_the_etl_wrote(shop: VectorShop) -> None:
    """One by one, a few, many, and as a frame."""
    encoder = Encoder.load(shop.output / "workflow")
    expected = read_vectors(shop.output, read_rows(shop.output))
    assert {*expected[:, 3]} == {*expected[:, 6]} == {0, 1}
    requests = shop.requests
    assert len(requests) > MANY_ROWS
    forms = {"many": requests, "frame": pd.DataFrame(requests), "few": requests[:50]}
    for form, rows in forms.items():
        dense, ids, vectors = encoder.encode_with_vectors(rows)
        np.testing.assert_array_equal(vectors, expected[: len(rows)], err_msg=form)
        assert len(dense) == len(rows) == ids.stride()
    for row, vector in zip(requests[:20], expected[:20], strict=True):
        np.testing.assert_array_equal(encoder.encode_with_vectors([row])[2], [vector])
    with pytest.raises(SchemaError, match=r"text, image(.|\n)*encode_with_vectors"):
        encoder.encode(requests[:2])


def test_scores_are_those_of_the_training(shop: VectorShop, tmp_path: Path) -> None:
    """Of rows in memory, of a file, and of rows that were encoded."""
    batches = []
    for split in SPLITS:
        loader = KJTLoader(
            shop.output / "criteo_binary/split" / split, 50, device="cpu", read_vectors=True,
            shuffle=False, virtual_shards=1,
        )  # fmt: skip
        batches += list(loader)
    logits = [shop.model(b.dense_features, b.sparse_features, b.dense_vectors) for b in batches]
    expected = torch.sigmoid(torch.cat(logits))[:, 0].numpy()
    got = shop.predictor.predict(shop.requests)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    write_log(tmp_path / "rows.csv", shop.rows)
    np.testing.assert_allclose(shop.predictor.predict(tmp_path / "rows.csv"), got, atol=1e-7)

    scorer = Scorer(shop.predictor)
    encoded = Encoder(shop.predictor.workflow).encode_with_vectors(shop.requests)
    np.testing.assert_allclose(scorer.predict(*encoded), got, atol=1e-7)
    dense, ids, vectors = encoded
    with pytest.raises(SchemaError, match=r"no dense_vectors(.|\n)*the 7 inputs of text, image"):
        scorer.predict(dense, ids)
    with pytest.raises(SchemaError, match=r"shape \[400, 6\]"):
        scorer.predict(dense, ids, vectors[:, 1:])
    vectors[3, 2] = np.inf
    with pytest.raises(InvalidRowError, match="row 3: input 2 of dense_vectors is inf"):
        scorer.predict(dense, ids, vectors)


def test_many_rows_are_gathered_in_parts(shop: VectorShop, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = shop.predictor.predict(shop.requests)
    monkeypatch.setattr("nvt_torchrec.inference.predictor._MAX_VALUES", 7 * 30)
    small = Predictor(shop.predictor.workflow, shop.predictor.model)
    given = [row | {"text": TEXT} for row in shop.requests]
    np.testing.assert_allclose(small.predict(shop.requests), expected, atol=1e-7)
    np.testing.assert_allclose(small.predict(given), shop.predictor.predict(given), atol=1e-7)


# ---- vectors that rows hold


def test_vectors_that_a_caller_gives_go_before(shop: VectorShop) -> None:
    rows = shop.rows[:60]
    requests = [request_row(row) for row in rows]
    known = shop.predictor.predict(requests)
    complete = shop.complete(rows)
    np.testing.assert_array_equal(shop.predictor.predict(complete), known)
    # each alone; others are those of the table
    for name in ("text", "image"):
        own = [{**row, name: full[name]} for row, full in zip(requests, complete, strict=True)]
        np.testing.assert_array_equal(shop.predictor.predict(own), known)
        without = [{**row, name: None} for row in requests]
        expected = [{**full, name: None} for full in complete]
        scores = shop.predictor.predict(without)
        np.testing.assert_array_equal(scores, shop.predictor.predict(expected))
        assert (scores != known).mean() > 0.3
    given = [{**row, "text": TEXT} for row in requests]
    scores = shop.predictor.predict(given)
    expected = [{**full, "text": TEXT} for full in complete]
    np.testing.assert_array_equal(scores, shop.predictor.predict(expected))
    np.testing.assert_array_equal(shop.predictor.predict(requests, shared={"text": TEXT}), scores)
    # without a key of the table, if nothing else is read from it
    free = [{**row, "item": None, "price": 1.0, "image": None, "text": TEXT} for row in requests]
    assert len({*shop.predictor.predict(free).tolist()}) > 1


def test_forms_of_vectors(shop: VectorShop) -> None:
    rows = shop.complete(shop.rows[:30])
    expected = shop.predictor.predict(rows)
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    image = pa.array(columns["image"], pa.list_(pa.float32()))
    frame = pd.DataFrame(columns)
    forms: dict[str, Any] = {
        "empty lists": [{**row, "text": row["text"] or []} for row in rows],
        "tuples": [{**row, "text": tuple(row["text"] or ())} for row in rows],
        "columns": columns,
        "frame": frame,
        "arrays": frame.assign(text=[np.array(v) if v else None for v in columns["text"]]),
        "lists": pa.table({**columns, "image": image}),
        "half": pa.table({**columns, "image": image.cast(pa.list_(pa.float16()))}),
        "fixed": pa.table({**columns, "image": image.cast(pa.list_(pa.float64(), 2))}),
        "slice": pa.concat_tables([pa.table({**columns, "image": image})] * 2)[30:],
    }
    for form, given in forms.items():
        np.testing.assert_array_equal(shop.predictor.predict(given), expected, err_msg=form)
    integers = [{**row, "text": [1, 2, 3]} for row in rows]
    scores = shop.predictor.predict(integers)
    matrix = columns | {"text": np.array([[1, 2, 3]] * 30)}
    np.testing.assert_array_equal(shop.predictor.predict(matrix), scores)
    tensors = [{**row, "text": torch.tensor([1.0, 2, 3])} for row in rows]
    np.testing.assert_array_equal(shop.predictor.predict(tensors), scores)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([1, 2], "a list of 2: expected a list of 3 numbers"),
        ([1] * 10_000, "a list of 10000: expected a list of 3 numbers"),
        ([1, "2", 3], "its item 1 is '2': expected a list of 3 numbers"),
        ([1, None, 3], "its item 1 is None"),
        ([1, True, 3], "its item 1 is True"),
        ([1, 2, float("nan")], "its item 2 is nan: expected finite numbers"),
        ([1, 2, float("-inf")], "its item 2 is -inf: expected finite numbers"),
        ([1, 2, 1e39], "its item 2 is 1e+39: expected finite numbers that float32 holds"),
        ([1, 2, 10**400], "a number beyond float32"),
        ([[1], [2], [3]], "its item 0 is [1]"),
        ("1|2|3", "'1|2|3': expected a list of 3 numbers"),
        (7, "7: expected a list of 3 numbers"),
        ({"a": 1}, "{'a': 1}: expected a list of 3 numbers"),
        (np.ones((1, 3)), "expected a list of 3 numbers"),
        (np.array(["a", "b", "c"]), "values of <U1"),
    ],
)
@pytest.mark.parametrize("count", [3, MANY_ROWS])
def test_values_that_are_no_vectors(shop: VectorShop, value: Any, reason: str, count: int) -> None:
    rows = [{**row, "text": TEXT} for row in shop.requests[:count]]
    rows[2]["text"] = value
    for given in (rows, {name: [row[name] for row in rows] for name in rows[0]}):
        with pytest.raises(InvalidRowError) as caught:
            shop.predictor.predict(given)
        assert (caught.value.row, caught.value.column) == (2, "text")
        assert reason in caught.value.reason
        assert "3 numbers, as in column embedding of table items" in caught.value.remedy


def test_columns_that_are_no_vectors(shop: VectorShop) -> None:
    rows = pa.Table.from_pylist(shop.requests[:3])
    for values, message in (
        (pa.array([[1.0, 2, 3], None, [1, 2]]), "row 2, column text: a list of 2"),
        (pa.array([[1.0, 2, 3], None, [1, None, 2]]), "row 2, column text: its item 1 is null"),
        (pa.array([[1.0, 2, 3], None, [1, 2, np.nan]]), "row 2, column text: its item 2 is nan"),
        (pa.array([None, "", "1|2|3"]), "row 1, column text: ''"),
        (pa.array([["a"], None, None]), "column text is of type list"),
        (pa.array([1.0, 2, 3]), "column text is of type double"),
    ):
        with pytest.raises(ClickLogError, match=message):
            shop.predictor.predict(rows.append_column("text", values))
    large = pa.array([[1e5, 0.0]] * 3)
    with pytest.raises(InvalidRowError, match=r"row 0, column image: .*100000.* float16 holds"):
        shop.predictor.predict(rows.append_column("image", large))
    some = shop.requests[:3]
    some[0]["text"] = TEXT
    with pytest.raises(SchemaError, match="row 1 has no column text"):
        shop.predictor.predict(some)


# ---- the server


def test_the_server_finds_them(shop: VectorShop) -> None:
    requests = shop.requests[:9]
    expected = shop.predictor.predict(requests)
    np.testing.assert_allclose(ask(shop, {"rows": requests}), expected, rtol=1e-6)
    columns = {name: [row[name] for row in requests] for name in requests[0]}
    np.testing.assert_allclose(ask(shop, {"columns": columns}), expected, rtol=1e-6)

    given = [{**row, "text": TEXT, "image": None} for row in requests]
    own = shop.predictor.predict(given)
    assert (own != expected).any()
    np.testing.assert_allclose(ask(shop, {"rows": given}), own, rtol=1e-6)
    shared = {"rows": requests, "shared": {"text": TEXT, "image": None}}
    np.testing.assert_allclose(ask(shop, shared), own, rtol=1e-6)
    given[4]["text"] = [1, 2, False]
    with pytest.raises(RefusedError) as caught:
        ask(shop, {"rows": given})
    assert caught.value.status == 422
    assert (caught.value.details["row"], caught.value.details["column"]) == (4, "text")
    assert caught.value.details["reason"].startswith("its item 2 is False")


_ITEMS = st.one_of(
    st.floats(-9, 9),
    st.integers(-9, 9),
    st.sampled_from([None, True, "1", "", [], {}, [1.0], 1e39, 10**400, float("nan")]),
)
_FIELDS = st.one_of(
    st.none(), st.lists(st.floats(-9, 9), min_size=3, max_size=3), st.lists(_ITEMS, max_size=4),
    _ITEMS,
)  # fmt: skip


@hypothesis.settings(max_examples=75, deadline=None)
@hypothesis.given(values=st.lists(_FIELDS, min_size=1, max_size=6), by_column=st.booleans())
def test_any_values_are_scored_or_refused(
    shop: VectorShop, values: list[Any], by_column: bool
) -> None:
    rows = [{**row, "text": value} for row, value in zip(shop.requests, values, strict=False)]
    body: dict[str, Any] = {"rows": rows}
    if by_column:
        body = {"columns": {name: [row[name] for row in rows] for name in rows[0]}}
    refused = []
    scores = np.empty(0)
    try:
        scores = ask(shop, body)
    except RefusedError as error:
        refused.append(error)
    for error in refused:
        assert error.status in (400, 422)  # 400: a NaN is no JSON
        assert error.details.get("column", "text") == "text"
    if not refused:
        assert len(scores) == len(values)
        assert np.isfinite(scores).all()
        for value in values:
            assert value in (None, [], "") or len(value) == 3


def test_requests_of_both_kinds_share_a_batch(shop: VectorShop) -> None:
    requests = shop.requests[:12]
    parts = [
        shop.predictor.encode(requests[:5]),
        shop.predictor.encode([{**row, "text": TEXT} for row in requests[5:7]]),
        shop.predictor.encode(requests[7:], {"image": [1, 2]}),
    ]
    alone = np.concatenate([shop.predictor.predict_parts([part]) for part in parts])
    np.testing.assert_allclose(shop.predictor.predict_parts(parts), alone, rtol=1e-6)


def test_shared_vectors_take_no_memory_for_each_row(shop: VectorShop) -> None:
    encoded = shop.predictor.encode(shop.requests, {"text": TEXT})
    assert encoded.given_vectors["text"].values.shape == (2, 4)
    nulls = shop.predictor.encode([{**row, "text": None} for row in shop.requests])
    assert nulls.given_vectors["text"].values.shape == (1, 4)


def test_vectors_as_tensors(shop: VectorShop) -> None:
    rows = shop.rows[:30]
    requests = [request_row(row) for row in rows]
    tensors = to_tensors(list_inputs(shop.predictor.row_spec), requests)
    tensors["time"] = np.array([row.time for row in rows])
    expected = shop.predictor.predict(requests)
    np.testing.assert_allclose(ask(shop, request_of(tensors), parse_tensors), expected, rtol=1e-6)

    every = list_inputs_without_tables(shop.predictor.row_spec)
    complete = to_tensors(every, shop.complete(rows)) | {"time": tensors["time"]}
    assert np.isnan(complete["text"]).any()  # a missing one
    np.testing.assert_allclose(ask(shop, request_of(complete), parse_tensors), expected, rtol=1e-6)
    inputs = {tensor["name"]: tensor for tensor in describe_model(shop.predictor)["inputs"]}
    assert inputs["text"] == {"name": "text", "datatype": "FP32", "shape": [-1, 3]}

    one = tensors | {"text": np.array([TEXT], np.float32)}
    shared = shop.predictor.predict(requests, {"text": TEXT})
    np.testing.assert_allclose(ask(shop, request_of(one), parse_tensors), shared, rtol=1e-6)
    for values, status, message in (
        (np.ones((30, 2), np.float32), 400, r"text is FP32 \[30, 2\], not FP32 of \[rows, 3\]"),
        (np.ones((30, 3)), 400, r"text is FP64 \[30, 3\], not FP32 of \[rows, 3\]"),
        (np.ones((30, 3), np.float32) * [1, np.nan, 1], 422, "its item 1 is nan"),
    ):
        content = request_of(tensors | {"text": values.astype(values.dtype)})
        if status == 422:
            content["inputs"][-1]["datatype"] = "FP32"
        with pytest.raises(RefusedError) as caught:
            ask(shop, content, parse_tensors)
        assert caught.value.status == status
        assert re.search(message, json.dumps(caught.value.details))


# ---- exported files


def test_an_exported_file_takes_vectors(shop: VectorShop, tmp_path: Path) -> None:
    bundle = shop.save_bundle(tmp_path / "bundle")
    export_onnx(bundle, tmp_path / "onnx")
    rows = shop.complete(shop.rows[:40])
    for row in rows[20:]:
        row["image"] = [0.1, 1 / 3]  # rounded to float16, as the workflow stores it
    inputs = list_inputs_without_tables(shop.predictor.row_spec)
    scores = score(tmp_path / "onnx", to_tensors(inputs, rows))
    np.testing.assert_allclose(scores, shop.predictor.predict(rows), atol=1e-6)
    export_triton(bundle, tmp_path / "triton")
    described = (tmp_path / "triton/click_probability/config.pbtxt").read_text()
    assert '{ name: "text", data_type: TYPE_FP32, dims: [ 3 ] }' in described


class Towers(torch.nn.Module):
    """A model of a user's own, which takes a vector as it is as well."""

    vector_columns = ("image",)

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(columns.width + 3, 1)

    def forward(
        self, dense: torch.Tensor, vectors: torch.Tensor, dense_vectors: torch.Tensor
    ) -> torch.Tensor:
        return self.layer(torch.cat([dense, vectors.flatten(1), dense_vectors], 1))


def test_an_own_model_with_vectors(shop: VectorShop, tmp_path: Path) -> None:
    """In a bundle and in an exported file, its head is ONNX."""
    config = dataclasses.replace(
        shop.predictor.model.config,
        model="theirs:Towers",
        settings={},
        own=OwnModel(vector_columns=Towers.vector_columns),
    )
    head = build_head(config, seed=5, build=Towers)
    model = ServingModel.make(shop.predictor.model.table, config, head)
    predictor = Predictor(shop.predictor.workflow, model)
    save_bundle(tmp_path / "bundle", shop.output / "workflow", model, make_origin(0, (0,)))
    loaded = Predictor.load(tmp_path / "bundle", check=True)
    assert isinstance(loaded.model.head, OnnxHead)
    expected = predictor.predict(shop.requests)
    np.testing.assert_allclose(loaded.predict(shop.requests), expected, atol=1e-6)
    blind = predictor.predict([{**row, "image": None} for row in shop.requests])
    assert (blind != expected).any()
    export_onnx(tmp_path / "bundle", tmp_path / "onnx")
    inputs = list_inputs_without_tables(predictor.row_spec)
    scores = score(tmp_path / "onnx", to_tensors(inputs, shop.complete(shop.rows)))
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_a_model_without_vectors(shop: VectorShop, tmp_path: Path) -> None:
    """It was trained with --no-vectors: it looks none up, and an exported file takes none."""
    _, predictor = make_model(shop.output / "workflow", vectors=False)
    requests = shop.requests[:20]
    known = predictor.predict(requests)
    given = [{**row, "text": TEXT} for row in requests]
    np.testing.assert_array_equal(predictor.predict(given), known)
    workflow = shop.output / "workflow"
    save_bundle(tmp_path / "bundle", workflow, predictor.model, make_origin(0, (0,)))
    assert not (tmp_path / "bundle/workflow/vectors").exists()
    bundled = Predictor.load(tmp_path / "bundle", check=True)
    np.testing.assert_array_equal(bundled.predict(requests), known)
    np.testing.assert_array_equal(bundled.predict(given), known)
    try_bundle(tmp_path / "bundle")
    assert "left out" in report(tmp_path / "bundle/workflow")
    with pytest.raises(BadInputError, match="vectors: missing; a bundle of a model without"):
        Encoder.load(tmp_path / "bundle/workflow")
    export_onnx(tmp_path / "bundle", tmp_path / "onnx")
    inputs = list_inputs(drop_tables(predictor.row_spec))
    scores = score(tmp_path / "onnx", to_tensors(inputs, shop.complete(shop.rows[:20])))
    np.testing.assert_allclose(scores, known, atol=1e-6)


@pytest.mark.parametrize("tables", ["float16", "int8"])
def test_smaller_tables_leave_vectors_as_they_are(
    shop: VectorShop, tmp_path: Path, tables: str
) -> None:
    bundle = shop.save_bundle(tmp_path / "bundle", tables)
    loaded = Predictor.load(bundle, check=True)
    rows = [{**row, "item": None, "user": None, "text": TEXT} for row in shop.requests[:20]]
    np.testing.assert_allclose(loaded.predict(rows), shop.predictor.predict(rows), atol=2e-3)
    encoded = loaded.encode(shop.requests)
    taken = loaded.take_vectors([encoded])
    expected = expected_vectors(shop.items, shop.rows, delay=HOUR)
    np.testing.assert_array_equal(taken, expected)


# ---- days


def test_a_morning_scores_a_day_as_the_etl_writes_it(tmp_path: Path) -> None:
    """For days with changing vectors, with what was known in the morning."""
    rows, items = make_rows(700, 7), make_items(versions=12, first_day=1)
    raw = tmp_path / "raw"
    write_days(raw, [row for row in rows if row.time < 3 * DAY])
    write_items(raw / "items.parquet", [item for item in items if item.changed < 3 * DAY])
    output = tmp_path / "out"
    run(EtlSettings(str(raw), output, load_daily_spec(tmp_path), engine="cpu"))
    found = []
    for day in range(3, 7):
        today = [row for row in rows if row.time // DAY == day]
        folder = tmp_path / f"day {day}"
        write_days(folder, today)
        write_items(folder / "items.parquet", [i for i in items if i.changed < (day + 1) * DAY])
        morning = Encoder.load(output / "workflow")
        dense, _, vectors = morning.encode_with_vectors([request_row(row) for row in today])
        extend(ExtendSettings(output, str(folder / f"day_{day}.csv")))
        written = pd.concat([read_split(output, name) for name in ("valid", "test")])
        np.testing.assert_array_equal(vectors, read_vectors(output, written))
        np.testing.assert_array_equal(dense, written[morning.spec.dense_names])
        found.append(int(vectors[:, 3].sum()))
    assert found[0] < found[-1]
    assert len({*found}) > 2
