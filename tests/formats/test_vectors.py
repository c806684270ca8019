"""Vectors beside the splits: what is written is found again, and nothing else is read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.feature_spec.spec_variants import drop_tables
from nvt_torchrec.formats.feature_spec.toml_file import make_spec
from nvt_torchrec.formats.schema import SCHEMA_FILE, TableSchema
from nvt_torchrec.formats.vectors import (
    StoredVectors,
    VectorStore,
    VectorStores,
    count_inputs,
    link_vectors,
    write_vectors,
)

TEXT = StoredVectors("text", 3)
IMAGE = StoredVectors("image", 2, "float16")


def _write(directory: Path, vectors: StoredVectors, first: int, values: np.ndarray) -> None:
    with write_vectors(directory, vectors, first) as writer:
        for begin in range(0, len(values), 4):
            writer.append(values[begin : begin + 4])
        assert writer.count == len(values)


def _stores(directory: Path) -> tuple[VectorStores, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    text = rng.normal(size=(11, 3)).astype(np.float32)
    image = rng.normal(size=(5, 2)).astype(np.float16)
    _write(directory, TEXT, 0, text[:7])
    _write(directory, TEXT, 7, text[7:10])
    _write(directory, TEXT, 10, text[10:])
    _write(directory, IMAGE, 0, image)
    return VectorStores(directory, (TEXT, IMAGE)), text, image


def test_each_row_gets_its_vector_and_an_indicator(tmp_path):
    stores, text, image = _stores(tmp_path)
    assert [store.count for store in stores.stores] == [11, 5]
    assert count_inputs((TEXT, IMAGE)) == 7
    rng = np.random.default_rng(2)
    numbers = np.stack([rng.integers(-1, 11, 300), rng.integers(-1, 5, 300)]).astype(np.int32)
    taken = stores.take(numbers)
    assert (taken.dtype, taken.shape) == (np.float32, (300, 7))
    for row, (i, j) in zip(taken, numbers.T, strict=True):
        expected = [*(text[i] if i >= 0 else (0, 0, 0)), i >= 0]
        expected += [*(image[j].astype(np.float32) if j >= 0 else (0, 0)), j >= 0]
        np.testing.assert_array_equal(row, np.array(expected, np.float32))
    assert stores.take(np.empty((2, 0), np.int32)).shape == (0, 7)
    stores.check()


def test_many_rows_are_taken_in_blocks(tmp_path):
    wide = StoredVectors("wide", 60_000)
    values = np.arange(120_000, dtype=np.float32).reshape(2, 60_000)
    _write(tmp_path, wide, 0, values)
    out = np.full((11, 60_001), 7, np.float32)
    VectorStore(tmp_path, wide).take(np.array([0, 1, -1] * 3 + [1, 0], np.int32), out)
    np.testing.assert_array_equal(out[[0, 1, 10], :-1], values[[0, 1, 0]])
    assert not out[[2, 5, 8]].any()


@pytest.mark.parametrize("number", [11, -2, 2**31 - 1, -(2**31)])
def test_numbers_outside_are_refused(tmp_path, number):
    stores, _, _ = _stores(tmp_path)
    with pytest.raises(SchemaError, match=f"vector {number} of text, which has 11"):
        stores.take(np.array([[0, number], [0, 0]], np.int32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_when_they_are_read(tmp_path, value):
    stores, _, _ = _stores(tmp_path)
    file = tmp_path / "text" / "7" / "values.npy"
    values = np.load(file)
    values[1, 2] = value
    np.save(file, values)
    stores = VectorStores(tmp_path, (TEXT,))
    stores.take(np.array([[7, 9]], np.int32))
    with pytest.raises(SchemaError, match=r"7/values.npy: a value of vector 8 is not finite"):
        stores.take(np.array([[7, 8, 9]], np.int32))


def _replace(array: np.ndarray) -> Callable[[Path], None]:
    return lambda file: np.save(file, array)


def _truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4)


def _grow_header(file: Path) -> None:
    """Make the header claim more rows than there are bytes."""
    content = file.read_bytes()
    file.write_bytes(content.replace(b"(3, 3)", b"(9, 9)"))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_truncate, "not an .npy file|bytes"),
        (_grow_header, "not an .npy file|bytes"),
        (lambda file: file.write_bytes(b""), "not an .npy file"),
        (lambda file: file.unlink(), "No such file"),
        (lambda file: (file.unlink(), file.mkdir()), "values.npy"),
        (lambda file: (file.unlink(), os.mkfifo(file)), "values.npy"),
        (_replace(np.zeros((3, 3))), "holds float64"),
        (_replace(np.zeros((3, 3), ">f4")), "holds >f4"),
        (_replace(np.zeros(9, np.float32)), "in 2 dimensions"),
        (_replace(np.zeros((3, 4), np.float32)), "found 3 of width 4"),
        (_replace(np.zeros((0, 3), np.float32)), "found 0 of width 3"),
        (_replace(np.zeros((3, 0), np.float32)), "found 3 of width 0"),
        (_replace(np.asfortranarray(np.zeros((3, 3), np.float32))), "in 2 dimensions"),
        (_replace(np.array([["a"] * 3] * 3, object)), "not an .npy file|holds object"),
        (_replace(np.zeros((2, 3), np.float32)), "complete up to 9"),
        (_replace(np.zeros((4, 3), np.float32)), "complete up to 11"),
    ],
)
def test_damaged_files_are_refused(tmp_path, damage, message):
    _stores(tmp_path)
    damage(tmp_path / "text" / "7" / "values.npy")
    with pytest.raises(BadInputError, match=message):
        VectorStore(tmp_path, TEXT)


@pytest.mark.parametrize("name", ["3", "x", "07", "-1", "٧", "9" * 200])
def test_other_names_in_a_store_are_refused(tmp_path, name):
    _stores(tmp_path)
    (tmp_path / "text" / name).mkdir()
    with pytest.raises(BadInputError, match="on without a gap"):
        VectorStore(tmp_path, TEXT)


def test_a_store_without_its_first_part_is_refused(tmp_path):
    _stores(tmp_path)
    (tmp_path / "text" / "0").rename(tmp_path / "0")
    with pytest.raises(BadInputError, match="complete up to 0"):
        VectorStore(tmp_path, TEXT)
    with pytest.raises(BadInputError, match="No such file"):
        VectorStore(tmp_path, StoredVectors("other", 3))


def test_files_that_are_written_to_are_noticed(tmp_path):
    stores, _, _ = _stores(tmp_path)
    _truncate(tmp_path / "text" / "7" / "values.npy")
    with pytest.raises(BadInputError, match="written to or truncated"):
        stores.check()


def test_wrong_forms_are_not_written(tmp_path):
    with pytest.raises(ValueError, match=re.escape("vectors [n, 3], got [2, 4]")):
        _write(tmp_path, TEXT, 0, np.zeros((2, 4)))
    assert not (tmp_path / "text" / "0").exists()


def test_links_are_the_same_files_and_stay(tmp_path):
    stores, _, _ = _stores(tmp_path / "a")
    for name in ("text", "image", "absent"):
        link_vectors(tmp_path / "a", tmp_path / "b", name)
    link_vectors(tmp_path / "a", tmp_path / "b", "text")
    for part in ("text/0", "text/7", "text/10", "image/0"):
        files = [tmp_path / side / part / "values.npy" for side in "ab"]
        assert files[0].samefile(files[1])
    numbers = np.zeros((2, 4), np.int32)
    linked = VectorStores(tmp_path / "b", (TEXT, IMAGE))
    np.testing.assert_array_equal(linked.take(numbers), stores.take(numbers))


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/x", ".x", "a\0b", 3, None])
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(SchemaError, match="cannot be the name of a file"):
        StoredVectors(name, 3)


@pytest.mark.parametrize("width", [0, -1, 65_537, 10**9, 10**30, 2.5, "3", None, True])
def test_widths_that_cannot_be_are_refused(width):
    with pytest.raises(SchemaError, match="from 1 to 65536"):
        StoredVectors("text", width)


@pytest.mark.parametrize("dtype", ["float64", "int8", "object", "O", None])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(SchemaError, match="float32, float16"):
        StoredVectors("text", 3, dtype)


def _schema(**options) -> TableSchema:
    return TableSchema("label", ("d",), ("c",), (5,), **options)


def test_the_schema_keeps_vectors(tmp_path):
    schema = _schema(vectors=(TEXT, IMAGE))
    schema.write(tmp_path)
    assert TableSchema.read(tmp_path) == schema
    assert schema.columns == ["label", "d", "c", "text.vector", "image.vector"]
    assert str(schema.arrow.field("image.vector").type) == "int32"
    assert "vector" not in json.dumps(_schema().to_dict())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("width", 10**9), ("width", 0), ("width", "3"), ("dtype", "float64"),
        ("vector", "../../text"), ("vector", "other"), ("vector", ["text"]),
    ],
)  # fmt: skip
def test_a_schema_with_another_vector_is_refused(tmp_path, key, value):
    _schema(vectors=(TEXT,)).write(tmp_path)
    content = json.loads((tmp_path / SCHEMA_FILE).read_text())
    content["feature"][-1]["annotation"]["extraMetadata"][0][key] = value
    (tmp_path / SCHEMA_FILE).write_text(json.dumps(content))
    with pytest.raises((SchemaError, BadInputError), match="vector"):
        TableSchema.read(tmp_path)


@pytest.mark.parametrize("name", ["c", "d", "label"])
def test_a_schema_has_each_name_once(name):
    with pytest.raises(SchemaError, match=f"two columns are called {name}"):
        _schema(vectors=(StoredVectors(name, 3),))
    with pytest.raises(SchemaError, match="two columns are called"):
        _schema(vectors=(TEXT, TEXT))


def _spec(**vector: object) -> dict:
    return {
        "input": {"format": "csv"},
        "categorical": [{"names": "item", "raw": "int"}],
        "table": [{"name": "items", "path": "items.csv", "key": "item"}],
        "vector": [{"name": "text", "table": "items", "width": 3} | vector],
    }


def test_a_spec_has_vectors():
    spec = make_spec(_spec(**{"from": "embedding", "dtype": "float16"}), "spec.toml")
    (vector,) = spec.vectors
    assert (vector.column, vector.stored) == ("embedding", StoredVectors("text", 3, "float16"))
    assert [rule.name for rule in spec.joined_tables] == ["items"]
    assert make_spec(_spec(), "").vectors[0].column == "text"
    assert not drop_tables(spec).vectors
    assert drop_tables(spec, ["price"]).vectors == spec.vectors
    without = _spec()
    del without["vector"]
    assert "vector" not in json.dumps(make_spec(without, "").to_dict())


@pytest.mark.parametrize(
    ("vector", "message"),
    [
        ({"width": 10**9}, "width = 1000000000"),
        ({"width": 0}, "width = 0"),
        ({"width": 2.5}, "width"),
        ({"dtype": "float64"}, "dtype = 'float64'"),
        ({"table": "other"}, "table = 'other'"),
        ({"table": ""}, "table = ''"),
        ({"name": "../text"}, "cannot be the name"),
        ({"name": ".text"}, "cannot be the name"),
        ({"name": ""}, "cannot be the name"),
        ({"name": "item"}, "names used twice: item"),
        ({"name": "label"}, "names used twice: label"),
        ({"multi_hot": True}, "unknown key"),
    ],
)
def test_wrong_vectors_of_a_spec_are_refused(vector, message):
    with pytest.raises(SettingsError, match=message):
        make_spec(_spec(**vector), "spec.toml")


def test_a_spec_has_each_vector_once_and_not_too_many():
    value = _spec()
    value["vector"] *= 2
    with pytest.raises(SettingsError, match="names used twice: text"):
        make_spec(value, "spec.toml")
    value["vector"] = [{"name": f"v{i}", "table": "items", "width": 3} for i in range(101)]
    with pytest.raises(SettingsError, match="101 vectors"):
        make_spec(value, "spec.toml")
