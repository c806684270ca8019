"""Vectors of the data in training: by every plan, resumed, continued, and what they gain."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.ids import Ids
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.formats.vectors import VALUES, VECTORS, StoredVectors, write_vectors
from nvt_torchrec.inference.model.scoring import JoinedTable, ServingModel
from nvt_torchrec.models.checkpoint.reading import read_model
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.config import ModelConfig, OwnModel
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.dense_vectors import DenseVectors
from nvt_torchrec.models.onnx_head import OnnxHead, export_head
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.baselines.vector_statistics import measure_vectors
from nvt_torchrec.training.data.loaders import TrainBatch
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop.finish import _permute_column
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.model_config import model_config
from tests.nvt_loader.data import add_history, add_vector, write_split
from tests.training.continuing import flags
from tests.training.generations import write_output
from tests.training.runs import (
    MODELS,
    assert_same,
    config_of,
    events,
    flags_of,
    losses,
    model_of,
    train_here,
    train_many,
    train_until_pulled,
)
from tests.training.shapes import dlrm
from tests.training.test_histories import RECENT

TEXT, PICTURE = StoredVectors("text", 6), StoredVectors("picture", 3, "float16")
SHORT = ["--first_order=0.5", "--seed=5", "--epochs=1", "--throughput_check_freq_within_epoch=1"]
OWN = "--model=tests.training.test_vectors:build_raw"
EVERY_MODEL = {**MODELS, "din": ["--model=din"], "own": [OWN]}
#: About the cosine of a text that decides, as the hidden cause of clicks.
DIRECTION = np.array([1.0, -2.0, 0.5, 0.0, 1.0, -1.0])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lists, a history and two vectors; the last step is empty on one of two ranks."""
    root = tmp_path_factory.mktemp("vectors") / "criteo_binary" / "split"
    files = {"train": [300, 200, 13], "valid": [99], "test": [50]}
    schema = write_split(root, files, table_sizes=(10, 50, 200, 50), multi_hot=("cat_3",))
    schema = add_history(root, schema, RECENT, keys=12)
    schema = add_vector(root, schema, TEXT, keys=60, offset=3, scale=5)
    add_vector(root, schema, PICTURE, keys=20, seed=1)
    return root


class Raw(nn.Module):
    """Layers over vectors and the values of one vector of the data, as they are."""

    def __init__(self, columns: Columns, names: tuple[str, ...]) -> None:
        super().__init__()
        self.vector_columns, self.length_columns = names, ("cat_3",)
        width = columns.width + 1
        for vectors in columns.dense_vectors:
            width += vectors.num_inputs if vectors.name in names else 0
        self.layers = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.last = nn.Linear(8, 1)

    def forward(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        lengths: torch.Tensor,
        dense_vectors: torch.Tensor,
    ) -> torch.Tensor:
        parts = [dense, vectors.flatten(1), dense_vectors / 8, lengths.float()]
        return self.last(self.layers(torch.cat(parts, 1)))


def build_raw(columns: Columns, names: tuple[str, ...] = ("picture", "text")) -> Raw:
    return Raw(columns, tuple(names))


def write_signal(root: Path, scale: float, offset: float, rows: int = 6000) -> Path:
    """A log whose clicks depend on a vector alone; half of them are of items that train lacks."""
    schema = write_split(root, {"train": [rows], "valid": [1000], "test": [2000]})

    def click(values: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-(values @ DIRECTION)))

    more = {"keys": 4000, "scale": scale, "offset": offset, "click": click}
    add_vector(root, schema, TEXT, **more)
    return root


@pytest.mark.parametrize(("scale", "offset"), [(1, 0), (0.02, 0), (300, 900), (1, 30)])
def test_what_only_a_vector_knows(tmp_path: Path, scale: float, offset: float) -> None:
    """Is found whatever its scale; without vectors there is nothing to find."""
    run = [f"--binary_path={write_signal(tmp_path / 'split', scale, offset)}", "--batch_size=64"]
    result = train_here(*run, "--epochs=2", f"--log_path={tmp_path / 'log'}")
    assert result.metrics["test"]["auroc"] > 0.87
    assert result.baselines["test"]["logistic regression"]["auroc"] < 0.55
    (event,) = events(tmp_path / "log", "importance")
    assert max(event["columns"], key=event["columns"].get) == "text"
    if scale == 1:
        assert train_here(*run, "--no-vectors").metrics["test"]["auroc"] < 0.55


