"""Rows that name a user and an item alone: the rest comes from the tables beside the workflow."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings, ExtendSettings
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.inference.encoder import MANY_ROWS, Encoder
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.server.bodies import parse_body
from nvt_torchrec.inference.server.protocol import parse_tensors
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.workflows import compiled
from tests.etl.runs import read_split
from tests.etl.table_logs import (
    BY_DAYS,
    BY_TIME,
    DAY,
    EVENTS,
    VERSIONS,
    Impression,
    Item,
    User,
    find_item,
    load_table_spec,
    make_impressions,
    make_items,
    make_users,
    write_rows,
)
from tests.inference.bundles import make_origin
from tests.inference.exported import score
from tests.inference.reference import to_serve
from tests.inference.serving import request_of
from tests.training.runs import with_tables
from tests.training.shapes import dlrm

HOUR = 3600
HEADERS = {"content-type": "application/json"}


@dataclasses.dataclass(frozen=True)
class Shop:
    """A log, its tables, and what was made of them."""

    output: Path
    rows: list[Impression]
    items: list[Item]
    users: list[User]
    predictor: Predictor


def make_predictor(workflow: Path) -> Predictor:
    """Return a model of random weights."""
    loaded = compiled.load(workflow)
    schema = loaded.schema
    config = dlrm(schema.dense, schema.categorical, schema.table_sizes, 4, (8, 4), (8, 1), 0.7)
    config = dataclasses.replace(config, labels=schema.labels[:1])
    model = with_tables(config, 3)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, size in config.tables.items():
        fill_table(bags[name].weight.detach(), name, size, 4, 3, (0, 0))
    return Predictor(loaded, to_serve(model, config))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    root = tmp_path_factory.mktemp("shop")
    rows, items, users = make_impressions(300, 3), make_items(versions=4), make_users()
    write_rows(root / "items.csv", items)
    write_rows(root / "users.csv", users)
    write_rows(root / "log.csv", rows)
    spec = load_table_spec(root, BY_TIME, versions=VERSIONS)
    run(EtlSettings(str(root / "log.csv"), root / "out", spec, engine="cpu"))
    predictor = make_predictor(root / "out/workflow")
    return Shop(root / "out", rows, items, users, predictor)


def ids_of(row: Impression) -> dict[str, Any]:
    """Return what a request names."""
    item = int(row.item)
    return {"user": row.user, "country": row.country or None, "item": item, "time": row.time}


def values_of(row: Impression, items: list[Item], users: list[User]) -> dict[str, Any]:
    """Return the same with the columns of the tables, joined by looking at all of them."""
    item = find_item(items, row, delay=HOUR)
    user = next((u for u in users if (u.user, u.country) == (row.user, row.country)), None)
    has_price = item is not None and item.price not in ("", "NA")
    return ids_of(row) | {
        "price": float(item.price) if item and has_price else None,
        "brand": item.brand if item else None,
        "category": (item.category or None) if item else None,
        "tags": [int(tag) for tag in item.tags.split("|")] if item and item.tags else None,
        "age": int(user.age) if user else None,
        "job": user.job if user else None,
    }


def test_rows_are_encoded_as_the_etl_wrote_them(shop: Shop) -> None:
    """One by one, a few, many, and as a frame."""
    encoder = Encoder.load(shop.output / "workflow")
    written = pd.concat([read_split(shop.output, split) for split in SPLITS], ignore_index=True)
    requests = [ids_of(row) for row in shop.rows]
    assert len(requests) > MANY_ROWS
    frame = pd.DataFrame(requests).astype({"country": "string"})
    forms = {"many": requests, "frame": frame, "few": requests[:50], "one": requests[7:8]}
    for form, rows in forms.items():
        encoded = encoder.workflow.transform(encoder.read(rows))
        first = 7 if form == "one" else 0
        expected = written[first : first + len(rows)]
        for j, name in enumerate(encoder.spec.dense_names):
            np.testing.assert_array_equal(encoded.dense[j], expected[name], err_msg=form)
        for j, name in enumerate(encoder.spec.categorical_names):
            ids = np.concatenate([np.atleast_1d(ids) for ids in expected[name]])
            np.testing.assert_array_equal(encoded.ids.column(j), ids, err_msg=f"{form}: {name}")


def test_values_that_a_caller_gives_go_before(shop: Shop) -> None:
    requests = [ids_of(row) for row in shop.rows[:40]]
    known = shop.predictor.predict(requests)
    complete = [values_of(row, shop.items, shop.users) for row in shop.rows[:40]]
    np.testing.assert_array_equal(shop.predictor.predict(complete), known)
    for name, value in (("price", 9000.0), ("tags", [1, 2]), ("brand", "b3")):
        given = [{**row, name: value} for row in requests]
        expected = [{**row, name: value} for row in complete]
        scores = shop.predictor.predict(given)
        np.testing.assert_array_equal(scores, shop.predictor.predict(expected))
        assert (scores != known).any(), name
    # age_group is made of the same column
    older = shop.predictor.predict([{**row, "age": 79} for row in requests])
    expected = shop.predictor.predict([{**row, "age": 79} for row in complete])
    np.testing.assert_array_equal(older, expected)


def test_a_value_that_some_rows_have(shop: Shop) -> None:
    """It is not known whether the others have none, or mean the table's."""
    requests = [ids_of(row) for row in shop.rows[:3]]
    requests[1]["price"] = 3.5
    with pytest.raises(ClickLogError, match="price"):
        shop.predictor.predict(requests)


