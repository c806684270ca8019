"""The column with the correction for the popularity by which negatives are drawn."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.etl.extend.extend import extend
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.formats.splits import SPLITS
from tests.etl.findings import bad
from tests.etl.negative_logs import (
    BY_TIME,
    DAY,
    STARS,
    TABLE,
    load_negative_spec,
    make_likes,
    make_products,
    read_drawn,
    write_csv,
)
from tests.etl.runs import failing, read_split, settings, tree
from tests.etl.test_negatives import write_log

NAME = "log_q_correction"


def read_corrections(output: Path, split: str) -> list[tuple[int, int, bool, float]]:
    """Return number, item (-1: missing), whether it was drawn, and correction of each row."""
    values = read_split(output, split)[NAME].to_numpy()
    assert values.dtype == np.float32
    rows = []
    newest = None
    for (number, item, _), value in zip(read_drawn(output, split), values.tolist(), strict=True):
        rows.append((number, item, number == newest, value))
        newest = number
    return rows


def count_likes(output: Path) -> Counter[int]:
    """Return in how many training rows of the log with label 1 each item is."""
    return Counter(item for _, item, label in read_drawn(output, "train") if label and item >= 0)


def compute_corrections(
    counts: Counter[int], items: set[int], popularity: float
) -> dict[int, float]:
    """Return the logarithm of an even probability over the one by popularity, by item."""
    weights = {item: (1 + counts[item]) ** popularity for item in items}
    total = sum(weights.values())
    return {item: math.log((1 / len(items)) / (weights[item] / total)) for item in items}


@pytest.mark.parametrize("popularity", [0.5, 1, 2])
@pytest.mark.parametrize("table", [False, True])
def test_each_row_has_that_of_its_item(tmp_path: Path, popularity: float, table: bool) -> None:
    """Drawn or not; of an item that is never drawn it is 0."""
    likes, products = make_likes(600, 3), make_products()
    products = [product for product in products if product.id != 3]
    write_log(tmp_path / "raw", likes, products)
    negatives = f"popularity = {popularity}"
    if table:
        negatives += '\nfrom = "items"'
    spec = load_negative_spec(tmp_path, BY_TIME, negatives=negatives, more=TABLE if table else "")
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    assert TableSchema.read(tmp_path / "out/criteo_binary/split").log_q_correction == NAME
    items = {int(like.item) for like in likes if like.item}
    if table:
        items = {product.id for product in products}
    counts = count_likes(tmp_path / "out")
    expected = compute_corrections(counts, items, popularity)
    seen = Counter()
    for split in SPLITS:
        for _, item, drawn, value in read_corrections(tmp_path / "out", split):
            assert value == pytest.approx(expected.get(item, 0.0), rel=1e-6, abs=1e-6), item
            seen[drawn, item in expected] += 1
    assert seen.keys() == {(False, False), (False, True), (True, True)}
    assert max(expected.values()) - min(expected.values()) > popularity
    assert bad(tmp_path / "out") == []


def test_drawn_evenly_there_is_no_such_column(tmp_path: Path) -> None:
    """All other columns, and the rows, are those of a run by popularity with the power 0."""
    write_log(tmp_path / "raw", make_likes(300, 3), make_products())
    for name, negatives in {"none": "", "zero": "popularity = 0.0"}.items():
        spec = load_negative_spec(tmp_path, negatives=negatives)
        run(settings(tmp_path / "raw", tmp_path / name, spec))
    none, zero = tree(tmp_path / "none"), tree(tmp_path / "zero")
    assert {name for name in none if name.endswith(".parquet")}
    for name in none:
        if name.endswith(".parquet") or name.endswith(str(SCHEMA_FILE)):
            assert none[name] == zero[name], name
            assert NAME.encode() not in none[name], name


def test_days_that_are_added_keep_it(tmp_path: Path) -> None:
    """Counts and centre are those of the first run; an item that it did not know counts 0."""
    likes, products = make_likes(500, 4, items=30), make_products()
    write_log(tmp_path / "raw", [like for like in likes if like.time < 3 * DAY], products)
    spec = load_negative_spec(tmp_path, negatives="popularity = 0.75")
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    items = {int(like.item) for like in likes if like.item and like.time < 3 * DAY}
    expected = compute_corrections(count_likes(tmp_path / "out"), items, 0.75)
    centre = sum((1 + count_likes(tmp_path / "out")[item]) ** 0.75 for item in items) / len(items)
    before = tree(tmp_path / "out")
    write_csv(tmp_path / "day_3.csv", [like for like in likes if like.time >= 3 * DAY])
    options = {"output_path": tmp_path / "out", "engine": "cpu"}
    extend(ExtendSettings(input_path=str(tmp_path / "day_3.csv"), **options))
    new_items = set()
    for split in SPLITS:
        for _, item, _, value in read_corrections(tmp_path / "out", split):
            if item >= 0:
                assert value == pytest.approx(expected.get(item, math.log(centre)), rel=1e-6)
                new_items |= {item} - items
    assert len(new_items) > 3
    assert bad(tmp_path / "out") == []
    extend(ExtendSettings(undo=True, **options))
    after = tree(tmp_path / "out")
    assert {name: after[name] for name in before} == before


def test_an_interrupted_run_writes_the_same(tmp_path: Path) -> None:
    write_log(tmp_path / "raw", make_likes(300, 3), make_products())
    spec = load_negative_spec(tmp_path, negatives='from = "items"\npopularity = 1', more=TABLE)
    run(settings(tmp_path / "raw", tmp_path / "whole", spec, workers=1))
    for function in ("etl.engines.host.encode_block", "etl.finish.report.write_report"):
        with failing(f"nvt_torchrec.{function}", OSError("stop")):
            run(settings(tmp_path / "raw", tmp_path / "out", spec))
    run(settings(tmp_path / "raw", tmp_path / "out", spec))
    for split in SPLITS:
        frames = (read_split(tmp_path / out, split) for out in ("whole", "out"))
        pd.testing.assert_frame_equal(*frames)


def test_a_column_of_that_name_is_refused(tmp_path: Path) -> None:
    label = f'{STARS}\n[weight]\nname = "{NAME}"'
    with pytest.raises(SettingsError, match=f"column {NAME}") as caught:
        load_negative_spec(tmp_path, label=label, negatives="popularity = 1")
    assert caught.value.remedy
    load_negative_spec(tmp_path, label=label)
