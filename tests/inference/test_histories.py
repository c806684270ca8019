"""Histories that a caller gives as raw values: every form of rows, every kind of bundle."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.clicklog.in_memory.value_errors import InvalidRowError
from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import save_bundle, write_bundle
from nvt_torchrec.inference.named_tensors import list_inputs, to_tensors
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.scorer import Scorer
from nvt_torchrec.inference.server.bodies import RefusedError, parse_body
from nvt_torchrec.inference.server.protocol import describe_model, parse_tensors
from nvt_torchrec.inference.server.serve_settings import ServerSettings
from nvt_torchrec.models.contract import load_build
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cpu.blocks import LoaderBatch
from nvt_torchrec.training.data.loaders import spread_events
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.train_model import ModelWithTables
from nvt_torchrec.workflows import compiled
from tests.inference.bundles import ROWS, make_origin, make_workflow
from tests.inference.conftest import TRAINING
from tests.inference.exported import score
from tests.inference.reference import to_serve
from tests.inference.serving import request_of
from tests.logs import CRITEO, write_log
from tests.nvt_loader.data import add_history
from tests.training.runs import config_of, model_of, train_here, with_tables
from tests.training.runs import score as score_batches
from tests.training.shapes import dlrm

RECENT, SEEN = StoredHistory("recent", ("cat_0", "cat_1")), StoredHistory("seen", ("cat_0",))
FEATURES, MAX_EVENTS = (*RECENT.features, *SEEN.features), 3
#: None, one, more than are taken, unknown ones.
LISTS: list[dict[str, list]] = [
    {"recent.cat_0": [f"{i:x}" for i in range(i % 6)], "recent.cat_1": [3] * (i % 6),
     "seen.cat_0": ["ffff", "1"][: i % 3]}
    for i in range(len(ROWS))
]  # fmt: skip
GIVEN = [{**row, **lists} for row, lists in zip(ROWS, LISTS, strict=True)]


@pytest.fixture(scope="module", params=["dlrm", "din"])
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, ModelWithTables]:
    """A bundle of random weights, and the same model of TorchRec's: of means, or of events."""
    base = tmp_path_factory.mktemp("histories")
    opened = compiled.load(make_workflow(base / "workflow"))
    columns = opened.schema.dense, opened.schema.categorical, opened.schema.table_sizes
    config = dlrm(*columns, 8, (8,), (8, 1), 0.7)
    config = dataclasses.replace(config, histories=(RECENT, SEEN), max_events=MAX_EVENTS)
    if request.param == "din":
        settings = {"over_arch_layer_sizes": [8, 1]}
        config = dataclasses.replace(
            config, model="din", settings=settings, sequences=("recent",), vector_scale=4.0
        )
    model = with_tables(config, 1)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, rows in config.tables.items():
        fill_table(bags[name].weight.detach(), name, rows, 8, 1, (0, 0))
    save_bundle(base / "bundle", base / "workflow", to_serve(model, config), make_origin(0, (0,)))
    return base / "bundle", model


@pytest.fixture(scope="module")
def predictor(bundle: tuple[Path, ModelWithTables]) -> Predictor:
    return Predictor.load(bundle[0])


@pytest.fixture(scope="module")
def expected(bundle: tuple[Path, ModelWithTables], predictor: Predictor) -> np.ndarray:
    """What TorchRec's model says of the newest events, each encoded as a row's own value."""
    plain = compiled.load(predictor.workflow.path)

    def ids(name: str, values: list) -> list[int]:
        rows = [{**ROWS[0], name: value} for value in values]
        read = Predictor(plain, predictor.model).read(rows) if rows else None
        column = plain.spec.categorical_names.index(name)
        return plain.transform(read).ids.column(column).tolist() if read else []

    lists = {name: [ids(name, [row[name]]) for row in ROWS] for name in ("cat_0", "cat_1")}
    for name in FEATURES:
        lists[name] = [ids(name.split(".")[1], row[name][-MAX_EVENTS:]) for row in LISTS]
    values = [i for of_rows in lists.values() for own in of_rows for i in own]
    lengths = [len(own) for of_rows in lists.values() for own in of_rows]
    kjt = KeyedJaggedTensor([*lists], torch.tensor(values), lengths=torch.tensor(lengths))
    dense = plain.transform(Predictor(plain, predictor.model).read(ROWS)).dense
    batch = LoaderBatch(torch.from_numpy(dense.T.copy()), kjt, torch.zeros(len(ROWS), 1))
    batch = spread_events(batch, predictor.model.config)
    logits = bundle[1](batch.dense_features, batch.sparse_features)
    return torch.sigmoid(logits).numpy().reshape(-1)


def _nest(row: dict[str, Any]) -> dict[str, Any]:
    nested = {key: value for key, value in row.items() if "." not in key}
    for name in FEATURES:
        outer, inner = name.split(".")
        nested.setdefault(outer, {})[inner] = row[name]
    return nested


