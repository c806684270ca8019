"""Rows of a model of events: each form means the same, and what would be dropped is refused."""

from __future__ import annotations

import cProfile
import dataclasses
import json
import math
import pstats
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory import frames
from nvt_torchrec.clicklog.in_memory.event_fields import EventFields, is_misspelt, is_named_for
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.feature_spec.events import Aggregate
from nvt_torchrec.formats.feature_spec.spec_variants import drop_events
from nvt_torchrec.formats.feature_spec.toml_file import load_spec
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.named_tensors import MISSING, list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.bodies import RefusedError, is_small, parse_body
from nvt_torchrec.inference.server.protocol import parse_tensors
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.workflows import compiled
from tests.etl.event_logs import BY_TIME, DAY, SPEC, make_rows, write
from tests.inference.bundles import make_origin
from tests.inference.exported import score
from tests.inference.reference import to_serve
from tests.inference.serving import request_of
from tests.training.runs import with_tables
from tests.training.shapes import dlrm

LIMITS, HEADERS = ServerSettings(), {"content-type": "application/json"}
#: With a column from an object, and one of lists.
NESTED = """
[[categorical]]
names = "version"
raw = "string"
from = "ctx.ver"
"""


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    """A model of random weights over a log with events."""
    base = tmp_path_factory.mktemp("requests")
    rows = make_rows(300, 3, seed=21)
    write(base / "log.csv", rows)
    lines = (base / "log.csv").read_text().splitlines()
    versions = ["ctx.ver", *(f"v{i % 3}" for i in range(len(rows)))]
    text = "\n".join(f"{line},{version}" for line, version in zip(lines, versions, strict=True))
    (base / "log.csv").write_text(text + "\n")
    (base / "spec.toml").write_text(SPEC.format(split=BY_TIME, events="") + NESTED)
    spec = load_spec(base / "spec.toml")
    run(EtlSettings(str(base / "log.csv"), base / "out", spec, engine="cpu"))
    workflow = compiled.load(base / "out/workflow")
    schema = workflow.schema
    config = dlrm(schema.dense, schema.categorical, schema.table_sizes, 4, (8, 4), (8, 1), 0.7)
    config = dataclasses.replace(
        config, labels=schema.labels[:1], histories=schema.histories, max_events=5
    )
    model = with_tables(config, 3)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, size in config.tables.items():
        fill_table(bags[name].weight.detach(), name, size, 4, 3, (0, 0))
    return Predictor(workflow, to_serve(model, config))


def row(i: int, **more: Any) -> dict[str, Any]:
    user, item = ("u1", "u2", None)[i % 3], f"i{i % 4}"
    own = {"user": user, "item": item, "price": 1.5 * i, "shop": i % 5, "ctx": {"ver": f"v{i % 3}"}}
    return {**own, "time": 4 * DAY + 3600 * i, **more}


def recent(count: int) -> dict[str, list]:
    return {"item": [f"i{i % 4}" for i in range(count)], "shop": [i % 5 for i in range(count)]}


#: As documented: with histories, without, and with an empty one; with aggregates or without.
ROWS = [
    row(0, recent=recent(3), liked={"item": ["i1"]}),
    row(1, recent=None, user_count=7, user_since=86_400),
    row(2, recent=recent(9), user_count_12h=0, user_clicked_rate=0.25),
    row(3, recent={"item": [], "shop": []}, liked={"item": ["i2", "i3"]}),
]


def ask(predictor: Predictor, body: dict[str, Any], parse: Any = parse_body) -> np.ndarray:
    encoded, _ = parse(bytearray(json.dumps(body).encode()), HEADERS, predictor, LIMITS)
    return predictor.predict_encoded(encoded.dense, encoded.ids)[:, 0]


def refused(predictor: Predictor, body: dict[str, Any], parse: Any = parse_body) -> dict[str, Any]:
    with pytest.raises(RefusedError) as caught:
        ask(predictor, body, parse)
    assert caught.value.status in (400, 422)
    return caught.value.details


def columns_of(rows: list[dict[str, Any]]) -> dict[str, list]:
    return {name: [row.get(name) for row in rows] for name in {k: 0 for row in rows for k in row}}