def test_every_plan_trains_the_same(data: Path, tmp_path: Path) -> None:
    """Each model, by one rank and by two, whose last steps are uneven and padded."""
    runs, alone = {}, {}
    for name, model in EVERY_MODEL.items():
        for ranks, chosen in ((1, alone), (2, runs)):
            log = f"--log_path={tmp_path / name / str(ranks)}"
            more = [*SHORT, *model, log, "--max_events=5"]
            chosen[name] = flags(data, "adagrad", *more, batch=32 // ranks)
    train_many(list(runs.values()), 2)
    for name, run in alone.items():
        train_here(*run)
        expected, found = (losses(tmp_path / name / ranks) for ranks in "12")
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("more", [[], [OWN]], ids=["dlrm", "own"])
def test_a_killed_run_resumes_bit_by_bit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """With the vectors of the run; without them it is another model."""
    train_here(*flags_of(data, tmp_path / "whole", *more))
    train_until_pulled(monkeypatch, 25, *flags_of(data, tmp_path / "killed", *more))
    if not more:
        with pytest.raises(SchemaError, match=r"dense_vectors was .*text.*, is "):
            train_here(*flags_of(data, tmp_path / "killed", "--no-vectors"), "--resume")
    train_here(*flags_of(data, tmp_path / "killed", *more), "--resume")
    assert config_of(tmp_path / "killed" / "final").dense_vectors == (TEXT, PICTURE)
    assert_same(tmp_path / "whole" / "final", tmp_path / "killed" / "final")


def test_a_run_without_vectors_stays_without(data: Path, tmp_path: Path) -> None:
    """When it is tested or continued, and its checkpoint knows none of the new keys."""
    path = tmp_path / "final"
    train_here(*flags(data), "--no-vectors", "--max_steps=3", f"--save_checkpoint_path={path}")
    record = CheckpointRecord.read(path).model
    assert "dense_vectors" not in record
    train_here(f"--binary_path={data}", "--mode=test", f"--load_checkpoint_path={path}")
    again = ["--max_steps=3", f"--load_checkpoint_path={path}"]
    train_here(*flags(data), *again, f"--save_checkpoint_path={tmp_path / 'again'}")
    assert not config_of(tmp_path / "again").dense_vectors


def test_vectors_of_new_keys(tmp_path: Path) -> None:
    """Rows of a later generation are predicted as before, and trained on with new vectors."""
    outputs = {}
    for generation in (0, 2):
        outputs[generation] = write_output(tmp_path / f"out-{generation}", generation)
        schema = TableSchema.read(outputs[generation])
        add_vector(outputs[generation], schema, TEXT, keys=40, offset=2)
    checkpoint = tmp_path / "checkpoint"
    keep = f"--save_checkpoint_path={checkpoint}"
    train_here(*flags(outputs[0]), "--max_steps=8", keep)
    before, after = (
        train_here(f"--binary_path={path}", "--mode=test", f"--{how}={checkpoint}").metrics["test"]
        for path, how in ((outputs[0], "load_checkpoint_path"), (outputs[2], "continue_from"))
    )
    assert after == pytest.approx(before, abs=1e-6)

    with write_vectors(outputs[2] / VECTORS, TEXT, 40) as writer:
        writer.append(np.full((9, 6), 50.0))
    again = tmp_path / "again"
    more = [f"--continue_from={checkpoint}", f"--save_checkpoint_path={again}", "--max_steps=4"]
    train_here(*flags(outputs[2]), *more)
    then, now = (read_model(path)[1].dense_vectors for path in (checkpoint, again))
    assert torch.equal(then.center, now.center)  # else old rows would be predicted otherwise
    assert torch.equal(then.scale, now.scale)
    assert not torch.equal(then.layers[0].weight, now.layers[0].weight)
    with pytest.raises(SchemaError, match=r"dense_vectors was .*, is None"):
        train_here(*flags(outputs[2]), f"--continue_from={checkpoint}", "--no-vectors")


def test_statistics_are_those_of_the_rows(data: Path) -> None:
    """Of those that have a vector, and not of the stores, whose vectors may be in no row."""
    settings = parse_settings([f"--binary_path={data}", "--batch_size=8", "--embedding_dim=8"])
    config = config_for(data, settings)
    with process_group():
        found = measure_vectors(settings, config, None)
    assert found is not None
    values = torch.cat([batch.dense_vectors for batch in KJTLoader(data / "train", 50)]).numpy()
    text = values[values[:, 6] == 1, :6].astype(np.float64)
    np.testing.assert_allclose(found.center[:6], text.mean(0), rtol=1e-5)
    np.testing.assert_allclose(found.scale[0], np.sqrt(text.var(0).mean()), rtol=1e-5)
    assert found.center[6] == found.center[10] == 0
    assert found.scale[0] > 2
    with process_group():
        assert (
            measure_vectors(settings, dataclasses.replace(config, dense_vectors=()), None) is None
        )


def test_equal_vectors_are_not_divided_by_nothing(tmp_path: Path) -> None:
    """Only errors of rounding are left of them, and they say nothing."""
    root = tmp_path / "split"
    schema = write_split(root, {"train": [300], "valid": [50], "test": [50]})
    add_vector(root, schema, TEXT, keys=9, offset=0.3, scale=0)
    result = train_here(*flags(root), "--max_steps=5", f"--save_checkpoint_path={tmp_path / 'c'}")
    assert np.isfinite(result.metrics["test"]["log_loss"])
    layers = read_model(tmp_path / "c")[1].dense_vectors
    assert layers.scale.tolist() == [1]
    assert layers.center.tolist() == pytest.approx([0.3] * 6 + [0])


def config_for(data: Path, settings) -> ModelConfig:
    layers = {"dense_arch_layer_sizes": (8,), "over_arch_layer_sizes": (4, 1), "max_events": 5}
    return model_config(settings.fill_in({**layers, "dense_bins": 4}), TableSchema.read(data))


def test_layers_see_standardized_values() -> None:
    """By weights that were changed, or folded, or padded: the same results."""
    torch.manual_seed(0)
    layers = DenseVectors([(0, 4), (4, 10)], dim=5, labels=0)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.normal_()
    layers.center.copy_(torch.tensor([1.0, -2, 3, 0, 9, 9, 9, 9, 9, 0]))
    layers.scale.copy_(torch.tensor([2.0, 0.1]))
    values = torch.randn(7, 10)
    values[:, [3, 9]] = 1.0
    values[2, :4] = 0
    values[5, 4:] = 0
    expected = []
    for (begin, end), scale, layer in zip(
        [(0, 4), (4, 10)], layers.scale, layers.layers, strict=True
    ):
        indicator = values[:, end - 1 : end]
        standard = (values[:, begin : end - 1] - layers.center[begin : end - 1]) / scale
        expected.append(layer(torch.cat([standard * indicator, indicator], 1)))
    torch.testing.assert_close(layers(values), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layers(values)[2, 0], layers.layers[0].bias)
    layers.aligned = True
    torch.testing.assert_close(layers(values), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)
    state = set(layers.state_dict())
    layers.fold()
    torch.testing.assert_close(layers(values), torch.stack(expected, 1), rtol=1e-5, atol=1e-5)
    assert set(layers.state_dict()) == state


@pytest.mark.parametrize("name", EVERY_MODEL)
def test_what_is_served_is_what_was_trained(data: Path, tmp_path: Path, name: str) -> None:
    """By the module that scores rows and, of an own model, by the file of a bundle."""
    path = tmp_path / "final"
    more = [*EVERY_MODEL[name], f"--save_checkpoint_path={path}", "--max_events=5"]
    train_here(*flags(data, "adagrad", *SHORT, *more))
    build = build_raw if name == "own" else None
    rows, head, config = read_model(path, build=build)
    scorer = ServingModel.make(JoinedTable(rows), config, head)
    trained = model_of(path)
    if name == "din":  # its batches have a key for each event
        loader = KJTLoader(data / "test", 16, device="cpu", max_events=5)
        batch = next(iter(loader))
        with pytest.raises(ValueError, match="the model takes dense_vectors, but none are given"):
            score_batch(scorer, dataclasses.replace(batch, dense_vectors=None))
        assert torch.isfinite(score_batch(scorer, batch)).all()
        return
    for batch in KJTLoader(data / "test", 16, device="cpu", max_events=5):
        with torch.no_grad():
            expected = trained(batch.dense_features, batch.sparse_features, batch.dense_vectors)
        torch.testing.assert_close(score_batch(scorer, batch), expected, rtol=1e-4, atol=1e-5)
        if name in ("own", "original"):
            exported = OnnxHead(export_head(read_model(path, build=build)[1], config), config)
            other = ServingModel.make(scorer.table, config, exported)
            torch.testing.assert_close(score_batch(other, batch), expected, rtol=1e-4, atol=1e-5)


def score_batch(scorer: ServingModel, batch) -> torch.Tensor:
    """The logits of a loader's batch by the module that serves."""
    columns = batch.sparse_features.to_dict().values()
    lengths = np.stack([column.lengths().numpy() for column in columns]).astype(np.int64)
    ids = Ids.from_lengths(
        [column.values().numpy().astype(np.int64) for column in columns], lengths
    )
    vectors = None if batch.dense_vectors is None else batch.dense_vectors.numpy()
    dense = np.ascontiguousarray(batch.dense_features.numpy().T)
    return scorer.compute_logits(dense, scorer.lookup(ids), ids, vectors)


def test_own_models_that_name_no_vector(data: Path) -> None:
    """A sentence, before anything is trained."""
    run = flags(data, "adagrad", OWN, "--model_settings", 'names=["txt"]')
    with pytest.raises(
        SettingsError, match=r"'txt': vectors of the data are text, picture\n.*name"
    ):
        train_here(*run)
    with pytest.raises(SettingsError, match=r"'picture': vectors of the data are none"):
        train_here(*flags(data, "adagrad", OWN, "--no-vectors"))


def test_configurations_are_read_back() -> None:
    """Those without vectors are as they were."""
    plain = dlrm(("i",), ("a", "b"), (5, 7), 8, (8,), (4, 1), 0.5)
    assert "dense_vectors" not in plain.to_dict()
    own = OwnModel(vector_columns=("text",))
    config = dataclasses.replace(plain, dense_vectors=(TEXT, PICTURE), own=own)
    value = json.loads(json.dumps(config.to_dict()))
    assert ModelConfig.from_dict(value) == config
    assert config.vectors == ("a", "b", "text", "picture")
    assert config.vector_bounds == {"text": (0, 7), "picture": (7, 11)}
    assert config.vector_inputs == 11
    assert config.describe_differences(plain)
    for broken in (
        {"dense_vectors": [{"name": "text", "width": 10**9, "dtype": "float32"}]},
        {"dense_vectors": [{"name": "../text", "width": 5, "dtype": "float32"}]},
        {"dense_vectors": [vars(TEXT), vars(TEXT)]},
        {"own": {**vars(own), "vector_columns": ["other"]}},
    ):
        with pytest.raises(SchemaError):
            ModelConfig.from_dict({**value, **broken})


def test_other_ways_to_train(data: Path, tmp_path: Path) -> None:
    """In 16 bits, with weight decay, by Merlin's loader, and by trials."""
    found = {}
    for name, more in {
        "plain": [], "amp": ["--amp"], "decayed": ["--weight_decay=0.3"],
    }.items():  # fmt: skip
        path = tmp_path / name
        train_here(*flags(data, "adagrad", *SHORT, *more, f"--save_checkpoint_path={path}"))
        found[name] = float(read_model(path)[1].dense_vectors.layers[0].weight.norm())
    assert found["amp"] == pytest.approx(found["plain"], rel=0.05)
    assert found["decayed"] < 0.9 * found["plain"]
    train_here(*flags(data), "--loader=merlin", "--max_events=0", "--max_steps=2")
    settings = parse_settings([f"--binary_path={data}", "--epochs=1", "--no-boosted_trees"])
    with process_group() as group:
        assert train(settings, group).metrics["test"]["log_loss"] > 0


def test_a_vector_is_permuted_as_a_whole(data: Path) -> None:
    """To find how much it matters: all its values and the indicator, and no other vector."""
    settings = parse_settings([f"--binary_path={data}", "--batch_size=8", "--embedding_dim=8"])
    config = config_for(data, settings)
    (batch, *_) = KJTLoader(data / "train", 64, label=("label",), device="cpu", max_events=5)
    padded = TrainBatch.pad(batch, 70, 64)
    assert padded.dense_vectors.shape == (70, 11)
    assert not padded.dense_vectors[64:].any()
    order = torch.cat([torch.randperm(64), torch.arange(64, 70)])
    permuted = _permute_column(padded, "picture", config, order)
    assert torch.equal(permuted.dense_vectors[:, 7:], padded.dense_vectors[order, 7:])
    assert torch.equal(permuted.dense_vectors[:, :7], padded.dense_vectors[:, :7])
    assert (permuted.rows, permuted.global_size) == (64, 64)


def test_a_damaged_store_ends_the_run(tmp_path: Path) -> None:
    """With the file and the vector, and no checkpoint of what it made."""
    root = write_signal(tmp_path / "split", 1, 0, rows=500)
    file = root / VECTORS / "text" / "0" / VALUES
    values = np.load(file)
    values[:, 3] = np.nan
    np.save(file, values)
    path = tmp_path / "final"
    with pytest.raises(SchemaError, match=r"values\.npy: a value of vector \d+ is not finite"):
        train_here(*flags(root), f"--save_checkpoint_path={path}")
    assert not path.exists()
    file.unlink()
    with pytest.raises(Exception, match=re.escape(str(file))):
        train_here(*flags(root))
