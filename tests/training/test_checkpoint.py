from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.models.checkpoint.reading import read_model
from nvt_torchrec.models.checkpoint.record import FORMAT, CheckpointRecord
from nvt_torchrec.models.checkpoint.tensor_files import Chunk, StoredTensor, check_locations
from nvt_torchrec.models.head import build_head
from tests.mutations import flip_bit
from tests.training.generations import DIGESTS, write_workflow
from tests.training.runs import train_here


@pytest.fixture(scope="module")
def saved(data, tmp_path_factory) -> Path:
    """A checkpoint below the workflow that made its data."""
    workflow = data.parents[1] / "workflow"
    write_workflow(workflow, 0)
    path = tmp_path_factory.mktemp("saved") / "checkpoint"
    train_here(f"--binary_path={data}", f"--save_checkpoint_path={path}", "--epochs=1")
    shutil.rmtree(workflow)
    return path


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def change_model_file(path: Path, **values) -> None:
    """Change what it says as if it had been written so."""
    file = path / "model.json"
    value = json.loads(file.read_text()) | values
    file.write_text(json.dumps(value | {"blake2b": FORMAT.digest(value)}))


def assert_refused(path: Path, message: str, **values) -> None:
    """Assert that a checkpoint is not loaded once its model file says these values."""
    change_model_file(path, **values)
    with pytest.raises(SchemaError, match=message):
        read_model(path)


def test_a_checkpoint_holds_what_is_listed_and_nothing_is_left_beside(saved):
    value = vars(CheckpointRecord.read(saved))
    assert sorted(value["files"]) == sorted({p.name for p in saved.iterdir()} - {"model.json"})
    assert value["training"]["workflow_digest"] == DIGESTS[0]
    assert set(value["versions"]) == {"torch", "torchrec", "numpy"}
    assert [p.name for p in saved.parent.iterdir()] == ["checkpoint"]


def test_missing_checkpoint(tmp_path):
    with pytest.raises(BadInputError, match="no such checkpoint directory"):
        read_model(tmp_path / "nowhere")
    with pytest.raises(BadInputError, match=r"model\.json: no such file"):
        read_model(tmp_path)