def test_every_form_of_objects(predictor: Predictor) -> None:
    """Histories and nested columns in frames, Arrow and columns were scored as if not there."""
    rows = [{k: v for k, v in of.items() if not k.startswith("user_")} for of in ROWS]
    wanted = np.concatenate([predictor.predict([of]) for of in rows])
    without = predictor.predict([{**of, "recent": None, "liked": None} for of in rows])
    assert np.abs(wanted - without)[[0, 2, 3]].min() > 1e-4
    other = predictor.predict([{**of, "ctx": {"ver": "v9"}} for of in rows])
    assert np.abs(wanted - other).min() > 1e-6
    columns = columns_of(rows)
    flat = {
        name: values for name, values in columns.items() if name not in ("ctx", "recent", "liked")
    }
    flat["ctx.ver"] = [of["ctx"]["ver"] for of in rows]
    for history, names in {"recent": ("item", "shop"), "liked": ("item",)}.items():
        for name in names:
            flat[f"{history}.{name}"] = [(of.get(history) or {}).get(name) for of in rows]
    forms = {
        "dicts": rows,
        "many": rows * 40,
        "frame": pd.DataFrame(rows),
        "table": pa.Table.from_pylist(rows),
        "batch": pa.RecordBatch.from_pylist(rows),
        "columns": columns,
        "arrow columns": {name: pa.array(values) for name, values in columns.items()},
        "flat": flat,
        "flat frame": pd.DataFrame(flat),
    }
    for name, form in forms.items():
        scores = predictor.predict(form)
        np.testing.assert_allclose(scores[: len(rows)], wanted, atol=1e-6, err_msg=name)
    for body in ({"rows": rows}, {"columns": columns}, {"columns": flat}):
        np.testing.assert_allclose(ask(predictor, body), wanted, atol=1e-6)
    # what rows share is read once, and means the same
    shared = {"user": "u1", "recent": recent(9), "ctx": {"ver": "v1"}, "time": 5 * DAY}
    own = [{k: v for k, v in of.items() if k not in shared} for of in rows]
    own[1]["recent"], own[2]["time"] = recent(2), 6 * DAY
    wanted = predictor.predict([{**shared, **of} for of in own])
    np.testing.assert_allclose(predictor.predict(own, shared), wanted, atol=1e-6)
    np.testing.assert_allclose(ask(predictor, {"rows": own, "shared": shared}), wanted, atol=1e-6)
    columns = {name: [of[name] for of in own] for name in ("item", "price", "shop")}
    wanted = predictor.predict([{**{k: of[k] for k in columns}, **shared} for of in own])
    found = ask(predictor, {"columns": columns, "shared": shared})
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    wrong = {**shared, "recent": {"item": [5], "shop": [1]}}
    with pytest.raises(InvalidRowError, match=r"row 1, column recent\.item: \[5\]: expected a str"):
        predictor.predict([own[1], own[0]], wrong)  # the first row has a history of its own


@pytest.mark.parametrize(
    ("more", "column", "reason"),
    [
        ({"recent": [["i1"], [2]]}, "recent", "expected an object of lists: item, shop"),
        ({"recent": ["i1"]}, "recent", "expected an object of lists: item, shop"),
        ({"recent": {"item": ["i1"], "shops": [2]}}, "recent", "expected an object of lists"),
        ({"liked.categry": ["i1"]}, "liked.categry", "history liked has no column 'categry'"),
        ({"recent": {"item": ["i1", "i2"], "shop": [2]}}, "recent.shop", "a list of 1, but "),
        ({"recent": {"item": ["i1", "i2"]}}, "recent.shop", "a list of 0, but "),
        ({"ctx": "v1"}, "ctx", "expected an object with ver"),
        ({"user_cnt": 3}, "user_cnt", "similar to the aggregate user_count"),
        ({"User_Count": 3}, "User_Count", "similar to the aggregate user_count"),
        ({"user_count_7h": 3}, "user_count_7h", "similar to the aggregate user_count_12h"),
        ({"user_rate": 0.3}, "user_rate", "similar to the aggregate user_clicked_rate"),
        ({"recnt": {"item": ["i1"], "shop": [2]}}, "recnt", "similar to the history recent"),
        ({"recnt.item": ["i1"]}, "recnt.item", "similar to the history recent"),
        ({"user_count": True}, "user_count", "True: expected a number"),
        ({"user_count": -5}, "user_count", "-5.0: expected a number of events"),
        ({"user_count": 2.5}, "user_count", "2.5: expected a number of events"),
        ({"user_count": None}, "user_count", "None: expected a number of events"),
        ({"user_clicked_rate": 12}, "user_clicked_rate", "12.0: expected a share from 0 to 1"),
        ({"user_since": -1}, "user_since", "-1.0: expected seconds from 0 on"),
        ({"time": "soon"}, "time", "'soon': expected"),
    ],
)
def test_what_would_be_dropped_or_misread_is_refused(
    predictor: Predictor, more: dict[str, Any], column: str, reason: str
) -> None:
    """It was answered with 200, and scores of other rows."""
    rows = [row(0), {**row(1), **more}]
    details = refused(predictor, {"rows": rows})
    assert (details["row"], details["column"]) == (1, column)
    assert reason in details["reason"]
    assert details["remedy"]
    for body in (
        {"rows": [row(0), row(1)], "shared": more},
        {"columns": {**columns_of([row(0), row(1)]), **{k: [v, v] for k, v in more.items()}}},
    ):
        if column in ("ctx", "time") and "shared" in body:
            continue  # each row has its own
        details = refused(predictor, body)
        assert reason in details.get("reason", details["error"])
        assert details["remedy"]
    if True in more.values() or None in more.values():
        return  # a frame holds NaN where a row has no field; from Python, True is 1
    with pytest.raises((SchemaError, InvalidRowError), match=re.escape(reason)):
        predictor.predict(pd.DataFrame([rows[1]]))


