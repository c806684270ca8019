from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from clicklog.errors import BadInputError, OutputError, SchemaError
from dlrm.checkpoint import check_destination, load_model, read_model_file
from tests.dlrm.runs import train_here


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> Path:
    """A checkpoint below the workflow that made its data."""
    workflow = data.parents[1] / "workflow"
    workflow.mkdir()
    (workflow / "metadata.json").write_text('{"digest": "abc"}')
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    train_here(f"--binary_path={data}", f"--save_checkpoint_path={path}", "--learning_rate=0.1")
    shutil.rmtree(workflow)
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change_model_file(path: Path, **values) -> None:
    file = path / "model.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_checkpoint_holds_what_is_listed_and_nothing_is_left_beside(saved):
    value = read_model_file(saved)
    assert sorted(value["files"]) == sorted({p.name for p in saved.iterdir()} - {"model.json"})
    assert value["training"]["workflow_digest"] == "abc"
    assert set(value["versions"]) == {"torch", "torchrec", "numpy"}
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def test_loads_anywhere(copy):
    model, config = load_model(copy)
    assert not model.training
    assert config.dense == ("int_0", "int_1", "int_2")


def test_missing_checkpoint(tmp_path):
    with pytest.raises(BadInputError, match="no such checkpoint directory"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(BadInputError, match=r"model\.json: no such file"):
        load_model(tmp_path)


def test_incomplete_or_truncated(copy):
    (part,) = copy.glob("*.distcp")
    content = part.read_bytes()
    part.write_bytes(content[:-7])
    with pytest.raises(BadInputError, match=f"{len(content) - 7} bytes, written were"):
        load_model(copy)
    part.unlink()
    with pytest.raises(BadInputError, match=r"missing\n.*incomplete"):
        load_model(copy)


def test_overwritten_bytes(copy):
    (part,) = copy.glob("*.distcp")
    part.write_bytes(b"\0" * part.stat().st_size)
    with pytest.raises(BadInputError, match="the checkpoint is damaged"):
        load_model(copy)


def test_foreign_and_newer_checkpoints(copy):
    change_model_file(copy, version=2)
    with pytest.raises(SchemaError, match="version 2, this program reads 1"):
        load_model(copy)
    change_model_file(copy, format="something else")
    with pytest.raises(SchemaError, match="no checkpoint of train_torchrec"):
        load_model(copy)
    (copy / "model.json").write_text("[1]")
    with pytest.raises(SchemaError, match="no checkpoint of train_torchrec"):
        load_model(copy)


def test_model_file_and_weights_that_do_not_fit(copy):
    config = read_model_file(copy)["model"]
    change_model_file(copy, model={**config, "num_embeddings": [10, 50, 201, 3]})
    with pytest.raises(SchemaError, match=r"t_cat_2\.weight is \[200, 8\], but .* says \[201, 8\]"):
        load_model(copy)
    change_model_file(copy, model={**config, "categorical": ["cat_0", "cat_1", "cat_2", "price"]})
    with pytest.raises(SchemaError, match=r"no weights .*t_price"):
        load_model(copy)
    change_model_file(copy, model={**config, "over_arch_layer_sizes": [1]})
    with pytest.raises(SchemaError, match=r"model\.json: no DLRM has"):
        load_model(copy)
    change_model_file(copy, model={**config, "over_arch_layer_sizes": [16, 4, 1]})
    with pytest.raises(SchemaError, match="over_arch"):
        load_model(copy)
    change_model_file(copy, model={"dense": []})
    with pytest.raises(SchemaError, match="not the configuration of a model"):
        load_model(copy)


def test_a_pickle_that_would_run_code_is_refused(copy, tmp_path):
    class Attack:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "attacked"),)

    content = pickle.dumps(Attack())
    (copy / ".metadata").write_bytes(content)
    files = read_files(copy) | {".metadata": len(content)}
    change_model_file(copy, files=files)
    with pytest.raises(BadInputError, match=r"\.metadata names posix\.mkdir"):
        load_model(copy)
    assert not (tmp_path / "attacked").exists()


def read_files(path: Path) -> dict[str, int]:
    return json.loads((path / "model.json").read_text())["files"]


def test_destination(saved, tmp_path):
    check_destination(tmp_path / "new")
    check_destination(tmp_path)
    with pytest.raises(OutputError, match="holds a checkpoint already"):
        check_destination(saved)
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(OutputError, match="is no empty directory"):
            check_destination(path)


def test_a_failed_write_leaves_nothing(data, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    path = tmp_path / "checkpoint"
    with pytest.raises(OutputError, match=r"cannot be written: .*No space left"):
        train_here(f"--binary_path={data}", f"--save_checkpoint_path={path}", "--learning_rate=0.1")
    assert not list(tmp_path.iterdir())


def test_parts_on_another_machines_disk_are_noticed(data, tmp_path, monkeypatch):
    def save(state, storage_writer, process_group):
        original(state, storage_writer=storage_writer, process_group=process_group)
        next(Path(storage_writer.path).glob("*.distcp")).unlink()

    original = dcp.save
    monkeypatch.setattr(dcp, "save", save)
    path = tmp_path / "checkpoint"
    with pytest.raises(
        OutputError, match=r"__0_0\.distcp.*cannot be seen here\n.*all machines share"
    ):
        train_here(f"--binary_path={data}", f"--save_checkpoint_path={path}", "--learning_rate=0.1")
    assert not list(tmp_path.iterdir())
