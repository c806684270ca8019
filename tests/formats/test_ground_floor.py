"""Spec, schema, splits, files, errors."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import (
    BadInputError,
    ClickLogError,
    SchemaError,
    SettingsError,
    run_command,
)
from nvt_torchrec.base.files.atomic import atomic_path, read_json, write_json, write_text
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn
from nvt_torchrec.formats.feature_spec.toml_file import load_spec, shipped_specs
from nvt_torchrec.formats.schema import TableSchema
from tests.spec_logs import spec_of


def test_criteo_spec_is_torchrecs() -> None:
    from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES, DEFAULT_LABEL_NAME

    spec = load_spec()
    assert spec.columns == [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]


def test_spec_file(tmp_path: Path) -> None:
    spec = spec_of(
        'dense_transform = "log"\n[label]\nname = "click"\n'
        '[[dense]]\nnames = "n{0..1}"\nfill = -1\n'
        '[[categorical]]\nnames = ["user", "ad"]\nfreq_threshold = 3\n',
        tmp_path,
    )
    assert spec.columns == ["click", "n0", "n1", "user", "ad"]
    assert spec.dense[1] == DenseColumn("n1", fill=-1)
    assert spec.categorical[0] == CategoricalColumn("user", freq_threshold=3)
    assert spec.dense_transform == "log"


def test_shipped_specs_by_name_and_by_path(tmp_path: Path) -> None:
    shipped = ["avazu", "census", "criteo_1tb", "criteo_kaggle", "criteo_x1", "criteo_x4"]
    assert list(shipped_specs()) == [*shipped, "movielens", "movielens_latest", "retail"]
    assert load_spec("criteo_1tb") == load_spec()
    assert load_spec("criteo_1tb").is_criteo_format
    kaggle = load_spec("criteo_kaggle")
    assert kaggle.columns == load_spec().columns
    assert {column.freq_threshold for column in kaggle.categorical} == {10}
    (tmp_path / "mine.toml").write_text(shipped_specs()["retail"].read_text())
    assert load_spec(tmp_path / "mine.toml") == load_spec(str(tmp_path / "mine.toml"))
    retail = load_spec("retail")
    assert load_spec(tmp_path / "mine.toml") == retail
    assert not retail.is_criteo_format
    (hashed,) = (column for column in retail.categorical if column.hash_buckets)
    assert (hashed.oov_ids, hashed.reserved_ids) == (100_000, 100_002)
    with pytest.raises(SettingsError, match=r"'criteo_1t'.*\n.*did you mean 'criteo_1tb'"):
        load_spec("criteo_1t")


SCHEMA = TableSchema("label", ("int_0", "int_1"), ("cat_0", "cat_1", "tags"), (10, 3, 7), ("tags",))


def test_schema_round_trip(tmp_path: Path) -> None:
    """With the vocabularies that columns share, as Merlin names them."""
    SCHEMA.write(tmp_path)
    assert (
        TableSchema.read(tmp_path)
        == SCHEMA
        == dataclasses.replace(SCHEMA, vocabularies=("a", "b", "c"))
    )
    shared = dataclasses.replace(SCHEMA, table_sizes=(7, 3, 7), vocabularies=("v", "cat_1", "v"))
    shared.write(tmp_path)
    assert TableSchema.read(tmp_path) == shared
    with pytest.raises(SchemaError, match=r"cat_0 and tags share the vocabulary v, .* 10 and 7"):
        dataclasses.replace(shared, table_sizes=(10, 3, 7))
    assert SCHEMA.num_embeddings_per_feature == "10,3,7"


def test_schema_with_more_labels_and_a_weight(tmp_path: Path) -> None:
    """Merlin takes all labels for targets, and the weight for neither target nor feature."""
    import nvt_torchrec.nvt_compat  # noqa: F401

    from merlin.io import Dataset
    from merlin.schema import Tags

    schema = dataclasses.replace(SCHEMA, labels=("label", "bought", "liked"), weight="w")
    wanted = ["label", "bought", "liked", "w", "int_0", "int_1", "cat_0", "cat_1", "tags"]
    assert schema.columns == schema.arrow.names == wanted
    assert [str(kind) for kind in schema.arrow.types[:6]] == ["float"] * 6
    schema.write(tmp_path)
    assert TableSchema.read(tmp_path) == schema
    row = [0.0] * 6 + [1, 1, [2]]
    table = pa.table([[value] for value in row], schema=schema.arrow)
    pq.write_table(table, tmp_path / "part.0.parquet")
    merlin = Dataset(str(tmp_path), engine="parquet").schema
    assert merlin.column_names == wanted
    assert merlin.select_by_tag(Tags.TARGET).column_names == list(schema.labels)
    assert merlin.select_by_tag(Tags.CONTINUOUS).column_names == list(schema.dense)
    assert merlin.select_by_tag("sample_weight").column_names == ["w"]
    assert merlin.select_by_tag(Tags.CATEGORICAL).column_names == list(schema.categorical)
    assert merlin["cat_0"].properties["embedding_sizes"]["cardinality"] == 10
    assert [merlin[name].dtype.name for name in ("cat_0", "int_0")] == ["int32", "float32"]
    for name in schema.categorical:
        assert merlin[name].is_list == merlin[name].is_ragged == (name == "tags")
    value = read_json(tmp_path / ".merlin" / "schema.json", "")
    value["feature"][4]["annotation"]["tag"] = ["sample_weight"]
    write_json(tmp_path / ".merlin" / "schema.json", value)
    with pytest.raises(SchemaError, match="w and int_0 have the tag sample_weight"):
        TableSchema.read(tmp_path)


def test_schema_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"schema.json: no such file"):
        TableSchema.read(tmp_path)
    write_json(tmp_path / ".merlin" / "schema.json", {"feature": []})
    with pytest.raises(SchemaError, match=r"no label: .*tag target\n.*AddTags\(\[Tags.TARGET\]\)"):
        TableSchema.read(tmp_path)
    label = {"name": "y", "annotation": {"tag": ["target"]}}
    write_json(tmp_path / ".merlin" / "schema.json", {"feature": [label]})
    with pytest.raises(SchemaError, match=r"no categorical column: .*\n.*Categorify"):
        TableSchema.read(tmp_path)
    feature = {"name": "c", "annotation": {"tag": ["categorical"]}}
    write_json(tmp_path / ".merlin" / "schema.json", {"feature": [feature]})
    with pytest.raises(SchemaError, match=r"column c has no table size.*\n.*HashedCross"):
        TableSchema.read(tmp_path)
    with pytest.raises(SchemaError, match="2 categorical columns, 1 table sizes"):
        TableSchema("label", (), ("a", "b"), (1,))
    with pytest.raises(SchemaError, match=r"column b: a table of 17179869184 rows; int32"):
        TableSchema("label", (), ("a", "b"), (2**31 - 1, 2**34))


def test_a_file_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "file"

    def fail() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(path.parent.iterdir()) == []
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_an_error_of_another_file_is_not_the_outputs(tmp_path: Path) -> None:
    def copy() -> None:
        with atomic_path(tmp_path / "copy") as temporary:
            temporary.write_bytes((tmp_path / "none").read_bytes())

    with pytest.raises(FileNotFoundError):
        copy()
    assert list(tmp_path.iterdir()) == []


def test_errors_survive_processes_and_end_with_status_2(capsys: pytest.CaptureFixture) -> None:
    error = BadInputError("what", "remedy")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == "what\n  -> remedy"

    def main() -> None:
        raise error

    assert run_command(main) == 2
    assert capsys.readouterr().err == "error: what\n  -> remedy\n"
    assert isinstance(error, ClickLogError)
    assert run_command(lambda: None) == 0
    with pytest.raises(ZeroDivisionError):
        run_command(lambda: 1 // 0)
