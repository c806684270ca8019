"""What the vectors of an own model are multiplied by is found, kept, and good enough."""

from __future__ import annotations

import dataclasses
import logging
import sys

import pytest
import torch
from torch import nn

from examples import deepfm
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.synthetic.click_model import SyntheticSettings
from nvt_torchrec.clicklog.synthetic.log import synthesize
from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.own_scale import find_scale
from tests.shell import ROOT
from tests.training.runs import small_run, train_here
from tests.training.shapes import dlrm

TEMPLATE = "--model=examples.deepfm:build"


def config_of(columns: int, dense: int = 2) -> ModelConfig:
    names = tuple(f"c{number}" for number in range(columns))
    numbers = tuple(f"d{number}" for number in range(dense))
    config = dlrm(numbers, names, (100,) * columns, 16, (), (), first_order=0.2)
    return dataclasses.replace(config, model="their:build", settings={})


class Layers(nn.Module):
    """Layers over vectors, whose logit is multiplied by ``factor``."""

    def __init__(self, columns, factor):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(columns.width, 64), nn.ReLU(), nn.Linear(64, 1))
        self.factor = factor

    def forward(self, dense, vectors):
        return self.factor * self.layers(torch.cat([dense, vectors.flatten(1)], 1))


def test_it_follows_from_what_the_module_computes():
    """Products at once, of few and of many columns; layers; and what is never small enough."""
    few, many = config_of(4), config_of(39)
    assert find_scale(few, deepfm.build, 0) == 1
    assert find_scale(many, deepfm.build, 0) < 1
    for config in (few, many):
        assert find_scale(config, lambda columns: Layers(columns, 1.0), 0) == 16
    assert find_scale(few, lambda columns: Layers(columns, 100.0), 0) < 4
    assert find_scale(few, lambda columns: Layers(columns, float("inf")), 0) == 0.25


def test_the_same_seed_gives_the_same_scale_and_random_numbers_stay():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    config = config_of(5)
    scales = {find_scale(config, deepfm.build, 1) for _ in range(3)}
    assert len(scales) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_keeps_it(data, tmp_path, caplog, monkeypatch):
    """A run that resumes takes it from there, whatever the module is now; a flag wins."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    caplog.set_level(logging.INFO, "nvt_torchrec")
    steps = [f"--checkpoint_dir={tmp_path / 'steps'}", "--checkpoint_freq=2", TEMPLATE]
    train_here(*small_run(data, tmp_path, *steps, "--max_steps=4"))
    record = CheckpointRecord.read(tmp_path / "final")
    assert f"--vector_scale {record.model['vector_scale']:g}, chosen by how far" in caplog.text
    monkeypatch.setattr("nvt_torchrec.training.sharding.own_scale._SCALES", (0.125,))
    (tmp_path / "final").rename(tmp_path / "first")
    train_here(*small_run(data, tmp_path, *steps, "--max_steps=6", "--resume"))
    again = CheckpointRecord.read(tmp_path / "final")
    assert again.model["vector_scale"] == record.model["vector_scale"] != 0.125
    train_here(*small_run(data, tmp_path / "given", TEMPLATE, "--vector_scale=3", "--max_steps=2"))
    assert CheckpointRecord.read(tmp_path / "given" / "final").model["vector_scale"] == 3


NARROW = """
from torch import nn

class Narrow(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.last = nn.Linear(len(columns.categorical) * columns.embedding_dim, 1)

    def forward(self, dense, vectors):
        return self.last(vectors.flatten(1))

build = Narrow
"""


def test_a_module_for_the_vectors_of_categorical_columns_alone(data, tmp_path, monkeypatch):
    """As they were written before dense columns had vectors; without these it trains."""
    (tmp_path / "narrow.py").write_text(NARROW)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    flags = small_run(data, tmp_path, "--model=narrow:build", "--max_steps=1")
    with pytest.raises(SettingsError, match=r"narrow.py.*\n.*columns\.width is the width"):
        train_here(*flags)
    train_here(*flags, "--dense_bins=0")


def test_the_template_learns_as_much_as_the_model_of_this_project(tmp_path, monkeypatch):
    """On the demo's log in small: with vectors four times as large its training diverged."""
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    synthesize(tmp_path / "raw", SyntheticSettings(days=12, rows_per_day=8000, seed=1))
    run(EtlSettings(tmp_path / "raw", tmp_path / "out", engine="cpu"))
    common = [f"--binary_path={EtlOutput(tmp_path / 'out').splits}", "--epochs=1"]
    common += ["--no-boosted_trees", f"--log_path={tmp_path / 'log'}"]

    def area(*flags: str) -> float:
        """The mean of valid and test, half a day each."""
        metrics = train(parse_settings([*common, *flags])).metrics
        return (metrics["valid"]["auroc"] + metrics["test"]["auroc"]) / 2

    built_in = area("--model=deepfm")
    assert area(TEMPLATE) > built_in - 0.005
