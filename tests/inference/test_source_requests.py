"""Values of events of other files in requests: looked up in a bundle, given, inputs of ONNX."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.etl.run import run
from nvt_torchrec.formats.feature_spec.spec_variants import drop_events
from nvt_torchrec.inference.bulk import predict_file
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.bodies import parse_body
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.workflows import compiled
from tests.etl.event_logs import BY_TIME
from tests.etl.runs import settings
from tests.etl.source_logs import (
    DAY,
    Click,
    expected,
    load_source_spec,
    make_bought,
    make_clicks,
    write_clicks,
    write_rows,
)
from tests.inference.bundles import make_origin
from tests.inference.exported import score
from tests.inference.reference import to_serve
from tests.training.runs import with_tables
from tests.training.shapes import dlrm

LIMITS, HEADERS = ServerSettings(), {"content-type": "application/json"}
BOUGHT = make_bought(120, 0, 4, seed=32)
CLICKS = [
    Click(2 * DAY + 7200 * i, user, str(i % 4), 0)
    for i, user in enumerate(("u1", "u2", "", "new", "u1", "u4"))
]
ROWS: list[dict[str, Any]] = [
    {"user": row.user or None, "item": int(row.item), "price": 1.5, "time": row.time}
    for row in CLICKS
]


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model of random weights, in a bundle; the raw files are gone."""
    base = tmp_path_factory.mktemp("sources")
    write_clicks(base / "raw", make_clicks(160, 2, seed=31))
    write_rows(base / "raw/purchases.parquet", BOUGHT)
    spec = load_source_spec(base, BY_TIME)
    run(settings(base / "raw", base / "out", spec))
    workflow = compiled.load(base / "out/workflow")
    schema = workflow.schema
    config = dlrm(schema.dense, schema.categorical, schema.table_sizes, 4, (8, 4), (8, 1), 0.7)
    config = dataclasses.replace(config, labels=schema.labels[:1])
    model = with_tables(config, 3)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, size in config.tables.items():
        fill_table(bags[name].weight.detach(), name, size, 4, 3, (0, 0))
    save_bundle(base / "bundle", workflow.path, to_serve(model, config), make_origin(0, (0,)))
    shutil.rmtree(base / "raw")
    shutil.rmtree(base / "out")
    return Predictor.load(base / "bundle")


def ask(predictor: Predictor, body: dict[str, Any]) -> np.ndarray:
    encoded, _ = parse_body(bytearray(json.dumps(body).encode()), HEADERS, predictor, LIMITS)
    return predictor.predict_encoded(encoded.dense, encoded.ids)[:, 0]


def known_values(predictor: Predictor) -> dict[str, np.ndarray]:
    assert predictor.workflow.events is not None
    read = predictor.read(ROWS)
    values = predictor.workflow.events.compute_aggregates(read.groups, read.times)
    return dict(zip((column.name for column in predictor.spec.aggregates), values, strict=True))


def test_a_bundle_knows_what_the_loop_says(predictor: Predictor) -> None:
    """Also of purchases after the last row of the log."""
    known, wanted = known_values(predictor), expected(predictor.spec, BOUGHT, CLICKS)
    for name in wanted[0]:
        values = [value[name] for value in wanted]
        np.testing.assert_allclose(known[name], values, atol=1e-12, err_msg=name)
    assert known["user_purchases_count"][4] > known["user_purchases_count"][0] > 0


def test_each_form_of_rows(predictor: Predictor, tmp_path: Path) -> None:
    wanted = np.concatenate([predictor.predict([row]) for row in ROWS])
    assert len(set(wanted.tolist())) == len(ROWS)
    frame = pd.DataFrame(ROWS)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    predict_file(predictor, str(tmp_path / "rows.csv"), tmp_path / "scores.parquet")
    of_file = pd.read_parquet(tmp_path / "scores.parquet")["probability"]
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    for scores in (
        predictor.predict(frame),
        predictor.predict(ROWS * 40)[: len(ROWS)],
        of_file,
        ask(predictor, {"rows": ROWS}),
        ask(predictor, {"columns": columns}),
    ):
        np.testing.assert_allclose(scores, wanted, atol=1e-6)
    shared = {"user": "u1", "time": ROWS[0]["time"]}
    candidates = [{"item": row["item"], "price": row["price"]} for row in ROWS]
    whole = [{**shared, **candidate} for candidate in candidates]
    scores = ask(predictor, {"shared": shared, "rows": candidates})
    np.testing.assert_allclose(scores, predictor.predict(whole), atol=1e-6)


def test_values_of_the_caller_go_before(predictor: Predictor) -> None:
    wanted, known = predictor.predict(ROWS), known_values(predictor)
    given = []
    for i, row in enumerate(ROWS):
        values = {name: of_rows[i] for name, of_rows in known.items()}
        own = {name: None if np.isnan(value) else value for name, value in values.items()}
        given.append({name: row[name] for name in row if name != "time"} | own)
    # the histories are as of the bundle, whose last row is older than these
    np.testing.assert_allclose(predictor.predict(given), wanted, atol=1e-6)
    changed = predictor.predict([{**ROWS[0], "user_purchases_count": 10_000}])
    assert abs(changed[0] - wanted[0]) > 1e-6


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"user_purchases_count": -1}, "-1.0: expected a number of events"),
        ({"user_purchases_shop_distinct": 1.5}, "1.5: expected a number of different values"),
        ({"user_purchase_count": 1}, "similar to the aggregate user_purchases_count"),
        ({"user_purchases_count_7d": 1}, "similar to the aggregate user_purchases_count"),
    ],
)
def test_values_that_there_are_not(predictor: Predictor, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRowError, match=reason):
        predictor.predict([{**ROWS[0], **more}])


def test_an_exported_file_takes_them_as_inputs(predictor: Predictor, tmp_path: Path) -> None:
    export_onnx(predictor.workflow.path.parent, tmp_path / "onnx")
    known = known_values(predictor)
    newest = [{**row, "recent": {"item": []}} for row in ROWS]
    rows = []
    for i, row in enumerate(newest):
        own = {n: None if np.isnan(values[i]) else values[i] for n, values in known.items()}
        rows.append({**row, **own})
    inputs = list_inputs(drop_events(predictor.row_spec))
    assert "user_purchases_amount_last_12h" in {one.name for one in inputs}
    scores = score(tmp_path / "onnx", to_tensors(inputs, rows))
    np.testing.assert_allclose(scores, predictor.predict(ROWS), atol=1e-6)
