"""Files of rows whose aggregates are of events: with labels and without, with times and without."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadRowError
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.inference.bulk import predict_file
from nvt_torchrec.inference.model.bundle import save_bundle
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.workflows.description import inspect
from tests.etl.event_logs import BY_TIME, Row, frame_of, make_rows, spec_of, write
from tests.inference.bundles import make_origin
from tests.inference.reference import to_serve
from tests.training.runs import with_tables
from tests.training.shapes import dlrm


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Predictor, Path, list[Row]]:
    """A model of random weights, a log that is split by the time of its events, and its rows."""
    root = tmp_path_factory.mktemp("events")
    rows = make_rows(300, 3)
    write(root / "log.csv", rows)
    spec = spec_of(root, BY_TIME, "")
    run(EtlSettings(str(root / "log.csv"), root / "out", spec, engine="cpu"))
    workflow = root / "out/workflow"
    schema = inspect(workflow).table_schema
    config = dlrm(schema.dense, schema.categorical, schema.table_sizes, 8, (8,), (8, 1))
    config = dataclasses.replace(config, labels=schema.labels)
    model = with_tables(config, 1)
    bags = model.sparse_arch.embedding_bag_collection.embedding_bags
    for name, size in config.tables.items():  # they are not filled before
        fill_table(bags[name].weight.detach(), name, size, 8, 1, (0, 0))
    save_bundle(root / "bundle", workflow, to_serve(model, config), make_origin(0, (0,)))
    return Predictor.load(root / "bundle"), root / "log.csv", rows


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
@pytest.mark.parametrize("times", ["no column", "empty"])
def test_rows_with_labels_are_scored_without_a_time(
    scored: tuple[Predictor, Path, list[Row]], tmp_path: Path, kind: str, times: str
) -> None:
    """As in a request, they are of the end of the last day; their labels count."""
    predictor, log, rows = scored
    frame = pd.read_csv(log, dtype={"user": "string", "shop": "Int64"})
    frame = frame.drop(columns="time")
    if times == "empty":
        frame["time"] = pd.array([None] * len(frame), "Int64")
    file = tmp_path / f"rows.{kind}"
    if kind == "parquet":
        frame.to_parquet(file)
    elif kind == "csv":
        frame.to_csv(file, index=False)
    else:
        frame.to_json(file, orient="records", lines=True)
    found = predict_file(predictor, str(file), tmp_path / "scores.parquet", need_label=True)
    assert (found.rows, found.rejected) == (len(rows), 0)
    table = pq.read_table(tmp_path / "scores.parquet")
    assert table["label"].to_pylist() == [row.clicked for row in rows]
    requests = predictor.predict(frame_of(rows))
    np.testing.assert_allclose(table["probability"].to_numpy(), requests, rtol=1e-5)


def test_a_time_of_a_row_with_a_label_is_checked(
    scored: tuple[Predictor, Path, list[Row]], tmp_path: Path
) -> None:
    predictor, log, _ = scored
    head, first, *rest = log.read_text().splitlines()
    first = ",".join(["yesterday", *first.split(",")[1:]])
    (tmp_path / "rows.csv").write_text("\n".join([head, first, *rest, ""]))
    with pytest.raises(BadRowError, match="line 2: column time: 'yesterday'"):
        predict_file(predictor, str(tmp_path / "rows.csv"), tmp_path / "scores.parquet")
