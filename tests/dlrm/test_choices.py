"""What flags change in a run: model, precision, data, when it stops, what it writes on the way."""

from __future__ import annotations

import gzip
import json
import logging

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch
from torchrec.models.dlrm import InteractionArch, SparseArch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.checkpoint.store import load_model
from nvt_torchrec.dlrm.config import ModelConfig
from nvt_torchrec.dlrm.data import shuffled
from nvt_torchrec.dlrm.evaluate import score
from nvt_torchrec.dlrm.inference_benchmark import benchmark_inference
from nvt_torchrec.dlrm.interaction import Interaction, PooledVectors
from nvt_torchrec.dlrm.launch.distributed import process_group
from nvt_torchrec.dlrm.metrics import compute_metrics
from nvt_torchrec.dlrm.multi_hot import MultiHot
from nvt_torchrec.dlrm.settings.flags import parse_settings
from nvt_torchrec.nvt_loader import KJTLoader
from tests.dlrm.runs import MODEL, events, losses, train_here, train_many


def _train(data, log, *flags: str):
    flags = (f"--binary_path={data}", "--batch_size=32", "--learning_rate=0.1", *flags)
    return train_here(*flags, f"--log_path={log}")


def _log_loss(checkpoint, data) -> float:
    """Of the test set, by the model of a checkpoint in one process."""
    model, config = load_model(checkpoint)
    loader = KJTLoader(data / "test", 64, device="cpu", table_sizes=config.num_embeddings)
    return compute_metrics(*score(model, loader)).log_loss


@pytest.mark.parametrize("rows", [5, 0])
def test_the_interaction_is_torchrecs(rows):
    torch.manual_seed(0)
    dense = torch.randn(rows, 4, requires_grad=True)
    sparse = torch.randn(rows, 3, 4, requires_grad=True)
    ours, theirs = Interaction(3)(dense, sparse), InteractionArch(3)(dense, sparse)
    assert torch.equal(ours, theirs)
    weights = torch.randn_like(ours)
    found = torch.autograd.grad((ours * weights).sum(), (dense, sparse))
    expected = torch.autograd.grad((theirs * weights).sum(), (dense, sparse))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_the_interaction_in_another_precision():
    """As wide as the dense vector; gradients come back in the tables' own precision."""
    torch.manual_seed(0)
    dense, sparse = torch.randn(5, 4), torch.randn(5, 3, 4, requires_grad=True)
    found = Interaction(3)(dense.bfloat16(), sparse)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), Interaction(3)(dense, sparse), atol=0.1, rtol=0.02)
    (gradient,) = torch.autograd.grad(found.sum(), sparse)
    (expected,) = torch.autograd.grad(Interaction(3)(dense, sparse).sum(), sparse)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient, expected, atol=0.1, rtol=0.02)


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_pooled_vectors_are_torchrecs_sparse_arch(order):
    """Whatever order the tables' vectors come in."""
    tables = [EmbeddingBagConfig(7, 2, name=f"t{i}", feature_names=[f"c{i}"]) for i in range(3)]
    bags = EmbeddingBagCollection(tables=tables)
    ids = KeyedJaggedTensor.from_lengths_sync(
        ["c0", "c1", "c2"], torch.arange(12) % 7, torch.ones(12, dtype=torch.int32)
    )
    pooled = bags(ids)
    parts = pooled.to_dict()
    keys = [f"c{i}" for i in order]
    shuffled_vectors = torch.cat([parts[key] for key in keys], dim=1)
    arch = PooledVectors(bags)
    found = arch.in_order(KeyedTensor(keys, [2, 2, 2], shuffled_vectors))
    assert torch.equal(found, SparseArch(bags)(ids))
    assert torch.equal(arch(ids), found)
    shares = found.untyped_storage().data_ptr() == shuffled_vectors.untyped_storage().data_ptr()
    assert shares == (order == [0, 1, 2])


@pytest.mark.parametrize(
    "flags",
    [
        ["--interaction_type=dcn", "--dcn_num_layers=2", "--dcn_low_rank_dim=5"],
        ["--interaction_type=projection", "--interaction_branch1_layer_sizes=12,16"]
        + ["--interaction_branch2_layer_sizes=24"],
        ["--multi_hot_sizes=3,1,2,5", "--multi_hot_distribution_type=pareto"],
    ],
    ids=["dcn", "projection", "multi_hot"],
)
def test_another_model_is_trained_kept_and_loaded(flags, data, tmp_path):
    result = _train(data, tmp_path, *flags, f"--save_checkpoint_path={tmp_path / 'c'}")
    _train(data, tmp_path / "plain")
    assert (
        result.metrics["test"].log_loss != events(tmp_path / "plain", "evaluation")[-1]["log_loss"]
    )
    assert losses(tmp_path)[-2] < losses(tmp_path)[0]
    assert _log_loss(tmp_path / "c", data) == pytest.approx(
        result.metrics["test"].log_loss, abs=1e-5
    )


