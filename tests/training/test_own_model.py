"""A model of the user's own: what it must do, and a run that trains it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.models.checkpoint.reading import read_model
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.config import ModelConfig, OwnModel
from nvt_torchrec.models.contract import load_build
from nvt_torchrec.models.head import build_head
from nvt_torchrec.models.interactions import INTERACTIONS, Interaction
from nvt_torchrec.models.layers import join_vectors
from nvt_torchrec.models.onnx_head import OnnxHead, export_head
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.launch.preflight import trace_own_model
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.train_model import build_model
from tests.training.own_models import SOURCE, write_models
from tests.training.runs import EXAMPLE, assert_same, losses, small_run, train_here, train_many
from tests.training.shapes import dlrm

DEEP_FM = ["--model=their_models:deep_fm", "--model_settings", "hidden=12"]
RAW = ["--model=their_models:deep_fm", "--model_settings", 'pair=["cat_1", "cat_2"]', "means=true"]


@pytest.fixture(autouse=True)
def theirs(tmp_path, monkeypatch) -> Path:
    """The current directory; their module is imported from there."""
    monkeypatch.delitem(sys.modules, "their_models", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(write_models(tmp_path))
    return tmp_path


def tried(name: str, labels: tuple[str, ...] = ("label",), **settings):
    config = dlrm(("d",), ("a", "b", "c"), (9, 9, 9), 4, (), ())
    config = dataclasses.replace(config, model=name, settings=settings, labels=labels)
    with process_group() as group:
        return trace_own_model(config, load_build(name), 0, group, lists=("c",))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ("none", "build: TypeError: their_models:deep_fm returns NoneType, not a module"),
        ("script", "build: TypeError: .* returns a ScriptModule: return the module"),
        ("line", r"forward \(.*/their_models\.py:31\): RuntimeError: of their own"),
        ("shape", r"forward \(.*/their_models\.py:24\): ValueError: .* \[4, 3\] for 4 rows"),
        ("type", r"forward returns torch\.bool"),
        ("vectors", "backward .*no gradient reaches the embeddings"),
        ("unused", "backward .*no gradient reaches unused"),
        ("statistics", r"save .*changes norm.running_mean.*\n.*use nn\.BatchNorm1d"),
        ("lazy", r"build: TypeError: last\.weight has no shape .*nn\.Linear"),
        ("half", r"score .*ONNX Runtime cannot open.*\n.*float32"),
        ("branch", r"export .*\n.*cannot hold a branch"),
        ("seed", "load .*layers.0.weight has other initial values"),
        ("length", r"export .*\n.*tensor\.shape\[0\], not len"),
        ("operator", r"export .*linalg_svd.*\n.*common layers"),
        ("rows", "score .*scores of a row alone differ"),
        ("", None),
    ],
)
def test_a_stage_that_fails_is_named(broken, message):
    if message is None:
        assert tried("their_models:deep_fm", broken=broken).own.widest == 8
        assert tried("their_models:deep_fm", broken="sometimes").own
        assert tried("their_models:deep_fm", broken="fourier").own
        return
    with pytest.raises(SettingsError, match=f"--model their_models:deep_fm: .*{message}"):
        tried("their_models:deep_fm", broken=broken)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"pair": ["a", "d"]},
            r"columns \(.*:24\): .*'d': .* are a, b, c\n.*id_columns and",
        ),
        ({"pair": ["a", "c"]}, r"columns \(.*:24\): .*'c': it is a column of lists\n.*length_col"),
        ({"pair": ["b", "a"], "broken": "table"}, r"forward \(.*:38\): IndexError: index out of "),
        ({"pair": ["b", "a"], "broken": "sparse"}, r"backward .* wide\.weight is sparse"),
        ({"means": True, "broken": "empty"}, r"forward .*not finite\n.*lengths\.clamp\(min=1\)"),
    ],
    ids=["unknown", "list", "table", "sparse", "empty"],
)
def test_raw_inputs_that_do_not_fit(settings, message):
    """The largest id of a column and an empty list are tried before the first step."""
    with pytest.raises(SettingsError, match=f"--model their_models:deep_fm: {message}"):
        tried("their_models:deep_fm", **settings)


def test_a_logit_for_each_label():
    labels = ("x", "y", "z")
    assert tried("their_models:deep_fm", labels, broken="shape").own
    with pytest.raises(SettingsError, match=r"\[4\] for 4 rows; expected .* label, \[4, 3\]"):
        tried("their_models:deep_fm", labels)


def test_vectors_are_scaled_but_for_the_first_order_term():
    class Sum(nn.Module):
        def forward(self, dense, vectors):
            return vectors.sum((1, 2))

    config = dlrm((), ("a", "b"), (9, 9), 4, (), (), 0.5)
    config = dataclasses.replace(config, settings={}, vector_scale=4.0)
    vectors = torch.randn(5, 2, 4)
    sums = vectors.sum(1)
    logits = build_head(config, build=lambda columns: Sum())(torch.empty(5, 0), vectors)
    torch.testing.assert_close(logits.squeeze(1), 4 * sums[:, 1:].sum(1) + 0.5 * sums[:, 0])


def test_a_module_in_place_of_its_function():
    config = dataclasses.replace(dlrm((), ("a",), (9,), 4, (), ()), settings={})
    for module in (nn.Linear(1, 1), torch.jit.script(nn.Linear(1, 1))):
        with pytest.raises(SettingsError, match="is a module, not a function"):
            build_head(config, build=module)


def test_functions_that_are_not_there():
    for name, message in (
        ("their_models:deep", "no attribute 'deep'"),
        ("no_such_module:build", "No module named 'no_such_module'"),
    ):
        with pytest.raises(SettingsError, match=f"--model {name}: .*{message}"):
            load_build(name)
    with pytest.raises(SettingsError, match="unexpected keyword argument 'depth'"):
        tried("their_models:deep_fm", depth=3)
    for flags, message in (
        (["--model=deep"], "--model deep"),
        (["--model_settings", "hidden=3"], "no effect without --model"),
        ([*DEEP_FM, "--interaction_type=dcn"], "interaction_type has no effect with --model their"),
        ([*DEEP_FM, "=3"], "is not KEY=VALUE"),
        (["--model=deepfm", "--dcn_num_layers=2"], "has no effect without --interaction_type dcn"),
        (
            ["--model=deepfm", "--dense_arch_layer_sizes=8"],
            "no effect with --model deepfm.*\n.*dlrm",
        ),
        (["--model=deepfm", "--model_settings", "hidden=3"], "give --over_arch_layer_sizes"),
    ):
        with pytest.raises(SettingsError, match=message):
            parse_settings(flags)
    given = parse_settings([*DEEP_FM, "sizes=[4,2]", "name=x", "on=true"]).model_settings
    assert given == {"hidden": 12, "sizes": [4, 2], "name": "x", "on": True}


@pytest.mark.parametrize(
    "compute",
    [
        lambda dense, vectors: functional.normalize(vectors, dim=2).sum((1, 2)),
        lambda dense, vectors: functional.cosine_similarity(vectors[:, 0], vectors[:, 1]),
        lambda dense, vectors: functional.scaled_dot_product_attention(*[vectors] * 3).sum((1, 2)),
        lambda dense, vectors: torch.einsum("bfd,bgd->bfg", vectors, vectors).amax((1, 2)),
        lambda dense, vectors: functional.batch_norm(
            vectors, *torch.tensor([0.1, 2]).expand(3, 2).T
        ).sum((1, 2)),
        lambda dense, vectors: functional.bilinear(*vectors[:, :2].unbind(1), torch.ones(1, 4, 4)),
    ],
    ids=["normalize", "cosine_similarity", "attention", "einsum", "batch_norm", "bilinear"],
)
def test_operators_of_usual_models(compute):
    class Module(nn.Module):
        def forward(self, dense, vectors):
            return compute(dense, vectors)

    config = dlrm(("d",), ("a", "b", "c"), (9, 9, 9), 4, (), ())
    config = dataclasses.replace(config, own=OwnModel(), model="their_models:f", settings={})
    head = build_head(config, build=lambda columns: Module())
    exported = OnnxHead(export_head(head, config), config)
    rows = torch.randn(5, 1), torch.randn(5, 3, 4)
    torch.testing.assert_close(exported(*rows)[:, 0], compute(*rows).reshape(-1))


def test_two_ranks_train_and_resume_bitwise(data, theirs):
    """As one rank; and no module is imported because a checkpoint names it."""
    rates = [*EXAMPLE, "--adagrad", "--learning_rate=0.05", "--dense_bins=3", *RAW]

    def flags(name: str, *more: str, batch_size: int = 16) -> list[str]:
        return small_run(data, theirs / name, *rates, *more, batch_size=batch_size)

    steps = [f"--checkpoint_dir={theirs / 'steps'}", "--checkpoint_freq=7"]
    runs = [
        flags("whole"),
        flags("resumed", *steps, "--max_steps=17"),
        flags("resumed", *steps, "--resume"),
    ]
    runs[1] = [flag for flag in runs[1] if not flag.startswith("--save_checkpoint_path")]
    train_many(runs, 2)
    assert_same(theirs / "whole" / "final", theirs / "resumed" / "final")
    trained = losses(theirs / "whole" / "log")
    assert sum(trained[-10:]) < sum(trained[:10])
    load = [f"--load_checkpoint_path={theirs / 'whole' / 'final'}", "--mode=test"]
    one_rank = train_here(f"--binary_path={data}", *load, *RAW).metrics
    two_ranks = CheckpointRecord.read(theirs / "whole" / "final").training["metrics"]
    assert one_rank["test"]["log_loss"] == pytest.approx(two_ranks["test"]["log_loss"])
    del sys.modules["their_models"]
    name = RAW[0].removeprefix("--model=")
    with pytest.raises(SchemaError, match=f"code is not imported .*\n.*--model {name}"):
        read_model(theirs / "whole" / "final")
    assert "their_models" not in sys.modules
    config = read_model(theirs / "whole" / "final", build=load_build(name))[2]
    assert config.own.id_columns == ("cat_1", "cat_2")
    assert config.own.widest == 8  # of a layer, not of the table of 32 rows that ids look up
    assert config.model == name


def test_tables_grow_and_settings_are_kept(outputs, theirs, caplog, monkeypatch):
    common = [*EXAMPLE, "--batch_size=32", "--learning_rate=0.05", "--adagrad", "--max_steps=3"]
    first = [f"--save_checkpoint_path={theirs / 'first'}", *common, *DEEP_FM]
    train_here(f"--binary_path={outputs[0]}", *first)
    more = [f"--binary_path={outputs[2]}", f"--continue_from={theirs / 'first'}", *common]
    monkeypatch.delitem(sys.modules, "their_models")
    (theirs / "their_models.py").write_text(SOURCE.replace("nn.ReLU()", "nn.Sigmoid()"))
    train_here(*more, DEEP_FM[0], f"--save_checkpoint_path={theirs / 'second'}")
    assert re.search("first: the operators of --model their_models:deep_fm have", caplog.text)
    before, after = (CheckpointRecord.read(theirs / name).model for name in ("first", "second"))
    assert before["settings"] == after["settings"] == {"hidden": 12}
    assert before["vector_scale"] == after["vector_scale"] == 1  # there is no linear term
    assert sum(after["num_embeddings"]) > sum(before["num_embeddings"])
    with pytest.raises(SchemaError, match="hidden was 12, is 9"):
        train_here(*more, *DEEP_FM, "hidden=9")
    with pytest.raises(SchemaError, match="add --model their_models:deep_fm"):
        train_here(*more)


@dataclasses.dataclass(frozen=True)
class Sums(Interaction):
    """The sum of the vectors: an interaction without parameters, and without a size."""

    NAME = "sums"

    def build(self, vectors: int, dim: int, has_dense: bool) -> tuple[nn.Module, int]:
        class Module(nn.Module):
            def forward(self, dense, vectors):
                return join_vectors(dense, vectors).sum(1)

        return Module(), dim


def test_an_interaction_is_a_class_and_a_line(monkeypatch):
    """What trains and what a bundle builds of its record are the same."""
    monkeypatch.setitem(INTERACTIONS, "sums", Sums)
    summed = dlrm(("d",), ("a", "b"), (9, 9), 8, (16, 8), (16, 1), 0.2, Sums())
    trained = build_model(summed, seed=3).head
    record = json.loads(json.dumps(summed.to_dict()))
    served = build_head(ModelConfig.from_dict(record))
    served.load_state_dict(trained.state_dict())
    dense, vectors = torch.randn(5, 1), torch.randn(5, 2, 8)
    term, rest = trained.first_order(dense, vectors)
    module = trained.module
    expected = module.top(module.bottom(dense) + rest.sum(1)) + term
    torch.testing.assert_close(served(dense, vectors), expected)
    torch.testing.assert_close(trained(dense, vectors), expected)
