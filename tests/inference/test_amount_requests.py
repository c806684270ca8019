"""Aggregates of numbers in requests: looked up, given by the caller, and inputs of an ONNX file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec.spec_variants import drop_events
from nvt_torchrec.inference.bulk import predict_file
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.bodies import RefusedError, parse_body
from nvt_torchrec.inference.server.protocol import parse_tensors
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.workflows import compiled
from tests.etl.amount_logs import make_purchases, spec_of, write
from tests.etl.event_logs import BY_TIME, DAY
from tests.inference.bundles import make_origin
from tests.inference.exported import score
from tests.inference.reference import to_serve
from tests.inference.serving import request_of
from tests.training.runs import with_tables
from tests.training.shapes import dlrm

LIMITS, HEADERS = ServerSettings(), {"content-type": "application/json"}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model of random weights."""
    base = tmp_path_factory.mktemp("amounts")
    write(base / "log.csv", make_purchases(200, 3, seed=31))
    spec = spec_of(base, BY_TIME, "")
    run(EtlSettings(str(base / "log.csv"), base / "out", spec, engine="cpu"))
    workflow = compiled.load(base / "out/workflow")
    schema = workflow.schema
    config = dlrm(schema.dense, schema.categorical, schema.table_sizes, 4, (8, 4), (8, 1), 0.7)
    config = dataclasses.replace(config, labels=schema.labels[:1])
    model = with_tables(config, 3)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, size in config.tables.items():
        fill_table(bags[name].weight.detach(), name, size, 4, 3, (0, 0))
    save_bundle(base / "bundle", workflow.path, to_serve(model, config), make_origin(0, (0,)))
    return Predictor.load(base / "bundle")


ROWS: list[dict[str, Any]] = [
    {"user": user, "item": f"i{i % 4}", "shop": str(i), "price": 1.5, "time": 3 * DAY + 7200 * i}
    for i, user in enumerate(("u1", "u2", None, "new", "u1", "u3"))
]


def ask(predictor: Predictor, body: dict[str, Any], parse: Any = parse_body) -> np.ndarray:
    encoded, _ = parse(bytearray(json.dumps(body).encode()), HEADERS, predictor, LIMITS)
    return predictor.predict_encoded(encoded.dense, encoded.ids)[:, 0]


def known_values(predictor: Predictor) -> dict[str, np.ndarray]:
    read = predictor.read(ROWS)
    values = predictor.workflow.events.compute_aggregates(read.groups, read.times)
    return dict(zip((column.name for column in predictor.spec.aggregates), values, strict=True))


def test_each_form_of_rows(predictor: Predictor, tmp_path: Path) -> None:
    """What the bundle knows: of dicts, a frame, a file, and by the server."""
    wanted = np.concatenate([predictor.predict([row]) for row in ROWS])
    assert len(set(wanted.tolist())) == len(ROWS)
    frame = pd.DataFrame(ROWS)
    frame.assign(amount=5.0).to_csv(tmp_path / "rows.csv", index=False)
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


def test_values_of_the_caller(predictor: Predictor) -> None:
    """In their units, negative ones and missing ones too: of rows, and of tensors."""
    known = known_values(predictor)
    assert known["user_amount_min"][0] < 0
    assert np.isnan(known["user_amount_mean"][3])
    wanted = predictor.predict(ROWS)
    given = []
    for i, row in enumerate(ROWS):
        values = {name: of_rows[i] for name, of_rows in known.items()}
        own = {name: None if np.isnan(value) else value for name, value in values.items()}
        given.append({name: row[name] for name in row if name != "time"} | own)
    np.testing.assert_allclose(predictor.predict(given), wanted, atol=1e-6)
    np.testing.assert_allclose(ask(predictor, {"rows": given}), wanted, atol=1e-6)
    inputs = list_inputs(predictor.row_spec)
    tensors = {**to_tensors(inputs, ROWS), **known}
    body = request_of(tensors)
    np.testing.assert_allclose(ask(predictor, body, parse_tensors), wanted, atol=1e-6)
    changed = predictor.predict([{**ROWS[0], "user_amount_sum": -(2.0**60)}])
    assert abs(changed[0] - wanted[0]) > 1e-6


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"user_amount_sum": None}, "None: expected a number"),
        ({"user_item_distinct": 1.5}, "1.5: expected a number of different values"),
        ({"user_item_distinct": -1}, "-1.0: expected a number of different values"),
        ({"user_amount_maxx": 1}, "similar to the aggregate user_amount_max"),
    ],
)
def test_values_that_there_are_not(predictor: Predictor, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRowError, match=reason):
        predictor.predict([{**ROWS[0], **more}])
    with pytest.raises(RefusedError) as caught:
        ask(predictor, {"rows": [ROWS[0], {**ROWS[1], **more}]})
    assert (caught.value.details["row"], caught.value.details["column"]) == (1, *more)


def test_an_exported_file_takes_them_as_inputs(predictor: Predictor, tmp_path: Path) -> None:
    export_onnx(predictor.workflow.path.parent, tmp_path / "onnx")
    known = known_values(predictor)
    rows = []
    for i, row in enumerate(ROWS):
        own = {n: None if np.isnan(values[i]) else values[i] for n, values in known.items()}
        rows.append({**row, **own})
    tensors = to_tensors(list_inputs(drop_events(predictor.row_spec)), rows)
    scores = score(tmp_path / "onnx", tensors)
    np.testing.assert_allclose(scores, predictor.predict(ROWS), atol=1e-6)