def _multi_hot(distribution: str) -> tuple[MultiHot, tuple[int, ...]]:
    rows = (1000, 7, 50)
    config = ModelConfig(
        ("int_0",),
        ("a", "b", "c"),
        rows,
        4,
        (4,),
        (4, 1),
        multi_hot_sizes=(40, 1, 3),
        multi_hot_distribution_type=distribution,
    )
    return MultiHot(config), rows


@pytest.mark.parametrize("distribution", ["uniform", "pareto"])
def test_multi_hot_ids(distribution):
    multi_hot, rows = _multi_hot(distribution)
    batch, keys = 500, ["a", "b", "c"]
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(n, (batch,), generator=generator, dtype=torch.int32) for n in rows]
    one = KeyedJaggedTensor(keys, torch.cat(ids), lengths=torch.ones(3 * batch, dtype=torch.int32))
    many = multi_hot.ids(one)
    assert many.values().dtype == torch.int32
    for key, size, given, n in zip(keys, (40, 1, 3), ids, rows, strict=True):
        assert many[key].lengths().tolist() == [size] * batch
        table = many[key].values().view(batch, size)
        assert torch.equal(table[:, 0], given), "the row's own id comes first"
        assert table.min() >= 0
        assert table.max() < n
        for same in given.unique():  # what is added follows from the id
            assert len(table[given == same].unique(dim=0)) == 1
    added = many["a"].values().view(batch, 40)[:, 1:].double()
    if distribution == "uniform":
        assert abs(added.mean() - 499.5) < 15
        assert (added == 0).double().mean() < 0.01
    else:  # P(floor(x) = 0) = 1 - 2 ** -alpha, and what is beyond the table comes round
        assert 0.15 < (added == 0).double().mean() < 0.20
    assert torch.equal(multi_hot.ids(one).values(), many.values())


def test_shuffling_a_batch_moves_whole_rows():
    lengths = torch.tensor([2, 0, 1, 1, 1, 1], dtype=torch.int32)
    ids = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([10, 11, 30, 100, 200, 300]),
        weights=torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        lengths=lengths,
    )
    batch = Batch(torch.tensor([[1.0], [2.0], [3.0]]), ids, torch.tensor([1.0, 2.0, 3.0]))
    orders = set()
    for seed in range(20):
        found = shuffled(batch, seed)
        order = found.labels.long().tolist()
        orders.add(tuple(order))
        assert found.dense_features.flatten().tolist() == order
        a, b = found.sparse_features["a"], found.sparse_features["b"]
        rows = {1: [10, 11], 2: [], 3: [30]}
        assert a.values().tolist() == [i for row in order for i in rows[row]]
        assert a.lengths().tolist() == [len(rows[row]) for row in order]
        assert b.values().tolist() == [100 * row for row in order]
        assert b.weights().tolist() == [row + 3.0 for row in order]
    assert len(orders) == 6


def test_shuffled_batches_train_the_same(data, tmp_path):
    _train(data, tmp_path / "a")
    _train(data, tmp_path / "b", "--shuffle_batches")
    a, b = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert a != b, "sums in another order"
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_bfloat16_is_close_and_keeps_float32_weights(data, tmp_path):
    _train(data, tmp_path / "a")
    _train(data, tmp_path / "b", "--amp", f"--save_checkpoint_path={tmp_path / 'c'}")
    a, b = losses(tmp_path / "a"), losses(tmp_path / "b")
    assert np.abs(np.subtract(a, b)).max() > 1e-5
    np.testing.assert_allclose(a, b, rtol=0, atol=0.02)
    model, _ = load_model(tmp_path / "c")
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


def test_max_steps_in_the_second_epoch(data, tmp_path):
    flags = ["--epochs=3", "--max_steps=40", "--change_lr", "--lr_change_point=0.5"]
    result = _train(data, tmp_path, *flags, "--lr_after_change_point=0.01")
    assert (result.steps, result.samples) == (40, 929 + 10 * 32)
    rates = [event["lr"] for event in events(tmp_path, "train")]
    assert rates == [0.1] * 20 + [0.01] * 20, "shares are of the steps that are trained"
    found = [(event["step"], event["split"]) for event in events(tmp_path, "evaluation")]
    assert found == [(30, "valid"), (40, "valid"), (40, "test")]