def test_every_form_of_rows(predictor: Predictor, expected: np.ndarray) -> None:
    """Each with the same lists, of which the newest count; what is not given is empty."""
    assert np.ptp(expected) > 0.01
    columns = {name: [row[name] for row in GIVEN] for name in GIVEN[0]}
    frame = pd.DataFrame(columns)
    forms = [GIVEN, [*map(_nest, GIVEN)], columns, frame, pa.table(columns)]
    for rows in forms:
        np.testing.assert_allclose(predictor.predict(rows), expected, atol=1e-6)
    many = predictor.predict(GIVEN * 3)  # column by column
    np.testing.assert_allclose(many, np.tile(expected, 3), atol=1e-6)
    alone = np.concatenate([predictor.predict([row]) for row in GIVEN])
    np.testing.assert_allclose(alone, expected, atol=1e-6)
    empty = predictor.predict([{**row, **{key: [] for key in FEATURES}} for row in ROWS])
    assert np.abs(empty - expected).max() > 0.01
    frame = frame.drop(columns=[*FEATURES])
    for rows in (
        ROWS,
        pa.Table.from_pandas(frame),
        frame,
        [{**row, "recent": None} for row in ROWS],
    ):
        np.testing.assert_allclose(predictor.predict(rows), empty, atol=1e-6)


def test_values_that_are_none(predictor: Predictor) -> None:
    """They are refused as in the column itself, with the name of the list."""
    for bad, column in (({"cat_0": ["x"]}, "recent.cat_0"), ({"cat_1": 5}, "recent.cat_1")):
        with pytest.raises(InvalidRowError) as error:
            predictor.predict([ROWS[0], {**ROWS[1], "recent": bad}])
        assert (error.value.row, error.value.column) == (1, column)


@pytest.mark.parametrize("given", [["1"], {"cat_0": ["1"], "cat": ["1"]}, "1"])
def test_histories_of_another_form(predictor: Predictor, given: Any) -> None:
    """They were ignored, and the row was scored without."""
    with pytest.raises(InvalidRowError, match=r"row 1, column recent: .*lists: cat_0, cat_1\n"):
        predictor.predict([ROWS[0], {**ROWS[1], "recent": given}])


def test_rows_encoded_elsewhere(predictor: Predictor, expected: np.ndarray) -> None:
    """As batches of the training, or lists; without histories they are empty."""
    scorer = Scorer(predictor)
    encoded = predictor.workflow.transform(predictor.read(GIVEN))
    dense = encoded.dense.T
    columns = [ids.tolist() for ids in encoded.ids.columns]
    for j in (2, 3, 4):
        ends = encoded.ids.lengths[j].cumsum()[:-1]
        columns[j] = [ids.tolist() for ids in np.split(encoded.ids.column(j), ends)]
    rows = [list(row) for row in zip(*columns, strict=True)]
    np.testing.assert_allclose(scorer.predict(dense, rows), expected, atol=1e-6)
    empty = scorer.predict(dense, [row[:2] for row in rows])
    np.testing.assert_allclose(empty, predictor.predict(ROWS), atol=1e-6)
    with pytest.raises(SchemaError, match=r"pass \[rows, 2\]"):
        scorer.predict(dense, [row[:3] for row in rows])
    rows[4][2] = [-1]
    with pytest.raises(InvalidRowError, match=r"row 4, column recent\.cat_0: id -1"):
        scorer.predict(dense, rows)


