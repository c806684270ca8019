"""CUDA graphs, on a stand-in: the real ones are tested by tests/gpu."""

from __future__ import annotations

import contextlib
import gc

import numpy as np
import pytest

from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.graphs import replay_dense
from nvt_torchrec.dlrm.model import build_dlrm
from tests.dlrm import fake_graphs
from tests.dlrm.runs import events, losses, train_here, train_many

#: Of the training set in conftest.py: its last step has one row.
ROWS, BATCH = 929, 32


def _train(data, log, *flags):
    common = [f"--binary_path={data}", f"--log_path={log}", f"--batch_size={BATCH}", "--epochs=2"]
    train_here(*common, "--adagrad", "--learning_rate=0.1", *flags)
    return losses(log)


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ([], 2),
        (["--amp"], 2),
        (["--interaction_type=dcn", "--dcn_num_layers=1", "--dcn_low_rank_dim=4"], 3),
        (
            [
                "--interaction_type=projection",
                "--interaction_branch1_layer_sizes=16,16",
                "--interaction_branch2_layer_sizes=16,16",
            ],
            3,
        ),
    ],
)
def test_replays_train_as_launches(data, tmp_path, monkeypatch, flags, graphs):
    """All full training steps, and nothing else, are replays; the weights read the same."""
    expected = _train(data, tmp_path / "launched", *flags)
    counts = fake_graphs.install(monkeypatch)
    np.testing.assert_allclose(
        _train(data, tmp_path / "replayed", *flags, "--cuda_graphs"), expected, rtol=0, atol=1e-6
    )
    steps = 2 * (ROWS // BATCH) * graphs
    assert counts == {"forward": steps, "backward": steps}
    test = [
        [event for event in events(tmp_path / run, "evaluation") if event["split"] == "test"][-1]
        for run in ("launched", "replayed")
    ]
    assert test[0]["log_loss"] == pytest.approx(test[1]["log_loss"], abs=1e-6)


def test_two_ranks(data, tmp_path, monkeypatch):
    """DDP sums what replays wrote; the last step, of fewer rows, is launched."""
    monkeypatch.setenv("FAKE_GRAPHS", "1")
    common = [f"--binary_path={data}", f"--batch_size={BATCH // 2}", "--epochs=2", "--adagrad"]
    runs = [
        [*common, "--learning_rate=0.1", f"--log_path={tmp_path / name}", *flags]
        for name, flags in (("launched", []), ("replayed", ["--cuda_graphs"]))
    ]
    train_many(runs, ranks=2)
    launched, replayed = losses(tmp_path / "launched"), losses(tmp_path / "replayed")
    assert len(launched) == 2 * -(-ROWS // BATCH)
    np.testing.assert_allclose(replayed, launched, rtol=0, atol=1e-6)


def test_compiled_layers_are_captured(data, tmp_path, monkeypatch, inductor):
    """Which is why they are compiled before."""
    expected = _train(data, tmp_path / "launched")
    counts = fake_graphs.install(monkeypatch)
    found = _train(data, tmp_path / "both", "--compile_dense", "--cuda_graphs")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert counts["forward"] == counts["backward"] > 0
    assert len(inductor) >= 3


def test_goes_on_after_a_checkpoint(data, tmp_path, monkeypatch):
    """What is loaded goes to where the graphs read it."""
    fake_graphs.install(monkeypatch)
    whole = _train(data, tmp_path / "whole", "--cuda_graphs")
    where = [f"--checkpoint_dir={tmp_path / 'run'}", "--checkpoint_freq=7", "--cuda_graphs"]
    _train(data, tmp_path / "first", *where, "--max_steps=7")
    rest = _train(data, tmp_path / "rest", *where, "--resume")
    np.testing.assert_allclose(rest, whole[7:], rtol=0, atol=1e-6)


def test_without_a_gpu_it_says_that_it_has_no_effect(data, tmp_path, caplog):
    _train(data, tmp_path / "log", "--cuda_graphs", "--max_steps=1")
    assert "--cuda_graphs has no effect on a CPU" in caplog.text


def test_pytorchs_capture_takes_the_layers_and_warms_nothing_up(monkeypatch):
    """Its own code, where streams and graphs do nothing: what runs on another stream than
    training's leaves gradients there (``dlrm.graphs._warm_up``)."""
    ran, where = [], ["training"]

    @contextlib.contextmanager
    def elsewhere(*_, **__):
        where.append("elsewhere")
        yield
        where.pop()

    class Capture:
        default_capture_stream = "another's"

        def __init__(self, graph, pool):
            assert Capture.default_capture_stream == "training's"

        def __enter__(self):
            assert not gc.isenabled()
            where.append("capture")

        def __exit__(self, *_):
            where.pop()

    monkeypatch.setattr("torch.cuda.current_stream", lambda device: "training's")
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    monkeypatch.setattr("torch.cuda.Stream", object)
    monkeypatch.setattr("torch.cuda.stream", elsewhere)
    monkeypatch.setattr("torch.cuda.graph", Capture)
    monkeypatch.setattr("torch.cuda.CUDAGraph", object)
    monkeypatch.setattr("torch.cuda.graphs.graph_pool_handle", lambda: 0)
    config = ModelConfig(
        dense=("a", "b", "c"),
        categorical=("x", "y"),
        num_embeddings=(5, 7),
        embedding_dim=4,
        dense_arch_layer_sizes=(8, 4),
        over_arch_layer_sizes=(8, 1),
    )
    dlrm = build_dlrm(config)
    for part in (dlrm.dense_arch, dlrm.over_arch):
        launch = part.forward
        part.forward = lambda *inputs, launch=launch: ran.append(where[-1]) or launch(*inputs)
    replay_dense(dlrm, BATCH, amp=True)
    assert set(ran) == {"training", "capture"}
    assert ran.count("capture") == 2
    assert Capture.default_capture_stream == "another's"
    assert gc.isenabled()
