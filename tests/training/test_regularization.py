"""Batch normalization, dropout, L2 of tables and layers, and tables that each rank has whole."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.models.checkpoint.reading import read_model
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.head import build_head
from nvt_torchrec.models.layers import Layers, fold_layers
from nvt_torchrec.training.baselines.baselines import compute_baselines
from nvt_torchrec.training.data.choices import read_schema
from nvt_torchrec.training.data.loaders import make_loader
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.optim.learning_rates import fill_rates
from nvt_torchrec.training.settings.train_settings import fill_sizes, parse_settings
from nvt_torchrec.training.sharding.batch_norm import StepRows, SyncedBatchNorm
from nvt_torchrec.training.sharding.build import build, regularize_tables
from nvt_torchrec.training.sharding.initial_weights import fill_table
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.planning import choose_sharding
from nvt_torchrec.training.sharding.train_model import LookupL2
from tests.nvt_loader.data import write_split
from tests.ranks import run_ranks
from tests.training.runs import (
    EXAMPLE,
    EXAMPLE_SGD,
    MODEL,
    MODELS,
    assert_same,
    config_of,
    events,
    flags_of,
    losses,
    small_run,
    train_here,
    train_losses,
    train_many,
    train_until_pulled,
    weights,
)
from tests.training.shapes import dlrm

#: All of it at once, at rates of the test's own.
ALL = ["--batch_norm", "--dropout=0.2", "--embedding_l2=0.01", "--weight_decay=0.001"]
ALL += ["--optimizer=adam"]
_TABLE = "sparse_arch.embedding_bag_collection.embedding_bags.{}.weight"


def _adam(flags: list[str]) -> list[str]:
    return [flag for flag in flags if flag != "--adagrad"]


@pytest.mark.parametrize("shape", [(5,), (5, 3)])
def test_rows_that_pad_a_batch_do_not_count(shape):
    """Results, gradients and running statistics are those of nn.BatchNorm1d of the samples."""
    torch.manual_seed(0)
    plain, padded = nn.BatchNorm1d(5), nn.BatchNorm1d(5)
    SyncedBatchNorm.replace_in(padded, StepRows(rows=4, padded=7, global_size=4))
    values = torch.randn(7, *shape)
    inputs = [values[:4].clone().requires_grad_(), values.clone().requires_grad_()]
    outputs = [plain(inputs[0]), padded(inputs[1])[:4]]
    factors = torch.randn(outputs[0].shape)
    for output in outputs:
        (output * factors).sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(inputs[1].grad[:4], inputs[0].grad)
    assert not inputs[1].grad[4:].any()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(padded.state_dict()[name], value)
    assert padded.weight.grad.equal(plain.weight.grad) or torch.allclose(
        padded.weight.grad, plain.weight.grad
    )


def _normalize_few_rows() -> None:
    """Normalize five samples, which are all of the first rank's; both ranks must agree on sums."""
    with process_group() as group:
        norm = nn.BatchNorm1d(3)
        rows = 5 if group.rank == 0 else 0
        SyncedBatchNorm.replace_in(norm, StepRows(rows=rows, padded=5, global_size=5))
        values = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
        result, expected = norm(values), nn.BatchNorm1d(3)
        torch.testing.assert_close(result, expected(values))
        torch.testing.assert_close(norm.running_var, expected.running_var)


def test_a_rank_without_samples_takes_part():
    run_ranks(2, _normalize_few_rows)


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_as_one(data, tmp_path, model):
    """The last step has one row, on one rank; statistics are those of the rows of all."""
    more = [*EXAMPLE, *MODELS[model], "--batch_norm", "--learning_rate=0.02"]
    more += ["--embedding_l2=0.01", "--optimizer=adam", "--weight_decay=0.01"]
    one = train_losses(data, tmp_path / "one", *more)
    train_many([small_run(data, tmp_path / "two", *more, batch_size=16)], 2)
    assert losses(tmp_path / "two" / "log") == pytest.approx(one, abs=2e-5)
    ours, theirs = weights(tmp_path / "one" / "final"), weights(tmp_path / "two" / "final")
    for name, value in ours.items():
        torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-3)


@pytest.mark.parametrize("step", [40, 62])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(data, tmp_path, monkeypatch, step):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_here(*_adam(flags_of(data, whole, *ALL)))
    flags = _adam(flags_of(data, broken, *ALL))
    train_until_pulled(monkeypatch, step, *flags)
    # what was chosen is taken from the checkpoint
    left_out = ("--embedding_l2", "--optimizer", "--dropout")
    again = [flag for flag in flags if not flag.startswith(left_out)]
    train_here(*again, "--resume")
    assert_same(whole / "final", broken / "final")
    settings = CheckpointRecord.read(broken / "final").training["settings"]
    assert (settings["sharding"], settings["embedding_l2"]) == ("data_parallel", 0.01)


