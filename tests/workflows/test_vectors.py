"""Vectors of rows in memory, found by keys and times."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.clicklog.in_memory.frames import read_columns
from nvt_torchrec.etl.run import run
from nvt_torchrec.workflows import compiled
from tests.etl.runs import settings
from tests.etl.vector_logs import (
    VERSIONS,
    Item,
    Row,
    expected_vectors,
    load_vector_spec,
    make_items,
    make_rows,
    write_days,
    write_items,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Row], list[Item]]:
    """A workflow, and rows and items of its log."""
    directory = tmp_path_factory.mktemp("vectors")
    rows, items = make_rows(200, 3), make_items(versions=4)
    write_days(directory / "raw", rows)
    write_items(directory / "raw/items.csv", items)
    spec = load_vector_spec(directory, versions=VERSIONS)
    run(settings(directory / "raw", directory / "out", spec))
    return directory / "out/workflow", rows, items


def to_frame(rows: list[Row]) -> pd.DataFrame:
    """Return rows without labels, as a caller has them."""
    frame = pd.DataFrame([dataclasses.asdict(row) for row in rows]).drop(columns="clicked")
    frame["item"] = frame["item"].where(frame["item"] >= 0, np.nan)
    return frame


def test_rows_find_their_vectors(made) -> None:
    path, rows, items = made
    workflow = compiled.load(path, verify=True)
    raw = read_columns(to_frame(rows), workflow.spec)
    encoded = workflow.transform(raw)
    taken = workflow.take_vectors(encoded)
    np.testing.assert_array_equal(taken, expected_vectors(items, rows, delay=3600))
    graph = (path / "graph.json").read_text()  # NVTabular's own workflow has none
    assert '"price"' in graph
    assert '"text' not in graph


def test_rows_that_were_not_looked_up_have_none(made) -> None:
    path, rows, _ = made
    workflow = compiled.load(path)
    raw = read_columns(to_frame(rows), workflow.spec)
    encoded = dataclasses.replace(workflow.transform(raw), vector_rows=None)
    encoded = dataclasses.replace(encoded, labels=np.zeros((1, len(rows)), np.float32))
    with pytest.raises(SchemaError, match="rows without vectors"):
        compiled.to_table(encoded, workflow.schema)


def test_a_store_that_is_cut_short_in_use_is_noticed(made, tmp_path: Path) -> None:

    path, rows, _ = made
    shutil.copytree(path, tmp_path / "workflow")
    workflow = compiled.load(tmp_path / "workflow")
    raw = read_columns(to_frame(rows), workflow.spec)
    encoded = workflow.transform(raw)
    file = tmp_path / "workflow/vectors/text/0/values.npy"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(BadInputError, match="written to or truncated"):
        workflow.take_vectors(encoded)