def test_a_good_enough_auroc_ends_training(data, tmp_path):
    flags = ["--epochs=2", "--validation_freq_within_epoch=10"]
    assert _train(data, tmp_path / "a", *flags, "--auc_threshold=0.01").steps == 10
    assert _train(data, tmp_path / "b", *flags, "--auc_threshold=1").steps == 60


def test_evaluations_wait(data, tmp_path):
    _train(data, tmp_path, "--epochs=2", "--test_after=1.2", "--test_freq=12")
    found = [event["step"] for event in events(tmp_path, "evaluation") if event["split"] == "valid"]
    assert found == [30 + 12, 30 + 24, 60]


def test_batch_size_of_evaluations(data, tmp_path):
    a = _train(data, tmp_path / "a", "--limit_val_batches=2")
    b = _train(data, tmp_path / "b", "--limit_val_batches=2", "--test_batch_size=100")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert (a.metrics["valid"].samples, b.metrics["valid"].samples) == (64, 200)
    assert a.metrics["test"].auroc == pytest.approx(b.metrics["test"].auroc, abs=1e-6)


def test_a_share_of_the_training_steps(data, tmp_path):
    result = _train(data, tmp_path, "--dataset_subset=0.25", "--epochs=2")
    assert result.steps == 2 * 8, "a quarter of 30, rounded up"


def test_a_limit_of_the_tables(data, tmp_path):
    _train(data, tmp_path, "--max_table_size=40", "--hash_indices", "--limit_train_batches=2")
    assert events(tmp_path, "start")[-1]["model"]["num_embeddings"] == [10, 40, 40, 3]


def test_synthetic_rows_in_memory(tmp_path):
    flags = ["--dataset_type=synthetic", "--synthetic_dataset_num_entries=700", "--batch_size=32"]
    flags += ["--synthetic_dataset_table_sizes=10,20", "--synthetic_dataset_numerical_features=3"]
    flags += ["--learning_rate=0.1", "--epochs=2"]
    whole = train_here(*flags, f"--log_path={tmp_path / 'a'}")
    assert (whole.steps, whole.samples) == (2 * 21, 2 * 21 * 32), "full steps only"
    assert whole.metrics["test"].samples == 64
    start = events(tmp_path / "a", "start")[-1]["model"]
    assert (start["num_embeddings"], len(start["dense"])) == ([10, 20], 3)
    kept = [f"--checkpoint_dir={tmp_path / 'c'}", "--checkpoint_freq=10"]
    train_here(*flags, *kept, "--max_steps=30", f"--log_path={tmp_path / 'b'}")
    train_here(*flags, *kept, "--resume", f"--log_path={tmp_path / 'b'}")
    assert losses(tmp_path / "b") == losses(tmp_path / "a")
    again = train_here(*flags, *kept, "--resume", f"--log_path={tmp_path / 'b'}")
    assert again.steps == 42, "from the checkpoint at 40; once more, with nothing left but that"


def test_warm_up_steps_are_left_out_of_the_throughput(data, tmp_path):
    flags = ["--throughput_check_freq_within_epoch=20", "--benchmark_warmup_steps=7"]
    _train(data, tmp_path, *flags)
    trained = events(tmp_path, "train")
    assert [one["step"] for one in trained] == [7, 20, 30]
    (end,) = events(tmp_path, "end")
    timed = trained[-1]["train_seconds"] - trained[0]["train_seconds"]
    assert end["samples_per_s"] == pytest.approx((929 - 7 * 32) / timed)
    with pytest.raises(SettingsError, match=r"--benchmark_warmup_steps 30 of 30 steps"):
        _train(data, tmp_path / "b", "--benchmark_warmup_steps=30")


def test_learning_rate_of_every_step(data, tmp_path, caplog):
    flags = ["--max_steps=4", "--throughput_check_freq_within_epoch=4", "--lr_warmup_steps=2"]
    with caplog.at_level(logging.INFO, logger="nvt_torchrec.dlrm"):
        _train(data, tmp_path, "--print_lr", *flags)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("step ")]
    assert said[:4] == ["step 1: lr 0.05", "step 2: lr 0.1", "step 3: lr 0.1", "step 4: lr 0.1"]
    assert said[4].startswith("step 4/4  epoch 1/1 13 %  loss 0.")
    for part in ("samples/s (", " per rank)  data ", " %  memory ", " GiB  ETA 0:00:00"):
        assert part in said[4]