def test_a_row_without_a_time_takes_the_newest_version(shop: Shop) -> None:
    rows = [row for row in shop.rows[:60] if row.user]
    late = max(item.changed for item in shop.items) + DAY
    requests = [{**ids_of(row), "time": late} for row in rows]
    untimed = [{key: value for key, value in row.items() if key != "time"} for row in requests]
    np.testing.assert_array_equal(shop.predictor.predict(untimed), shop.predictor.predict(requests))


def test_a_file_is_scored_by_ids_alone(shop: Shop, tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.csv", shop.rows)
    np.testing.assert_allclose(
        shop.predictor.predict(str(tmp_path / "rows.csv")),
        shop.predictor.predict([ids_of(row) for row in shop.rows]),
        rtol=1e-6,
    )


def test_the_server_looks_them_up(shop: Shop) -> None:
    limits = ServerSettings()
    requests = [ids_of(row) for row in shop.rows[:9]]
    expected = shop.predictor.predict(requests)

    def ask(body: dict[str, Any], parse: Any = parse_body) -> np.ndarray:
        content = bytearray(json.dumps(body).encode())
        encoded, _ = parse(content, HEADERS, shop.predictor, limits)
        return shop.predictor.predict_encoded(encoded.dense, encoded.ids)[:, 0]

    np.testing.assert_allclose(ask({"rows": requests}), expected, rtol=1e-6)
    columns = {name: [row[name] for row in requests] for name in requests[0]}
    np.testing.assert_allclose(ask({"columns": columns}), expected, rtol=1e-6)
    candidates = [{"item": item} for item in range(14)]
    user = {name: requests[1][name] for name in ("user", "country", "time")}
    alone = shop.predictor.predict([user | candidate for candidate in candidates])
    np.testing.assert_allclose(ask({"rows": candidates, "shared": user}), alone, rtol=1e-6)

    texts = [{**row, "country": row["country"] or "", "user": row["user"]} for row in requests]
    tensors = to_tensors(list_inputs(shop.predictor.row_spec), texts)
    tensors["time"] = np.array([row["time"] for row in requests])
    np.testing.assert_allclose(ask(request_of(tensors), parse_tensors), expected, rtol=1e-6)
    tensors["price"] = np.full(len(requests), 9000.0)
    given = shop.predictor.predict([{**row, "price": 9000.0} for row in requests])
    np.testing.assert_allclose(ask(request_of(tensors), parse_tensors), given, rtol=1e-6)


def test_in_an_exported_file_the_columns_are_inputs(shop: Shop, tmp_path: Path) -> None:
    workflow = shop.predictor.workflow.path
    save_bundle(tmp_path / "bundle", workflow, shop.predictor.model, make_origin(0, (0,)))
    export_onnx(tmp_path / "bundle", tmp_path / "onnx")
    rows = [values_of(row, shop.items, shop.users) for row in shop.rows[:20]]
    spec = drop_tables(shop.predictor.row_spec)
    texts = [
        {name: row[name] or "" if name in ("brand", "category", "job", "country") else row[name]
         for name in row}
        for row in rows
    ]  # fmt: skip
    scores = score(tmp_path / "onnx", to_tensors(list_inputs(spec), texts))
    np.testing.assert_allclose(scores, shop.predictor.predict(rows), atol=1e-6)
    loaded = Predictor.load(tmp_path / "bundle")
    requests = [ids_of(row) for row in shop.rows[:20]]
    np.testing.assert_array_equal(loaded.predict(requests), shop.predictor.predict(requests))


def test_a_morning_scores_a_day_as_the_etl_writes_it(tmp_path: Path) -> None:
    """For days with changing prices and new items, with what was known in the morning."""
    users, rows = make_users(), make_impressions(600, 7)
    items = make_items(versions=12, first=3)
    items.append(Item("13", 4 * DAY, "17.5", "b1", "hats", "1|2"))  # on the fifth day
    raw = tmp_path / "raw"
    raw.mkdir()
    write_rows(raw / "users.csv", users)
    write_rows(raw / "items.csv", [item for item in items if item.changed < 3 * DAY])
    for day in range(3):
        write_rows(raw / f"day_{day}.csv", [row for row in rows if row.time // DAY == day])
    events = EVENTS.replace('time = "time"', 'time = "time"\ncut = "day"')
    spec = load_table_spec(raw, BY_DAYS, versions=VERSIONS, more=events)
    output = tmp_path / "out"
    run(EtlSettings(str(raw), output, spec, engine="cpu"))
    changed = 0
    for day in range(3, 7):
        today = [row for row in rows if row.time // DAY == day]
        morning = Encoder.load(output / "workflow")
        encoded = morning.workflow.transform(morning.read([ids_of(row) for row in today]))
        folder = tmp_path / f"day {day}"
        folder.mkdir()
        write_rows(folder / f"day_{day}.csv", today)
        write_rows(folder / "items.csv", [i for i in items if i.changed < (day + 1) * DAY])
        extend(ExtendSettings(output, str(folder / f"day_{day}.csv")))
        written = pd.concat([read_split(output, name) for name in ("valid", "test")])
        for j, name in enumerate(morning.spec.dense_names):
            np.testing.assert_array_equal(encoded.dense[j], written[name], err_msg=name)
        for name in ("brand", "category", "age_group"):  # others get ids for new values
            j = morning.spec.categorical_names.index(name)
            np.testing.assert_array_equal(encoded.ids.column(j), written[name], err_msg=name)
        changed += sum(item.changed // DAY == day for item in items)
    assert changed > 20