@pytest.mark.parametrize("model", MODELS)
def test_a_model_that_is_read_to_serve_has_its_layers_folded(data, tmp_path, model):
    flags = small_run(data, tmp_path, *EXAMPLE_SGD, *MODELS[model], "--batch_norm", "--dropout=0.5")
    train_here(*flags, "--learning_rate=0.02")
    _, folded, config = read_model(tmp_path / "final")
    assert not {"batch_norm", "dropout"} & config.settings.keys()
    assert not any(isinstance(part, nn.BatchNorm1d) for part in folded.modules())
    then = config_of(tmp_path / "final")
    assert then.settings["batch_norm"] is True
    trained = build_head(then)
    prefix = "head."
    trained.load_state_dict(
        {
            name.removeprefix(prefix): value
            for name, value in weights(tmp_path / "final").items()
            if name.startswith(prefix)
        }
    )
    norms = [part for part in trained.modules() if isinstance(part, nn.BatchNorm1d)]
    assert norms
    assert all(norm.running_var.ne(1).any() for norm in norms)
    dense, vectors = torch.randn(9, len(config.dense)), torch.randn(9, len(config.features), 8)
    expected = trained.eval()(dense, vectors)
    torch.testing.assert_close(folded.eval()(dense, vectors), expected, rtol=1e-4, atol=1e-4)


def test_dropout_is_of_training_alone():
    torch.manual_seed(0)
    layers = Layers(6, (50, 1), last_relu=False, dropout=0.5)
    x = torch.randn(3, 6)
    assert not layers(x).equal(layers(x))
    assert layers.eval()(x).equal(layers(x))
    assert fold_layers(layers, {"dropout": 0.5, "over_arch_layer_sizes": [50, 1]}) == {
        "over_arch_layer_sizes": [50, 1]
    }
    assert layers.train()(x).equal(layers(x))


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_whole_tables_train_as_sharded_ones(data, tmp_path, optimizer):
    given = [*EXAMPLE, f"--optimizer={optimizer}", "--learning_rate=0.05", "--eps=1e-4"]
    sharded = train_losses(data, tmp_path / "sharded", *given)
    whole = train_losses(data, tmp_path / "whole", *given, "--sharding=data_parallel")
    assert whole == pytest.approx(sharded, abs=1e-5)


def test_a_row_that_is_never_seen_shrinks_in_each_step(data, tmp_path):
    """A gradient of λ w at each step: after n steps of SGD it is w (1 − r λ)^n."""
    rate, strength, steps = 0.1, 0.5, 3
    flags = small_run(data, tmp_path, *EXAMPLE_SGD, f"--learning_rate={rate}")
    train_here(*flags, f"--embedding_l2={strength}", f"--max_steps={steps}")
    config = config_of(tmp_path / "final")
    table = weights(tmp_path / "final")[_TABLE.format("t_cat_2")]
    initial = torch.empty(table.shape)
    fill_table(initial, "t_cat_2", *initial.shape, 0, (0, 0))
    initial[:, : config.first_order_width] = 0
    expected = initial * (1 - rate * strength) ** steps
    shrunk = (table - expected).abs().max(1).values < 1e-7
    assert 20 < shrunk.sum() < len(shrunk)  # the others were looked up


def test_sharded_tables_have_it_in_their_lookups():
    """Over the rows of a log, each id's gradient is that of all steps on whole tables."""
    strength, batch = 0.3, 4
    ids = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3])
    shares = torch.bincount(ids) / len(ids)
    table = torch.randn(4, 5)
    penalties = LookupL2(("a",))
    penalties.set_factors({"a": strength / (batch * shares)})
    total = torch.zeros(4, 5)
    for part in ids.split(batch):
        vectors = table[part].unsqueeze(1).clone().requires_grad_()
        features = KeyedJaggedTensor(["a"], part, lengths=torch.ones(len(part), dtype=torch.int))
        (penalties(features, vectors) * 0).sum().backward()
        total.index_add_(0, part, vectors.grad[:, 0])
    steps = len(ids) / batch
    torch.testing.assert_close(total, steps * strength * table)


def test_sharded_tables_learn_as_whole_ones_in_the_mean(data, tmp_path):
    """The rows that are seen have the same norm; without L2 it is larger."""
    more = [*EXAMPLE_SGD, "--learning_rate=1", "--epochs=3"]
    runs = {"data_parallel": 0.02, "table_wise": 0.02, "row_wise": 0.0}
    norms = {}
    for sharding, strength in runs.items():
        path = tmp_path / sharding
        train_here(
            *small_run(data, path, *more, f"--sharding={sharding}", f"--embedding_l2={strength}")
        )
        table = weights(path / "final")[_TABLE.format("t_cat_1")]
        norms[sharding] = float(table[3:].norm())  # behind the reserved ids
    assert norms["table_wise"] == pytest.approx(norms["data_parallel"], rel=0.1)
    assert norms["table_wise"] < 0.8 * norms["row_wise"]


