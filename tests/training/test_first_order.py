"""The linear term: logistic regression in the model, from which a first training starts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.piecewise import PiecewiseLinear, find_edges
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.baselines import id_counts
from nvt_torchrec.training.baselines.baselines import REGRESSION, compute_baselines
from nvt_torchrec.training.baselines.regression import fit_regression
from nvt_torchrec.training.baselines.row_sample import Column, RowSample, read_sample
from nvt_torchrec.training.data.choices import read_schema
from nvt_torchrec.training.data.loaders import TrainBatch, make_loader
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop import trainer
from nvt_torchrec.training.optim.learning_rates import fill_rates
from nvt_torchrec.training.settings.train_settings import fill_sizes, parse_settings
from nvt_torchrec.training.sharding.build import apply_start, build
from nvt_torchrec.training.sharding.model_config import model_config
from tests.plays import SHARE, write_plays
from tests.training.runs import MODEL, events, model_of, score, train_here


@pytest.mark.parametrize(("bins", "counted"), [(0, False), (8, False), (8, True)])
def test_a_model_starts_as_the_regression(data, monkeypatch, bins, counted):
    """With layers of zeros the logits are the regression's, also if it knows ids' counts."""
    if counted:
        # Of every column, whatever valid says.
        monkeypatch.setattr(id_counts, "_MIN_SINGLE_ROWS", 0)
        monkeypatch.setattr(id_counts, "NATS", -1e9)
    given = [*MODEL, f"--binary_path={data}", f"--dense_bins={bins}", "--first_order=0.3"]
    settings = fill_sizes(parse_settings([*given, "--batch_size=8192"]), 0, 1)
    config = model_config(settings, read_schema(settings))
    with process_group() as group:
        settings = fill_rates(settings, config, 8192, 1)
        start, _ = compute_baselines(settings, config, None)
        run, _ = build(settings, config, group)
        apply_start(start, run)
        for name, parameter in run.model.named_parameters():
            if ".top." in name:
                parameter.data.zero_()
        batch = next(iter(make_loader(settings, config, "train", group)))
        size = len(batch.labels)
        _, output = run.model.eval()(TrainBatch.pad(batch, size, size))
        sample = read_sample(settings, config, "train", 1)
    # of all rows, which the sample has in another order
    assert len(sample.dense) == size > 500
    regression = start.regressions["label"]
    weighs_unknown = [2 in ids for ids in regression.ids[: len(config.categorical)]]
    assert all(weighs_unknown) or not counted
    expected = regression.logits(sample)
    assert np.sort(output.logits[:, 0]) == pytest.approx(np.sort(expected), abs=1e-5)


def test_a_first_training_ends_no_worse_than_the_regression(tmp_path, monkeypatch):
    """Of few rows an id, sorted by user; from nothing it ends far below."""
    data = write_plays(tmp_path, SHARE, rows=12_000, users=2_000, items=1_000)
    begun = [f"--binary_path={data}", "--embedding_dim=16", "--dense_arch_layer_sizes=64,16"]

    def ends_below(name: str) -> float:
        """Return by how much the AUROC of a run is below the regression's."""
        log = f"--log_path={tmp_path / name}"
        model = train_here(*begun, log, f"--save_checkpoint_path={tmp_path / name / 'end'}")
        beside = events(tmp_path / name, "baseline")
        found = {event["split"]: event["auroc"] for event in beside if event["name"] == REGRESSION}
        return found["test"] - model.metrics["test"]["auroc"]

    assert ends_below("started") < 0.001
    record = CheckpointRecord.read(tmp_path / "started" / "end")
    assert record.model["first_order"] == 0.2
    monkeypatch.setattr(trainer, "apply_start", lambda *arguments: None)
    assert ends_below("from nothing") > 0.003


@pytest.mark.parametrize("flags", [[], ["--undersampling_rate=0.4"]])
def test_the_bias_is_fitted_to_training_rows(learnable, tmp_path, flags):
    """A learning rate at which the last batches move the model far: by 8 %, without a decay."""
    rates = ["--first_order=0.2", "--dense_learning_rate=0.3", "--batch_size=64", *flags]
    train_here(f"--binary_path={learnable}", f"--save_checkpoint_path={tmp_path}", *rates)
    with process_group():
        logits, labels = score(model_of(tmp_path), KJTLoader(learnable / "train", 4096))
    assert np.mean(1 / (1 + np.exp(-logits))) == pytest.approx(labels.mean(), rel=0.01)


