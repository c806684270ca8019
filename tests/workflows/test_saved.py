"""The directory a workflow is saved in: what is in it, and what loading refuses."""

from __future__ import annotations

import hashlib
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import nvt_torchrec.nvt_compat  # noqa: F401

import numpy as np
import nvtabular
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError, SettingsError
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.rows import make_empty_rows
from nvt_torchrec.workflows import compiled, nodes, vocabulary, writer
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.store import build, load
from nvt_torchrec.workflows.vocabulary import FittedVocabulary
from nvt_torchrec.workflows.writer import Fitted, write_workflow
from tests.mutations import edit_json, expect_own_errors, flip_bit

SPEC = FeatureSpec(
    label="label",
    dense=(DenseColumn("int_0"), DenseColumn("int_1", fill=3), DenseColumn("price", raw="float")),
    categorical=(
        CategoricalColumn("cat_0"),
        CategoricalColumn("cat_1", raw="string", vocabulary="words"),
        CategoricalColumn("cat_2", raw="string", vocabulary="words", multi_hot=True),
        CategoricalColumn("cat_3", raw="int", hash_buckets=9),
        CategoricalColumn("cat_4", raw="int", max_table_size=100, num_buckets=3),
    ),
)


def _state(first: int = 7) -> Fitted:
    def finish(values, column):
        counts = np.arange(len(values), 0, -1)
        return vocabulary.fit_vocabulary(values, counts, SPEC.categorical[column], 2)

    return Fitted(
        {name: {"mean": 1.0 + i, "std": 0.5} for i, name in enumerate(SPEC.dense_names)},
        {
            "cat_0": finish(np.array([first, 8, 2**32 - 1]), 0),
            "words": finish(pa.array(["é", "b"]), 1),
            "cat_3": finish(np.array([], np.int64), 3),
            "cat_4": finish(np.array([5]), 4),
        },
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "workflow"
    write_workflow(path, SPEC, _state())
    return path


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return shutil.copytree(saved, tmp_path / "copy")


def _change(path: Path, name: str, change: Callable[[Path], object]) -> None:
    """Change a file, and its size and digest in ``metadata.json`` with it."""
    change(path / name)
    data = (path / name).read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_json(path / "metadata.json", lambda value: value["files"].__setitem__(name, entry))


def _change_graph(path: Path, change: Callable[[list], object]) -> None:
    def edit(file: Path) -> None:
        edit_json(file, lambda value: change(value["nodes"]))

    _change(path, "graph.json", edit)


def test_what_is_on_disk(saved: Path) -> None:
    """JSON, parquet, and the arrays of the compiled form; nothing that is executed when read."""
    files = [path for path in saved.rglob("*") if path.is_file()]
    own = {str(path.relative_to(saved)) for path in files if "compiled" not in path.parts}
    assert {path.suffix for path in files} == {".json", ".parquet", ".npy"}
    description = inspect(saved)
    assert own == {"metadata.json", *description.files}
    categorify = {v.file.split("/")[1] for v in description.vocabularies.values()}
    assert all(name.startswith("node_") for name in categorify)
    table = pq.read_table(saved / description.vocabularies["cat_0"].file)
    assert table.to_pydict() == {"cat_0": [7, 8, 2**32 - 1], "cat_0_size": [3, 2, 1]}
    words = description.vocabularies["cat_1"]
    assert words == description.vocabularies["cat_2"]
    assert pq.read_table(saved / words.file).to_pydict() == {
        "words": ["é", "b"],
        "words_size": [2, 1],
    }
    assert not any(str(saved).encode() in path.read_bytes() for path in files)  # may be moved
    meta = pq.read_table(saved / words.file.replace("unique", "meta")).to_pydict()
    assert meta["kind"] == ["pad", "null", "oov", "unique"]
    assert meta["offset"] == [0, 1, 2, 3]
    assert meta["num_observed"] == [0, 2, 0, 3]


def test_digest_is_of_the_transform(saved: Path, tmp_path: Path) -> None:
    def digest(spec: FeatureSpec, state: Fitted) -> str:
        return write_workflow(tmp_path / "other", spec, state).digest

    own = inspect(saved).digest
    assert digest(SPEC, _state()) == own
    assert digest(SPEC, _state(first=9)) != own
    state = _state()
    state.statistics["int_0"]["mean"] += 1e-9
    assert digest(SPEC, state) != own
    state = _state()
    state.vocabularies["words"] = FittedVocabulary(
        pa.array(["éb", ""]), np.array([2, 1]), {"null": 2, "oov": 0, "unique": 3}
    )
    assert digest(SPEC, state) != own  # the same bytes, cut elsewhere
    value = SPEC.to_dict()
    value["input"] |= {"format": "csv", "delimiter": ",", "header": True}
    assert (
        digest(parse(FeatureSpec, value, "a spec"), _state()) == own
    )  # how rows were read is no matter


def test_state_that_is_not_whole(tmp_path: Path) -> None:
    state = _state()
    del state.vocabularies["words"]
    with pytest.raises(SchemaError, match="column cat_1: the workflow is not fitted"):
        write_workflow(tmp_path, SPEC, state)
    state = _state()
    state.statistics["int_1"]["std"] = float("inf")
    with pytest.raises(SchemaError, match=r"column int_1: its statistics are not finite.*inf"):
        write_workflow(tmp_path, SPEC, state)
    assert not (tmp_path / "metadata.json").exists()


def test_writing_again_begins_by_undoing(copy: Path) -> None:
    """A directory in which a write was cut short is no saved workflow."""
    state = _state()
    state.vocabularies["cat_3"] = None
    with pytest.raises(TypeError):
        write_workflow(copy, SPEC, state)
    with pytest.raises(BadInputError, match="no such file"):
        inspect(copy)


@pytest.mark.parametrize("broken", ["_compute_digest", "_format_graph", "_write_vocabulary"])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch, broken: str) -> None:
    monkeypatch.setattr(writer, broken, Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        write_workflow(tmp_path, SPEC, _state(), threads=3)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_is_no_directory(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"file/metadata.json: cannot be written"):
        write_workflow(tmp_path / "file", SPEC, _state())


def test_files_that_are_not_those_saved(saved: Path, tmp_path: Path) -> None:
    description = inspect(saved)
    for i, name in enumerate(description.files):
        path = shutil.copytree(saved, tmp_path / f"flipped{i}")
        flip_bit(path / name)
        with pytest.raises(BadInputError, match=f"{Path(name).name}: (not the |cannot be read)"):
            load(path)
        (path / name).write_bytes((path / name).read_bytes()[:-3])
        with pytest.raises(BadInputError, match=r"bytes instead of"):
            inspect(path)
        (path / name).unlink()
        with pytest.raises(BadInputError, match=f"{Path(name).name}: missing"):
            load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda records: records.pop(0),
        lambda records: records[1].update(op_class="subprocess.Popen"),
        lambda records: next(r for r in records if r["op_class"] == nodes.LAMBDA)["op_params"][
            "f"
        ].update(module="os", qualname="system"),
        lambda records: records[0].update(pickled="gASV"),
        lambda records: records[1]["op_state"]["categories"][0].update(path="../../x.parquet"),
        lambda records: records[1]["op_params"].update(max_size=True),
    ],
)
def test_graph_that_is_not_the_specs(copy: Path, change: Callable) -> None:
    """Also if every digest was made to fit: no operator or function of it is taken."""
    _change_graph(copy, change)
    with pytest.raises(BadInputError, match=r"graph\.json: not the graph of the spec"):
        load(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["statistics"]["int_0"].update(mean=0.0), r"not the graph of the spec"),
        (lambda v: v["vocabularies"]["words"].update(values=1), r"damaged: the last generation"),
        (lambda v: v["spec"]["categorical"].pop(), r"damaged: lineage\[0\] is not generation 0"),
        (lambda v: v["files"].pop("graph.json"), "'graph.json' is missing"),
        (lambda v: v.pop("spec"), "metadata.json: damaged: spec is missing"),
        (lambda v: v["vocabularies"].pop("words"), "metadata.json: damaged: vocabularies.words"),
        (lambda v: v["files"].update({"../up": {"bytes": 1, "sha256": ""}}), "'../up' is unknown"),
    ],
)
def test_metadata_that_was_edited(copy: Path, change: Callable, message: str) -> None:
    edit_json(copy / "metadata.json", change)
    with pytest.raises(BadInputError, match=message):
        load(copy)


