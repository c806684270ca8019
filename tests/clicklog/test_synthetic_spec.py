"""Synthetic logs of any spec: read back by the readers, and scored again."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from clicklog.missing import is_missing
from clicklog.readers.raw import find_days
from clicklog.readers.stream import stream_rows
from clicklog.rows import Jagged, RawRows
from clicklog.spec.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec, InputFormat
from clicklog.spec.toml_file import load_spec
from clicklog.synthetic.any_spec import (
    HUNDREDTHS,
    LONGEST_LIST,
    ItemLists,
    SpecModel,
    SpecRows,
    plant_spec,
)
from clicklog.synthetic.log import OracleScore, synthesize
from clicklog.synthetic.model import (
    BLOCK_ROWS,
    MISSING_COUNT,
    MISSING_VALUE,
    SIGNAL,
    SMALL,
    SyntheticSettings,
)
from clicklog.synthetic.write import prefix_of
from tests.clicklog.directories import contents

SETTINGS = SyntheticSettings(days=3, rows_per_day=BLOCK_ROWS + 300, seed=5)
RETAIL = load_spec("retail")
OTHER = FeatureSpec(
    "y",
    (DenseColumn("a", fill=3), DenseColumn("b", raw="float", fill=-1.5)),
    (
        CategoricalColumn("h", vocabulary="shared"),
        CategoricalColumn("hs", multi_hot=True, vocabulary="shared"),
        CategoricalColumn("i", raw="int", max_table_size=400_000),
        CategoricalColumn("is", raw="int", multi_hot=True, hash_buckets=7),
    ),
)
SPECS = {
    "csv": RETAIL,
    "parquet": dataclasses.replace(RETAIL, input=InputFormat("parquet")),
    "tsv": dataclasses.replace(RETAIL, input=InputFormat("tsv")),
    "tsv with header": dataclasses.replace(OTHER, input=InputFormat("tsv", header=True)),
    "other csv": dataclasses.replace(
        OTHER, input=InputFormat("csv", header=False, delimiter=";", list_separator="_")
    ),
    "other parquet": dataclasses.replace(OTHER, input=InputFormat("parquet")),
}


@pytest.fixture(scope="module", params=list(SPECS))
def log(request, tmp_path_factory) -> tuple[FeatureSpec, Path]:
    directory = tmp_path_factory.mktemp("log")
    synthesize(directory, SETTINGS, spec=SPECS[request.param], workers=2)
    return SPECS[request.param], directory


def _codes(values, column: CategoricalColumn) -> np.ndarray:
    """Codes of what a reader returned."""
    if column.raw != "string":
        return values.astype(np.int64)
    begin = len(prefix_of(column))
    texts = values.to_pylist()
    assert all(text[:begin] == prefix_of(column) for text in texts if text)
    return np.array([int(text[begin:], 16) if text else 0 for text in texts], np.int64)


def as_drawn(rows: RawRows, spec: FeatureSpec) -> SpecRows:
    """Rows that were read, as the model holds them."""
    dense = []
    for j, column in enumerate(spec.dense):
        numbers = rows.dense[j] * (HUNDREDTHS if column.raw == "float" else 1)
        whole = np.round(numbers).astype(np.int64)
        assert np.allclose(numbers, whole, atol=1e-9 * np.abs(numbers).max())
        dense.append(np.where(is_missing(rows.dense_missing, j), MISSING_COUNT, whole))
    categorical = []
    for j, (column, values) in enumerate(zip(spec.categorical, rows.categorical, strict=True)):
        absent = is_missing(rows.categorical_missing, j)
        if isinstance(values, Jagged):
            assert (absent == (np.diff(values.offsets) == 0)).all()
            categorical.append(ItemLists(values.offsets, _codes(values.values, column)))
        else:
            categorical.append(np.where(absent, MISSING_VALUE, _codes(values, column)))
    return SpecRows(rows.label.astype(np.int64), dense, categorical)


def _read(directory: Path, spec: FeatureSpec) -> list[SpecRows]:
    days = []
    for day in find_days(str(directory)):
        (streamed,) = stream_rows(day.path, spec, block_bytes=1 << 27)
        days.append(as_drawn(streamed[1], spec))
    return days


def _same(one: SpecRows, other: SpecRows) -> None:
    assert one.label.tolist() == other.label.tolist()
    for mine, theirs in zip(one.dense, other.dense, strict=True):
        assert (mine == theirs).all()
    for mine, theirs in zip(one.categorical, other.categorical, strict=True):
        if isinstance(mine, ItemLists):
            assert (mine.offsets == theirs.offsets).all()
            assert (mine.codes == theirs.codes).all()
        else:
            assert (mine == theirs).all()


def test_what_was_drawn_is_read_and_the_oracle_can_be_recomputed(log) -> None:
    spec, directory = log
    model = plant_spec(spec, SETTINGS)
    summary = json.loads((directory / "synthetic.json").read_text())
    endings = {"tsv": "", "csv": ".csv", "parquet": ".parquet"}
    names = [f"day_{day}{endings[spec.input.format]}" for day in range(3)]
    assert [file["file"] for file in summary["files"]] == names
    score = {"train": OracleScore(), "valid": OracleScore(), "test": OracleScore()}
    half = (SETTINGS.rows_per_day + 1) // 2
    for day, rows in enumerate(_read(directory, spec)):
        assert len(rows) == SETTINGS.rows_per_day
        drawn, logits = model.draw(day, 1, 300)
        tail = _tail(rows, 300)
        _same(tail, drawn)
        assert np.allclose(model.logits(tail.dense, tail.categorical), logits)
        assert summary["files"][day]["positives"] == int(rows.label.sum())
        logits = model.logits(rows.dense, rows.categorical)
        if day < 2:
            score["train"].add(logits, rows.label)
        else:
            score["valid"].add(logits[:half], rows.label[:half])
            score["test"].add(logits[half:], rows.label[half:])
    for split, one in score.items():
        recomputed = one.summary()
        assert recomputed["rows"] == summary["oracle"][split]["rows"]
        assert math.isclose(recomputed["auroc"], summary["oracle"][split]["auroc"], rel_tol=1e-6)
    assert summary["oracle"]["train"]["auroc"] > 0.75  # there is something to learn
    assert summary["cardinalities"] == model.cardinalities
    assert math.isclose(sum(summary["model"]["variance_shares"].values()), 1)


def _tail(rows: SpecRows, count: int) -> SpecRows:
    categorical = []
    for column in rows.categorical:
        if isinstance(column, ItemLists):
            offsets = column.offsets[-count - 1 :]
            categorical.append(ItemLists(offsets - offsets[0], column.codes[offsets[0] :]))
        else:
            categorical.append(column[-count:])
    return SpecRows(rows.label[-count:], [column[-count:] for column in rows.dense], categorical)


def test_same_bytes_whatever_the_workers(log, tmp_path: Path) -> None:
    spec, directory = log
    synthesize(tmp_path, SETTINGS, spec=spec, workers=1)
    assert contents(tmp_path) == contents(directory)


def _sample(spec: FeatureSpec, rows: int = 20_000, day: int = 23) -> tuple[SpecModel, SpecRows]:
    model = plant_spec(spec, SETTINGS)
    return model, model.draw(day, 0, rows)[0]


def test_the_signal_has_the_planned_size_and_shares() -> None:
    for spec in (RETAIL, OTHER):
        model = plant_spec(spec, SETTINGS)
        logits = np.concatenate([model.draw(day, 0, 4000)[1] for day in range(0, 24, 3)])
        assert abs(logits.std() / SIGNAL - 1) < 0.1
        assert model.shares.keys() == {"dense", "categorical", "interactions"}
        assert {name for term in model.terms for name in term.columns} == set(spec.columns[1:])
    lists_only = FeatureSpec("y", (), (CategoricalColumn("x", raw="int", multi_hot=True),))
    assert plant_spec(lists_only, SETTINGS).shares == {"categorical": 1.0}


def test_columns_of_one_vocabulary_draw_from_the_same_values() -> None:
    _, rows = _sample(RETAIL)
    by_name = dict(zip(RETAIL.categorical_names, rows.categorical, strict=True))
    shown = by_name["product"][by_name["product"] != MISSING_VALUE]
    seen_before = by_name["recent_products"].codes
    assert len(np.intersect1d(shown, seen_before)) > 0.8 * len(np.unique(shown))
    assert len(np.intersect1d(shown, by_name["country"])) == 0


def test_bounds_of_vocabularies_bind_and_hashed_columns_collide() -> None:
    settings = dataclasses.replace(SETTINGS, cardinality_scale=1.0)
    sizes = dict(
        zip(RETAIL.categorical_names, plant_spec(RETAIL, settings).cardinalities, strict=True)
    )
    columns = {column.name: column for column in RETAIL.categorical}
    assert sizes["product"] == sizes["recent_products"] == 2 * columns["product"].max_table_size
    assert sizes["user"] == 20 * columns["user"].hash_buckets
    small = plant_spec(RETAIL, SETTINGS).cardinalities
    assert min(small) > 1
    assert all(size >= SMALL for size in small if size not in (63, 155))


def test_lists_have_one_to_eight_values_or_are_missing() -> None:
    _, rows = _sample(RETAIL)
    (lists,) = (column for column in rows.categorical if isinstance(column, ItemLists))
    lengths = np.diff(lists.offsets)
    assert lengths.min() == 0
    assert lengths.max() == LONGEST_LIST
    assert 2 < lengths.mean() < 5
    assert len(lists.codes) == lengths.sum()


@pytest.mark.parametrize("name", ["criteo_1tb", "criteo_kaggle"])
def test_specs_of_criteos_columns_give_criteos_log(tmp_path: Path, name: str) -> None:
    settings = SyntheticSettings(days=1, rows_per_day=50)
    synthesize(tmp_path / "a", settings)
    synthesize(tmp_path / "b", settings, spec=load_spec(name))
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_command_line(tmp_path: Path) -> None:
    from etl.__main__ import main

    where = f"--output_path {tmp_path}/raw"
    assert main(f"synthesize {where} --spec retail --days 2 --rows_per_day 20".split()) == 0
    settings = SyntheticSettings(days=2, rows_per_day=20)
    synthesize(tmp_path / "again", settings, spec=RETAIL)
    assert contents(tmp_path / "raw") == contents(tmp_path / "again")
    assert main(f"synthesize {where}2 --spec retial".split()) == 2
