"""Inputs padded to multiples of 8: what is computed, and what stays as it is."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from nvt_torchrec.models.head import build_head
from nvt_torchrec.training.sharding import build
from tests.training.runs import EXAMPLE, losses, model_of, train_here
from tests.training.shapes import dlrm

NAMES = tuple(f"c{i}" for i in range(26))
MLPERF = dlrm(tuple(f"i{i}" for i in range(13)), NAMES, (5,) * 26, 128, (32, 128), (64, 1))


def test_the_layers_of_mlperfs_model(monkeypatch):
    """13 and 479 inputs become 16 and 480; the gradients are those of the weights."""
    torch.manual_seed(0)
    model = build_head(MLPERF).module
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    dense, sparse = torch.randn(6, 13), torch.randn(6, 26, 128)

    def step():
        model.zero_grad()
        logits = model(dense, sparse)
        logits.square().sum().backward()
        return [logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]

    expected = step()
    model.align_inputs()
    widths, linear = [], nn.functional.linear
    heights, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda x, y: heights.append(x.shape[1]) or bmm(x, y))
    monkeypatch.setattr(
        nn.functional, "linear", lambda x, *a: widths.append(x.shape[1]) or linear(x, *a)
    )
    aligned = step()
    assert widths == [16, 32, 480, 64]
    assert heights == [32, 32]  # of 27 vectors, forward and backward
    for mine, theirs in zip(aligned, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    after = model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert list(after) == list(before)


def test_padded_inputs_train_the_same_checkpoint(data, tmp_path, monkeypatch, inductor):
    """Also compiled, and if the run is resumed without padding, as on a CPU."""
    original = build.set_up_dense

    def aligned(head, device, settings):
        head.module.align_inputs()
        original(head, device, settings)

    common = [*EXAMPLE, f"--binary_path={data}", "--batch_size=32", "--learning_rate=0.1"]
    common += ["--adagrad", "--interaction_type=dcn", "--dcn_low_rank_dim=4"]
    train_here(*common, f"--log_path={tmp_path / 'a'}")
    common += [f"--log_path={tmp_path / 'b'}", f"--checkpoint_dir={tmp_path / 'c'}"]
    common.append("--checkpoint_freq=15")
    with monkeypatch.context() as patch:
        patch.setattr(build, "set_up_dense", aligned)
        train_here(*common, "--compile_dense", "--max_steps=15")
    train_here(*common, "--resume")
    np.testing.assert_allclose(losses(tmp_path / "b"), losses(tmp_path / "a"), rtol=0, atol=1e-5)
    model = model_of(tmp_path / "c" / "step_00000030")
    first = next(model.head.module.bottom.parameters())
    assert tuple(first.shape) == (16, 3)