def test_what_is_no_saved_workflow(saved: Path, tmp_path: Path) -> None:
    def directory(name: str, metadata: str = "", **files: bytes) -> Path:
        path = tmp_path / name
        path.mkdir()
        if metadata:
            (path / "metadata.json").write_text(metadata)
        for file, data in files.items():
            (path / file.replace("_", ".")).write_bytes(data)
        return path

    with pytest.raises(BadInputError, match="no such file"):
        load(tmp_path / "none")
    with pytest.raises(BadInputError, match=r"as a pickle\n.*`python -m etl run`"):
        load(directory("pickle", '{"versions": {}}', workflow_pkl=b"cposix\nsystem\n"))
    with pytest.raises(BadInputError, match=r"not a saved workflow.*\n.*nvtabular.Workflow.load"):
        load(directory("theirs", '{"versions": {"nvtabular": "26"}, "generated_timestamp": 1}'))
    with pytest.raises(BadInputError, match="not a saved workflow"):
        load(directory("list", "[]"))
    with pytest.raises(BadInputError, match="cannot be read"):
        load(directory("text", "{"))
    older = shutil.copytree(saved, tmp_path / "older")
    old_keys = {"thousands": "", "unit": ""}  # these were refused as damage
    edit_json(older / "metadata.json", lambda v: v["spec"]["dense"][0]["reading"].update(old_keys))
    assert load(older).output_schema.column_names == load(saved).output_schema.column_names
    newer = shutil.copytree(saved, tmp_path / "newer")
    edit_json(newer / "metadata.json", lambda v: v.update(format_version=3))
    edit_json(newer / "metadata.json", lambda v: v["versions"].update({"nvt-torchrec": "7.0"}))
    with pytest.raises(
        SchemaError, match=r"format version 3.*nvt-torchrec 7.0 wrote it\n.*version that saved it"
    ):
        load(newer)