def test_a_column_of_one_value_is_not_that_of_all(predictor: Predictor) -> None:
    columns = columns_of([row(0), row(1)])
    for name, value in {"user_count": 1, "recent": recent(1), "recent.item": ["i1"]}.items():
        details = refused(predictor, {"columns": {**columns, name: [value]}})
        assert f"column {name} has 1 rows" in details["error"]
        assert details["remedy"]


def test_aggregates_are_given_in_their_units(predictor: Predictor) -> None:
    """What the state says, given by the caller, is the same score; also by tensors and text."""
    rows = [row(0), row(3), row(6)]
    groups = predictor.read(rows)
    values = predictor.workflow.events.compute_aggregates(groups.groups, groups.times)
    names = [column.name for column in predictor.spec.aggregates]
    known = dict(zip(names, values.tolist(), strict=True))
    assert all(3600 < since < 10 * DAY for since in known["user_since"])
    assert all(count == int(count) > 0 for count in known["user_count"])
    given = [{**of, **{n: known[n][i] for n in names}} for i, of in enumerate(rows)]
    wanted = predictor.predict(rows)
    without = [{k: v for k, v in of.items() if k != "time"} for of in given]
    for form in (given, without, pd.DataFrame(without), columns_of(without)):
        np.testing.assert_allclose(predictor.predict(form), wanted, atol=1e-6)
    texts = [
        {**of, "user_count": f"{of['user_count']:.0f}", "shop": str(of["shop"])} for of in given
    ]
    np.testing.assert_allclose(ask(predictor, {"rows": texts}), wanted, atol=1e-6)
    # a row may have some and others none; one that is told to have no event has none
    some = predictor.predict([given[0], rows[1], {**rows[2], "user_since": None}])
    np.testing.assert_allclose(some[:2], wanted[:2], atol=1e-6)
    assert abs(some[2] - wanted[2]) > 1e-6
    tensors: dict[str, np.ndarray] = {
        "item": np.array([of["item"] for of in rows], object),
        "user": np.array([of["user"] for of in rows], object),
        "ctx.ver": np.array([of["ctx"]["ver"] for of in rows], object),
        "price": np.array([of["price"] for of in rows]),
        "shop": np.array([of["shop"] for of in rows]),
        "time": np.array([of["time"] for of in rows]),
    }
    body = request_of(tensors)
    np.testing.assert_allclose(ask(predictor, body, parse_tensors), wanted, atol=1e-6)
    tensors["time"] = np.full(3, MISSING)
    tensors |= {name: np.array(known[name]) for name in names}
    body = request_of(tensors)
    np.testing.assert_allclose(ask(predictor, body, parse_tensors), wanted, atol=1e-6)
    tensors["user_count"] = np.array([-5.0, 1, 1])
    assert "expected a number of events" in str(
        refused(predictor, request_of(tensors), parse_tensors)
    )