def test_vectors_of_numbers_are_the_papers_encoding_times_a_matrix():
    """Below, at, between and above edges, and in a constant column; gradients as well.

    Gorishniy et al. 2022, equation 1, clipped at both ends, with the vector of the first edge.
    """
    rng = np.random.default_rng(0)
    dense = np.stack([rng.normal(size=400), rng.integers(0, 3, 400), np.full(400, 7.0)], 1)
    edges = find_edges(dense.astype(np.float32), 6)
    at = np.concatenate([edges.T, (edges.T[1:] + edges.T[:-1]) / 2, [[-9] * 3, [99] * 3]])
    values = torch.from_numpy(at.astype(np.float32))
    for summed in (False, True):
        layer = PiecewiseLinear(3, 6, 4, 0, summed=summed)
        layer.edges.copy_(torch.from_numpy(edges))
        table = layer.vectors.detach().numpy().reshape(3, 7, 4)
        encoded = np.zeros((len(at), 3, 6))
        for k in range(6):
            width = np.where(edges[:, k + 1] > edges[:, k], edges[:, k + 1] - edges[:, k], np.inf)
            encoded[:, :, k] = ((values.numpy() - edges[:, k]) / width).clip(0, 1)
        expected = table[:, 0] + np.einsum("bnk,nkd->bnd", encoded, np.diff(table, axis=1))
        if summed:
            expected = expected.sum(1, keepdims=True)
        gradient = torch.from_numpy(rng.normal(size=expected.shape).astype(np.float32))
        gradients = []
        for compute in (layer, layer.compute_with_operators):
            result = compute(values)
            np.testing.assert_allclose(result.detach(), expected, atol=1e-5)
            gradients += torch.autograd.grad(result, layer.vectors, gradient)
        torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3_000])
def test_bins_on_a_gpu_are_those_of_the_cpu(summed, rows):
    """By PyTorch's operators, which GPUs take; to 3e-7 of the largest value, gradients too."""
    torch.manual_seed(0)
    layer = PiecewiseLinear(13, 64, 16, 1, summed=summed)
    dense = torch.randn(3_000, 13).exp()
    layer.edges.copy_(torch.from_numpy(find_edges(dense.numpy(), 64)))
    expected, result = layer(dense[:rows]), layer.compute_with_operators(dense[:rows])
    assert result.shape == expected.shape == (rows, 1 if summed else 13, 16)
    torch.testing.assert_close(result, expected, atol=3e-7, rtol=3e-7)
    gradient = torch.randn_like(expected)
    expected, result = (
        torch.autograd.grad(vectors, layer.vectors, gradient)[0] for vectors in (expected, result)
    )
    tolerance = 3e-7 * expected.abs().max().item()
    torch.testing.assert_close(result, expected, atol=tolerance, rtol=3e-7)


def test_a_frequent_value_has_edges_beside_it():
    """As a missing value that was filled: no other value has a part of its weight."""
    rng = np.random.default_rng(0)
    values = np.where(rng.random(5_000) < 0.1, 0, rng.normal(size=5_000)).astype(np.float32)
    (edges,) = find_edges(values[:, None], 16)
    sorted_values = np.unique(values)
    place = np.searchsorted(sorted_values, 0)
    assert set(sorted_values[[0, 1, place - 1, place, place + 1, -2, -1]]) <= set(edges)
    assert len(set(edges)) == 17
    (few,) = find_edges(np.array([[3], [1], [1]], np.float32), 4)
    assert few.tolist() == [1, 3, 3, 3, 3]


def test_bins_bend_the_regression_where_data_do():
    """On a log of a hump they are better by far; on a small one of a line no worse."""
    rng = np.random.default_rng(1)
    ids = Column(rng.integers(0, 5, 12_000), None)

    def losses(effect, rows):
        x = rng.normal(size=(12_000, 2)).astype(np.float32)
        labels = (rng.random(12_000) < 1 / (1 + np.exp(-effect(x[:, 0])))).astype(np.float32)
        parts = []
        for part in (slice(rows), slice(6_000, None)):
            of_rows = Column(ids.ids[part], None)
            parts.append(RowSample(x[part], [of_rows], {"x": labels[part]}, None))
        train, test = parts
        for edges in (None, find_edges(train.dense, 16)):
            logits = fit_regression(train, "x", edges).logits(test)
            yield float(np.logaddexp(0, (1 - 2 * test.labels["x"]) * logits).mean())

    straight, bent = losses(lambda x: 2 - 2 * x**2, 6_000)
    assert bent < straight - 0.15
    straight, bent = losses(lambda x: x, 500)
    assert bent < straight + 0.003


@pytest.mark.filterwarnings("error")
def test_empty_lists_and_rows_of_weight_0():
    """Values whose rows count nothing change no penalty; ids of lists that were empty count 0."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 20, 2_000)
    labels = (rng.random(2_000) < 1 / (1 + np.exp(-rng.normal(0, 1, 20)[ids]))).astype(np.float32)
    none = np.zeros(0, np.int64)

    def sample(ids, labels, weights, lists):
        dense = np.zeros((len(labels), 0), np.float32)
        return RowSample(dense, [Column(ids, None), Column(*lists)], {"x": labels}, weights)

    without = fit_regression(sample(ids, labels, np.ones(2_000, np.float32), (none, none)), "x")
    weights = np.append(np.ones(2_000), 0).astype(np.float32)
    more = np.append(ids, 99), np.append(labels, 1).astype(np.float32)
    found = fit_regression(sample(*more, weights, (none, none)), "x")
    assert found.penalties[0] == pytest.approx(without.penalties[0], rel=0.01)
    assert found.penalties[0] < 10
    scored = sample(ids[:3], labels[:3], None, (np.array([7]), np.array([1])))
    assert np.isfinite(found.logits(scored)).all()
