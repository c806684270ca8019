from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from clicklog.errors import BadInputError, OutputError, SchemaError
from dlrm.checkpoint import check_destination, digest_of, load_model, read_model_file
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
    """Change what it says as if it had been written so."""
    file = path / "model.json"
    value = json.loads(file.read_text()) | values
    file.write_text(json.dumps(value | {"blake2b": digest_of(value)}))


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


def flip_a_bit(file: Path, byte: int) -> None:
    content = bytearray(file.read_bytes())
    content[byte] ^= 1
    file.write_bytes(content)


def test_a_flipped_bit_is_noticed_in_any_file(copy):
    """Also in the middle of a table, where the tensors would load without an error."""
    for name in (*read_model_file(copy)["files"], "model.json"):
        content = (copy / name).read_bytes()
        for byte in (len(content) // 2, len(content) // 3):
            flip_a_bit(copy / name, byte)
            with pytest.raises(BadInputError, match=rf"(?s){name}: (not what|cannot be read as)"):
                load_model(copy)
            (copy / name).write_bytes(content)
    load_model(copy)


def test_foreign_and_newer_checkpoints(copy):
    change_model_file(copy, version=3)
    with pytest.raises(SchemaError, match="version 3, this program reads 2"):
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

    (copy / ".metadata").write_bytes(pickle.dumps(Attack()))
    forged = {
        "bytes": (copy / ".metadata").stat().st_size,
        "blake2b": hashlib.blake2b((copy / ".metadata").read_bytes()).hexdigest(),
    }
    change_model_file(copy, files=read_model_file_unchecked(copy)["files"] | {".metadata": forged})
    with pytest.raises(BadInputError, match=r"\.metadata names posix\.mkdir"):
        load_model(copy)
    assert not (tmp_path / "attacked").exists()


def read_model_file_unchecked(path: Path) -> dict:
    return json.loads((path / "model.json").read_text())


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