def test_data_parallel_tables_are_no_reason_for_warnings(data, tmp_path, caplog):
    """TorchRec's planner warns of each, because it has no shards."""
    train_here(*small_run(data, tmp_path, "--embedding_l2=0.01", "--max_steps=2"))
    assert "Sharding spec not found" not in caplog.text
    assert "caching params" not in caplog.text


def test_a_list_that_shares_a_table_adds_nothing(tmp_path):
    """Of its ids a row has none or several; the column beside it has one in each row."""
    data = tmp_path / "split"
    write_split(
        data,
        {"train": [200], "valid": [50], "test": [50]},
        table_sizes=(20, 20, 5),
        multi_hot=("cat_1",),
        vocabularies=("shared", "shared", "own"),
    )
    given = [*MODEL, f"--binary_path={data}", "--embedding_l2=0.05", "--batch_size=200"]
    settings = fill_sizes(parse_settings(given), 200, 1)
    schema = read_schema(settings)
    config = model_config(settings, schema)
    with process_group() as group:
        settings = choose_sharding(
            dataclasses.replace(settings, sharding="table_wise"), config, "cpu"
        )
        settings = fill_rates(settings, config, 200, 1)
        start, _ = compute_baselines(settings, config, None)
        run, _ = build(settings, config, group)
        regularize_tables(start, run, settings)
        batch = next(iter(make_loader(settings, config, "train", group)))
        (penalties,) = (part for part in run.model.modules() if isinstance(part, LookupL2))
        vectors = torch.ones(200, 3, 8, requires_grad=True)
        (penalties(batch.sparse_features, vectors) * 0).sum().backward()
    assert (vectors.grad[:, [0, 2]] > 0).all()
    assert not vectors.grad[:, 1].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dropout": 1.0}, "no model has a dropout of 1"),
        ({"dropout": -0.1}, "no model has a dropout of -0.1"),
        ({"dropout": "much"}, "not the configuration of a model: .*dropout"),
        ({"batch_norm": "yes"}, "not the configuration of a model: .*batch_norm"),
        ({"layer_norm": True}, "not the configuration of a model: .*layer_norm"),
    ],
)
@pytest.mark.parametrize("model", ["dlrm", "deepfm", "dcn_v2", "final_mlp"])
def test_what_a_file_says_of_layers_is_checked(model, settings, message):
    config = dlrm(("d",), ("a", "b"), (9, 9), 4, (8, 4), (8, 1))
    known = {"over_arch_layer_sizes": [8, 1]}
    if model == "dcn_v2":
        known |= {"dcn_num_layers": 1, "dcn_low_rank_dim": 2}
    if model == "dlrm":
        known = config.settings
    config = dataclasses.replace(config, model=model, settings={**known, **settings})
    with pytest.raises(SchemaError, match=message):
        build_head(config)


def test_tables_that_are_too_large_for_adam_on_a_cpu():
    settings = dataclasses.replace(parse_settings(["--optimizer=adam"]), learning_rate=0.01)
    small = dlrm(("d",), ("a",), (1000,), 4, (), ())
    large = dlrm(("d",), ("a",), (3_000_000,), 4, (), ())
    assert choose_sharding(settings, small, "cpu").sharding == "data_parallel"
    assert choose_sharding(settings, large, "cuda").sharding == "auto"
    with pytest.raises(
        SettingsError, match=r"at most 4,194,304 weights, but these have 12,000,000"
    ):
        choose_sharding(settings, large, "cpu")
    rowwise = dataclasses.replace(settings, optimizer="rowwise_adagrad", sharding="data_parallel")
    with pytest.raises(SettingsError, match="--sharding data_parallel with --optimizer rowwise"):
        choose_sharding(rowwise, small, "cpu")


def test_stop_by_auroc(data, tmp_path):
    """The model is that of the largest AUROC, which has not the lowest log loss."""
    more = [*EXAMPLE, "--early_stopping=3", "--epochs=12", "--validation_freq_within_epoch=5"]
    more += ["--learning_rate=0.3", "--adagrad"]
    train_here(*small_run(data, tmp_path, *more, "--stop_by=auroc"))
    evaluated = [e for e in events(tmp_path / "log", "evaluation") if e["split"] == "valid"]
    tried = evaluated[:-1]
    best = max(tried, key=lambda event: event["auroc"])
    assert best is not min(tried, key=lambda event: event["log_loss"])
    assert CheckpointRecord.read(tmp_path / "final").training["steps"] == best["step"]
    assert evaluated[-1]["auroc"] == best["auroc"]


@pytest.mark.parametrize("flag", ["--batch_norm", "--dropout=0.1"])
def test_own_models_regularize_themselves(flag):
    with pytest.raises(SettingsError, match="has no effect with --model my:model"):
        parse_settings(["--model=my:model", flag])