def test_numbers_are_checked_as_other_values_are(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python's numbers, which are read together, and what takes the way of all other values."""
    numbers = [0, 1, 3.0, 0.5, 1.5, -1, -0.5, 2**53, 2**60, 2**90, 1e39, math.nan, math.inf, True]
    names = [column.name for column in predictor.spec.aggregates]
    usual = dict.fromkeys(names, 1)

    def outcomes() -> list[str]:
        found = []
        for name in names:
            for number in numbers:
                try:
                    read = predictor.read([row(0, **usual | {name: number})])
                    found.append(f"{read.dense.tolist()} {read.dense_missing.tolist()}")
                except InvalidRowError as error:
                    found.append(str(error))
        return found

    together = outcomes()
    monkeypatch.setattr(EventFields, "_read_usual_aggregates", lambda self, fields: None)
    assert together == outcomes()


def test_a_row_takes_few_calls(predictor: Predictor) -> None:
    """A row is few values, so it takes as long as the calls it is made of: 984 and 854.

    They were 1,365 and 1,523 when each aggregate and each transform was computed by itself.
    """
    aggregates = {column.name: 1 for column in predictor.spec.aggregates}
    for rows, maximum in (([row(0)], 1100), ([row(0, **aggregates, recent=recent(5))], 950)):
        predictor.predict(rows)
        profile = cProfile.Profile()
        profile.runcall(predictor.predict, rows)
        assert pstats.Stats(profile).total_calls < maximum  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("user_cnt", True), ("user_conut", True), ("user_counts", True), ("usercount", True),
        ("user", False), ("user_country", False), ("user_id", False), ("account", False),
        ("count", False), ("user_amount", False), ("user_score", False),
    ],
)  # fmt: skip
def test_names_that_are_meant_for_another(name: str, meant: bool) -> None:
    assert is_misspelt(name, "user_count") == meant


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("user_rate", True), ("user_click_rate", True), ("user_clicks_rate", True),
        ("user_rate_7d", True), ("user_clicked_rate_7d", True), ("User_Rate", True),
        ("user_login_rate", False), ("user_rating", False), ("item_rate", False), ("rate", False),
        ("user_count", False), ("user_rates_us", False), ("superuser_rate", False),
    ],
)  # fmt: skip
def test_names_with_the_parts_of_an_aggregate(name: str, meant: bool) -> None:
    assert is_named_for(name, Aggregate(("user",), "rate", label="clicked")) == meant
    assert not is_named_for("user_login_count", Aggregate(("user",), "count"))


def test_fields_that_nothing_is_read_from_are_ignored(predictor: Predictor) -> None:
    """As before: what a log has besides, such as the label."""
    rows = [row(i) for i in range(3)]
    more = {"clicked": 1, "user_country": "DE", "note": {"a": [1]}, "likes": [1], "arrived": 5}
    wanted = predictor.predict(rows)
    for form in ([{**of, **more} for of in rows], pd.DataFrame(rows).assign(clicked=1, note="x")):
        np.testing.assert_allclose(predictor.predict(form), wanted, atol=1e-6)


def test_the_work_of_a_request_is_bounded(
    predictor: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,096 rows that share 650 events: these are parsed once, and each row gets the newest."""
    parsed: list[int] = []
    original = frames.convert_values

    def count(values: list, *arguments: Any, **options: Any) -> Any:
        parsed.append(sum(len(v) if isinstance(v, list) else 1 for v in values))
        return original(values, *arguments, **options)

    monkeypatch.setattr(frames, "convert_values", count)
    shared = {**row(0), "recent": recent(650), "liked": {"item": ["i1"] * 650}}
    body = bytearray(json.dumps({"rows": [{}] * 4096, "shared": shared}).encode())
    assert len(body) < 32 << 10
    assert not is_small(body)
    encoded, _ = parse_body(body, HEADERS, predictor, LIMITS)
    assert sum(parsed) < 4 * 650
    assert len(encoded) == 4096
    assert encoded.ids.lengths.max() == 5  # --max_events
    wanted = predictor.predict([shared])
    scores = predictor.predict_encoded(encoded.dense, encoded.ids)[:, 0]
    np.testing.assert_allclose(scores, np.repeat(wanted, 4096), atol=1e-6)
    texts = {**shared, "user": "u" * 100_000}
    with pytest.raises(RefusedError) as caught:
        ask(predictor, {"rows": [{}] * 4096, "shared": texts})
    assert caught.value.status == 413
    for rows, small in ((1, True), (64, True), (4096, False)):
        assert is_small(bytearray(json.dumps({"rows": [{"a": 1}] * rows}).encode())) == small


def test_an_exported_file_takes_aggregates_in_their_units(
    predictor: Predictor, tmp_path: Path
) -> None:
    """It has no state: what the server looks up are its inputs, and the scores are the same."""
    save_bundle(tmp_path / "bundle", predictor.workflow.path, predictor.model, make_origin(0, (0,)))
    export_onnx(tmp_path / "bundle", tmp_path / "onnx")
    rows = [row(i, recent=recent(3), liked={"item": ["i1", "i2"]}) for i in (0, 1, 3)]
    read = predictor.read(rows)
    values = predictor.workflow.events.compute_aggregates(read.groups, read.times)
    given = dict(zip((c.name for c in predictor.spec.aggregates), values, strict=True))
    flat = [
        {**of, "ctx.ver": of["ctx"]["ver"], "liked.item": of["liked"]["item"]}
        | {f"recent.{name}": of["recent"][name] for name in ("item", "shop")}
        | {name: None if np.isnan(column[i]) else column[i] for name, column in given.items()}
        for i, of in enumerate(rows)
    ]
    tensors = to_tensors(list_inputs(drop_events(predictor.row_spec)), flat)
    scores = score(tmp_path / "onnx", tensors)
    np.testing.assert_allclose(scores, predictor.predict(rows), atol=1e-6)