def test_profile(data, tmp_path):
    _train(data, tmp_path, "--profile", "--profile_steps=3", "--benchmark_warmup_steps=4")
    trace = json.loads(gzip.decompress((tmp_path / "profile.json.gz").read_bytes()))
    steps = {one["name"] for one in trace["traceEvents"] if "ProfilerStep" in one.get("name", "")}
    assert steps == {"ProfilerStep#6", "ProfilerStep#7", "ProfilerStep#8"}
    assert "embedding" in (tmp_path / "profile.txt").read_text()
    with pytest.raises(SettingsError, match="too few to profile 30 after the first 2"):
        _train(data, tmp_path / "b", "--profile", "--profile_steps=30")


def test_every_run_leaves_a_log(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = [f"--binary_path={data}", "--learning_rate=0.1", "--max_steps=3"]
    train_here(*flags)
    (directory,) = (tmp_path / "training_log").iterdir()
    names = {"metrics.jsonl", "settings.json", "training.html"}
    assert {path.name for path in directory.iterdir()} == names
    assert json.loads((directory / "settings.json").read_text())["max_steps"] == 3
    train_here(*flags, "--checkpoint_dir=kept", "--checkpoint_freq=2")
    assert {path.name for path in (tmp_path / "kept" / "log").iterdir()} == names


def test_inference_benchmark(data, tmp_path):
    flags = [f"--save_checkpoint_path={tmp_path / 'c'}"]
    trained = _train(data, tmp_path / "log", *flags)
    flags = [*MODEL, f"--binary_path={data}", "--mode=inference_benchmark"]
    flags += ["--inference_benchmark_batch_sizes=1,201", "--inference_benchmark_steps=3"]
    kept = f"--load_checkpoint_path={tmp_path / 'c'}"
    log = f"--log_path={tmp_path / 'inference'}"
    with process_group() as group:
        one, whole = benchmark_inference(parse_settings([*flags, kept, log]), group)
        untrained = benchmark_inference(parse_settings([*flags, log]), group)[1]
    assert (one.batch_size, one.batches) == (1, 3)
    assert whole.auroc == pytest.approx(trained.metrics["test"].auroc, abs=1e-9)
    assert untrained.auroc != whole.auroc
    assert 0 < whole.p50_ms <= whole.p95_ms <= whole.p99_ms
    assert len(events(tmp_path / "inference", "inference")) == 4


def test_two_ranks_stop_together_and_share_synthetic_epochs(data, tmp_path):
    parquet = [f"--binary_path={data}", "--batch_size=16", "--learning_rate=0.1"]
    parquet += ["--epochs=2", "--test_freq=10", "--auc_threshold=0.01", "--test_batch_size=50"]
    parquet += ["--amp", "--shuffle_batches", "--interaction_type=dcn", "--multi_hot_sizes=2,1,3,1"]
    made = ["--dataset_type=synthetic", "--synthetic_dataset_num_entries=700", "--batch_size=16"]
    made += ["--synthetic_dataset_table_sizes=10,20", "--max_steps=5", "--learning_rate=0.1"]
    runs = [[*parquet, f"--log_path={tmp_path / 'a'}"], [*made, f"--log_path={tmp_path / 'b'}"]]
    train_many(runs, ranks=2)
    (end,) = events(tmp_path / "a", "end")
    assert (end["step"], end["samples"]) == (10, 320)
    (start,), (end,) = events(tmp_path / "b", "start"), events(tmp_path / "b", "end")
    assert (start["epoch_steps"], end["step"]) == (21, 5)
    for name, tables in (("a", 4), ("b", 2)):
        plan = events(tmp_path / name, "start")[0]["plan"]
        assert len(plan["tables"]) == tables
        assert len(plan["gib_per_rank"]) == 2
        assert "GiB of tables" in (tmp_path / name / "training.html").read_text()


def test_dense_layers_are_compiled(data, tmp_path, inductor):
    _train(data, tmp_path / "a", "--max_steps=3")
    assert not inductor
    _train(data, tmp_path / "b", "--max_steps=3", "--compile_dense")
    modules = {str(graph.graph) for graph in inductor}
    assert len(modules) >= 3, "bottom layers, interaction, top layers"
    np.testing.assert_allclose(losses(tmp_path / "a"), losses(tmp_path / "b"), rtol=0, atol=1e-6)