def test_two_workflows_at_one_path(copy: Path) -> None:
    """NVTabular caches vocabularies by path: a second workflow there must not see the first's."""
    frame = pd.DataFrame(dict.fromkeys(SPEC.columns, "1"), index=[0, 1])
    frame["cat_0"] = ["7", "9"]
    assert load(copy).transform(frame)["cat_0"].tolist() == [3, 2]
    shutil.rmtree(copy)
    write_workflow(copy, SPEC, _state(first=9))
    assert load(copy).transform(frame)["cat_0"].tolist() == [2, 3]


def test_it_is_a_genuine_workflow(saved: Path) -> None:
    workflow = load(saved)
    assert isinstance(workflow, nvtabular.Workflow)
    assert type(load(saved, raw=False)) is nvtabular.Workflow
    assert set(workflow.input_schema.column_names) == set(SPEC.columns)
    assert set(load(saved, label=False).input_schema.column_names) == set(SPEC.columns[1:])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": "x", "b": "x", "a_b": ""}, "vocabulary x and column a_b.* both 'a_b'"),
        (
            {"a": "x", "b_c": "x", "a_b": "y", "c": "y"},
            "vocabulary y and vocabulary x.* both 'a_b_c'",
        ),
    ],
)
def test_names_that_nvtabular_would_confuse(columns: dict[str, str], message: str) -> None:
    """Categorify names the vocabulary of two columns after both, joined."""
    categorical = tuple(CategoricalColumn(n, vocabulary=v) for n, v in columns.items())
    with pytest.raises(SettingsError, match=message):
        build(FeatureSpec("label", (), categorical))


def _use(path: Path) -> None:
    """Use a workflow whose JSON was changed: errors of this project are the only ones."""
    workflow = compiled.load(path, verify=True)
    workflow.transform(make_empty_rows(workflow.spec))
    inspect(path).verify()


@pytest.mark.parametrize(("name", "rounds"), [("metadata", 400), ("compiled/compiled", 300)])
def test_any_json(copy: Path, name: str, rounds: int) -> None:
    expect_own_errors(copy / f"{name}.json", lambda: _use(copy), rounds=rounds)


def test_any_graph(copy: Path) -> None:
    """Whose digest is that in ``metadata.json``."""
    own = (copy / "metadata.json").read_text()

    def fit() -> None:
        (copy / "metadata.json").write_text(own)
        _change(copy, "graph.json", lambda _: None)

    expect_own_errors(copy / "graph.json", lambda: _use(copy), rounds=150, after=fit)


def test_a_pickled_workflow_is_mapped_from_nothing(copy: Path) -> None:
    pickled = pickle.loads(pickle.dumps(compiled.load(copy)))
    (copy / "compiled" / "tables.npy").write_bytes(b"")
    assert len(pickled.transform(make_empty_rows(SPEC))) == 0