def test_a_flipped_bit_is_noticed_in_any_file(copy):
    """Also in the middle of a table, where the tensors would load without an error."""
    for name in (*CheckpointRecord.read(copy).files, "model.json"):
        content = (copy / name).read_bytes()
        for byte in (len(content) // 2, len(content) // 3):
            flip_bit(copy / name, byte)
            with pytest.raises(
                BadInputError, match=rf"(?s){name}: (not what|not the file|cannot be read as)"
            ):
                read_model(copy)
            (copy / name).write_bytes(content)
    read_model(copy)


def test_foreign_and_newer_checkpoints(copy):
    assert_refused(copy, "version 5, this program reads 4", version=5)
    assert_refused(copy, "not a checkpoint of train_torchrec", format="something else")
    (copy / "model.json").write_text("[1]")
    with pytest.raises(SchemaError, match="not a checkpoint of train_torchrec"):
        read_model(copy)


def test_model_file_and_weights_that_do_not_fit(copy):
    config = CheckpointRecord.read(copy).model
    larger = config | {"num_embeddings": [10, 50, 201, 3]}
    message = r"t_cat_2\.weight is \[200, 8\], but .* says \[201, 8\]"
    assert_refused(copy, message, model=larger)
    for change, message in (
        ({"categorical": ["cat_0", "cat_1", "cat_2", "price"]}, r"no weights .*t_price"),
        (
            {"over_arch_layer_sizes": [1]},
            r"no model of 1 labels has over_arch_layer_sizes \(1,\)",
        ),
        ({"over_arch_layer_sizes": [16, 4, 1]}, r"module\.top\.1"),
        ({"over_arch_layer_sizes": [1] * 100_000}, "no model has 100000 over_arch_layer_sizes"),
        (
            {"interaction_type": "dcn", "dcn_num_layers": 10**6, "dcn_low_rank_dim": 8},
            "1000000 dcn",
        ),
    ):
        layers = {key: item for key, item in change.items() if key != "categorical"}
        settings = config["settings"] | layers
        model = config | change if not layers else config | {"settings": settings}
        assert_refused(copy, message, model=model)
    assert_refused(copy, "not the configuration of a model", model={"dense": []})


class Attack:
    """Makes a directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


def forge(path: Path, name: str, content: bytes) -> None:
    """Put a file into a checkpoint as if it had been written so, digests and all."""
    (path / name).write_bytes(content)
    files = json.loads((path / "model.json").read_text())["files"]
    files[name] = {"bytes": len(content), "blake2b": hashlib.blake2b(content).hexdigest()}
    change_model_file(path, files=files)


def test_torchs_pickle_is_not_read(copy, tmp_path):
    forge(copy, ".metadata", pickle.dumps(Attack(tmp_path / "attacked")))
    read_model(copy)
    assert not (tmp_path / "attacked").exists()


def test_a_checkpoint_without_tensors_json(copy):
    files = read_record(copy)["files"]
    del files["tensors.json"]
    change_model_file(copy, files=files)
    with pytest.raises(BadInputError, match=r"model\.json: damaged: files\.tensors\.json is"):
        read_model(copy)


def place(path: Path, content: bytes) -> None:
    """Put the first tensor of a checkpoint behind the others, as other bytes, digests and all."""
    (part,) = path.glob("*.distcp")
    tensors = json.loads((path / "tensors.json").read_text())
    whole = part.read_bytes()
    forge(path, part.name, whole + content)
    chunk = next(iter(tensors.values()))["chunks"][0]
    chunk |= {"begin": len(whole), "length": len(content)}
    forge(path, "tensors.json", json.dumps(tensors).encode())


def test_code_in_a_tensors_place(copy, tmp_path):
    """Tensors are read by torch.load with weights_only."""
    buffer = io.BytesIO()
    torch.save({"x": Attack(tmp_path / "attacked")}, buffer)
    place(copy, buffer.getvalue())
    with pytest.raises(BadInputError, match="damaged"):
        read_model(copy)
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("pickled", [b"\x80\x02h\x05.", b"\x80\x02\x85.", b"\x80\x02K\x01Q."])
def test_pickles_that_are_none(copy, pickled):
    """A KeyError, an IndexError and an AssertionError of torch.load."""
    saved, forged = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1000), saved)
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(forged, "w") as target:
        for name in source.namelist():
            target.writestr(name, pickled if name.endswith("data.pkl") else source.read(name))
        target.writestr("more", bytes(100_000))
    place(copy, forged.getvalue())
    with pytest.raises(BadInputError, match="damaged"):
        read_model(copy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"file": "../../secret"}, "is not a file of a checkpoint"),
        ({"file": "__7_0.distcp"}, "__7_0.distcp: missing or too short"),
        ({"begin": 2**62}, "missing or too short"),
        ({"begin": -1}, "bytes -1"),
        ({"length": 3}, "is not a part of a tensor"),
        ({"sizes": [2**62, 2**62]}, "is not a part of a tensor"),
        ({"offsets": [0]}, "is not a part of a tensor"),
        ({"offsets": [-1, 0]}, "is not a part of a tensor"),
        ({"length": 10**30}, "expected an integer"),
        ({"code": "x"}, "code is unknown"),
    ],
)
def test_places_that_are_none(copy, change, message, monkeypatch):
    """And nothing is allocated for them."""
    built = []

    def build(config, *, device, build):
        built.append(device)
        return build_head(config, device=device, build=build)

    monkeypatch.setattr("nvt_torchrec.models.checkpoint.reading.build_head", build)
    tensors = json.loads((copy / "tensors.json").read_text())
    tensor = next(one for one in tensors.values() if len(one["size"]) == 2)
    tensor["chunks"][0] |= change
    forge(copy, "tensors.json", json.dumps(tensors).encode())
    with pytest.raises(BadInputError, match=message):
        read_model(copy)
    assert "cpu" not in built


@pytest.mark.parametrize(("begin", "good"), [(40, True), (39, False), (0, False)])
def test_chunks_do_not_share_bytes(tmp_path: Path, begin: int, good: bool) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
    tensors = {
        name: StoredTensor("float32", (10,), (Chunk((0,), (10,), "__0_0.distcp", at, 40),))
        for name, at in (("a", 0), ("b", begin))
    }
    if good:
        check_locations(tmp_path, tensors)
        return
    with pytest.raises(BadInputError, match="two chunks share the bytes"):
        check_locations(tmp_path, tensors)


def read_record(path: Path) -> dict:
    return json.loads((path / "model.json").read_text())


def test_parts_on_another_machines_disk_are_noticed(data, tmp_path, monkeypatch):
    def save(state, storage_writer, process_group):
        metadata = original(state, storage_writer=storage_writer, process_group=process_group)
        next(Path(storage_writer.path).glob("*.distcp")).unlink()
        return metadata

    original = dcp.save
    monkeypatch.setattr(dcp, "save", save)
    path = tmp_path / "checkpoint"
    with pytest.raises(
        OutputError, match=r"rank 0 does not see .*__0_0\.distcp.*\n.*all machines share"
    ):
        train_here(f"--binary_path={data}", f"--save_checkpoint_path={path}", "--epochs=1")
    assert not list(tmp_path.iterdir())