def test_requests(predictor: Predictor, expected: np.ndarray) -> None:
    """JSON and tensors, with histories or without; wrong values name them."""
    limits, headers = ServerSettings(), {"content-type": "application/json"}

    def scored(parse: Any, body: dict) -> np.ndarray:
        rows, _ = parse(bytearray(json.dumps(body).encode()), headers, predictor, limits)
        return predictor.predict_encoded(rows.dense, rows.ids)[:, 0]

    for rows in (GIVEN, [*map(_nest, GIVEN)]):
        np.testing.assert_allclose(scored(parse_body, {"rows": rows}), expected, atol=1e-6)
    empty = predictor.predict(ROWS)
    np.testing.assert_allclose(scored(parse_body, {"rows": ROWS}), empty, atol=1e-6)
    for wrong in ([True], ["x"]):
        with pytest.raises(RefusedError) as error:
            scored(parse_body, {"rows": [ROWS[0], {**ROWS[1], "recent": {"cat_1": wrong}}]})
        assert error.value.details["row"] == 1
        assert error.value.details["column"] == "recent.cat_1"
    names = [tensor["name"] for tensor in describe_model(predictor)["inputs"]]
    assert {"recent.cat_0", "recent.cat_0.length"} <= {*names}
    inputs = request_of(to_tensors(list_inputs(predictor.row_spec), GIVEN))["inputs"]
    np.testing.assert_allclose(scored(parse_tensors, {"inputs": inputs}), expected, atol=1e-6)
    inputs = [tensor for tensor in inputs if "." not in tensor["name"]]
    np.testing.assert_allclose(scored(parse_tensors, {"inputs": inputs}), empty, atol=1e-6)
    # one history for all rows of a request, of which one has its own
    of_all, columns = LISTS[4], {name: [row[name] for row in ROWS] for name in ROWS[0]}
    wanted = predictor.predict([{**row, **of_all} for row in ROWS])
    assert np.abs(wanted - empty).max() > 0.01
    shared = _nest(of_all)
    for rows in (ROWS, columns):
        np.testing.assert_allclose(predictor.predict(rows, shared), wanted, atol=1e-6)
    for body in ({"rows": ROWS}, {"columns": columns}):
        found = scored(parse_body, {**body, "shared": shared})
        np.testing.assert_allclose(found, wanted, atol=1e-6)
    for count in (1, 2):
        lists = to_tensors(list_inputs(predictor.row_spec), [{**ROWS[0], **of_all}] * count)
        lists = request_of({name: lists[name] for name in lists if "." in name})["inputs"]
        if count == 1:
            found = scored(parse_tensors, {"inputs": [*inputs, *lists]})
            np.testing.assert_allclose(found, wanted, atol=1e-6)
            continue
        with pytest.raises(RefusedError, match=r"recent\.cat_0 has 2 rows of 55"):
            scored(parse_tensors, {"inputs": [*inputs, *lists]})
    own = predictor.predict([ROWS[0], {**ROWS[1], **LISTS[3]}], shared)
    np.testing.assert_allclose(own, predictor.predict([{**ROWS[0], **of_all}, GIVEN[1] | LISTS[3]]))
    body = json.dumps({"rows": ROWS, "shared": {"x": "y" * 40_000}}).encode()
    with pytest.raises(RefusedError, match="rows share may take 2 MiB"):
        parse_body(bytearray(body), headers, predictor, ServerSettings(max_body_mb=0.1))
    with pytest.raises(SchemaError, match="rows of type DataFrame"):
        predictor.predict(pd.DataFrame(columns), shared)


def test_onnx(
    bundle: tuple[Path, ModelWithTables], predictor: Predictor, expected: np.ndarray, tmp_path: Path
) -> None:
    """Histories are inputs, of which the newest events count."""
    export_onnx(bundle[0], tmp_path / "onnx")
    tensors = to_tensors(list_inputs(predictor.row_spec), GIVEN)
    np.testing.assert_allclose(score(tmp_path / "onnx", tensors), expected, atol=1e-6)


@pytest.mark.parametrize("model", ["dlrm", "din", "examples.attention:build"])
def test_a_trained_model_scores_its_batches(tmp_path: Path, model: str) -> None:
    """From the ETL's output to a bundle: what the loader hands out, the bundle scores."""
    write_log(tmp_path / "raw", [400, 300, 201], seed=5)
    run(EtlSettings(str(tmp_path / "raw"), tmp_path / "out", CRITEO, engine="cpu"))
    parquet = tmp_path / "out" / "criteo_binary" / "split"
    history = StoredHistory("recent", ("cat_3", "cat_5"))
    add_history(parquet, TableSchema.read(parquet), history, keys=20)
    paths = [f"--binary_path={parquet}", f"--save_checkpoint_path={tmp_path / 'checkpoint'}"]
    more = [] if model == "dlrm" else ["--sequences=recent", f"--model={model}"]
    train_here(*paths, *TRAINING, "--first_order=0.2", f"--max_events={MAX_EVENTS}", *more)
    made_from = tmp_path / "out" / "workflow", tmp_path / "checkpoint"
    write_bundle(*made_from, tmp_path / "bundle", build=load_build(model))
    loader = KJTLoader(parquet / "test", 64, device="cpu", max_events=2 * MAX_EVENTS)
    batches, trained = list(loader), model_of(tmp_path / "checkpoint")
    spread = functools.partial(spread_events, config=config_of(tmp_path / "checkpoint"))
    options: dict[str, Any] = {"device": "cpu", "max_events": MAX_EVENTS, "transforms": [spread]}
    newest = score_batches(trained, KJTLoader(parquet / "test", 64, **options))
    scorer = Scorer.load(tmp_path / "bundle")
    got = [scorer.predict(batch.dense_features, batch.sparse_features) for batch in batches]
    np.testing.assert_allclose(np.concatenate(got), 1 / (1 + np.exp(-newest[0])), atol=1e-6)
    assert Predictor.load(tmp_path / "bundle").predict(tmp_path / "raw" / "day_2").shape == (201,)
    if ":" in model:  # the file is compared with the bundle as it is written
        export_onnx(tmp_path / "bundle", tmp_path / "onnx")
