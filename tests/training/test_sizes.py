"""Sizes by the data or the checkpoint, and the baselines beside a model."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.auroc import auroc
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.models.metrics import compute_metrics
from nvt_torchrec.training.baselines.baselines import (
    CLICK_RATE,
    REGRESSION,
    Trees,
    compute_baselines,
)
from nvt_torchrec.training.baselines.row_sample import Column, RowSample
from nvt_torchrec.training.data.choices import choose_sizes, read_schema
from nvt_torchrec.training.launch.distributed import process_group
from nvt_torchrec.training.loop.train import train
from nvt_torchrec.training.optim.learning_rates import compute_rates
from nvt_torchrec.training.settings.train_settings import (
    choose_global_batch,
    choose_size_name,
    fill_sizes,
    parse_settings,
)
from nvt_torchrec.training.sharding.model_config import model_config
from tests.nvt_loader.data import write_split
from tests.training.runs import events, train_here


@pytest.fixture(scope="module")
def split(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "criteo_binary" / "split"
    files = {"train": [3000], "valid": [1000], "test": [1000]}
    write_split(path, files, table_sizes=(10, 50, 200), dense=3)
    return path


def _sizes(settings):
    layers = settings.dense_arch_layer_sizes, settings.over_arch_layer_sizes
    return (settings.embedding_dim, *layers, settings.optimizer, settings.batch_size)


@pytest.mark.parametrize(
    ("rows", "size", "batch"),
    [(0, "tiny", 32), (80_000, "tiny", 128), (10**6, "small", 2048), (4 * 10**9, "large", 16384)],
)
def test_by_rows(rows, size, batch):
    assert (choose_size_name(rows), choose_global_batch(rows)) == (size, batch)


def test_flags_win():
    found = fill_sizes(parse_settings([]), 80_000, ranks=2)
    assert _sizes(found) == (16, (64, 16), (64, 1), "adagrad", 64)
    assert (found.size, found.batch_size_of("test")) == ("tiny", 4096)
    flags = ["--embedding_dim=8", "--batch_size=10", "--adagrad", "--size=medium"]
    found = fill_sizes(parse_settings(flags), 80_000, ranks=2)
    assert _sizes(found) == (8, (256, 8), (256, 128, 1), None, 10)
    assert (found.table_optimizer, found.batch_size_of("test")) == ("rowwise_adagrad", 10)
    found = fill_sizes(parse_settings(["--learning_rate=15"]), 80_000, ranks=1)
    assert found == dataclasses.replace(
        fill_sizes(parse_settings([]), 80_000, ranks=1), learning_rate=15.0
    )


@pytest.mark.parametrize(
    ("flags", "rows", "expected"),
    [
        ([], 80_000, (15, 8)),
        ([], 10**6, (1, 0)),
        (["--epochs=3"], 80_000, (3, 0)),
        (["--early_stopping=2"], 80_000, (15, 2)),
        (["--continue_from=a"], 80_000, (1, 0)),
    ],
)
def test_epochs_by_rows(flags, rows, expected):
    """One epoch of large logs, and of those that must not change in a daily update."""
    found = fill_sizes(parse_settings(flags), rows, ranks=1)
    assert (found.epochs, found.early_stopping) == expected


def test_a_checkpoint_knows_its_sizes(split, tmp_path):
    data = [f"--binary_path={split}", f"--log_path={tmp_path}"]
    flags = ["--batch_size=500", "--optimizer=rowwise_adagrad", "--eps=1e-5"]
    directory = ["--checkpoint_freq=2", f"--checkpoint_dir={tmp_path / 'steps'}"]
    train_here(*data, *flags, *directory, f"--save_checkpoint_path={tmp_path / 'end'}")
    schema = read_schema(parse_settings(data))
    expected = (8, (16, 8), (16, 1), "rowwise_adagrad", 250)
    for start in (f"--continue_from={tmp_path / 'end'}", *directory[1:]):
        given = parse_settings([*data, start, *(directory[:1] if start in directory else [])])
        found = choose_sizes(given, schema, ranks=2)
        assert (*_sizes(found), found.eps) == (*expected, 1e-5)
    recorded = CheckpointRecord.read(tmp_path / "end").training["settings"]
    assert found.dense_learning_rate == recorded["dense_learning_rate"]
    loaded = parse_settings([*data, f"--load_checkpoint_path={tmp_path / 'end'}"])
    assert _sizes(choose_sizes(loaded, schema, ranks=1))[:3] == expected[:3]
    tested = parse_settings([*data, f"--continue_from={tmp_path / 'end'}", "--mode=test"])
    assert choose_sizes(tested, schema, ranks=1).optimizer == "adagrad", "as a CPU may have it"
    with process_group() as group:  # without a flag of the model
        resumed = parse_settings([*data, *directory, "--resume", "--epochs=2"])
        assert train(resumed, group).steps == 12


@pytest.mark.parametrize(("optimizer", "tables_fall"), [("adagrad", False), ("sgd", True)])
def test_the_dense_layers_rate_falls(optimizer, tables_fall):
    """Those of tables, too, where the optimizer's steps do not shrink by themselves."""
    flags = ["--dense_decay=0.5", "--learning_rate=2", f"--optimizer={optimizer}"]
    settings = fill_sizes(parse_settings(flags), 0, 1)
    settings = settings.fill_in({"dense_learning_rate": 1.0, "lr_warmup_steps": 0})
    rates = [compute_rates(settings, step, 8, 8) for step in range(8)]
    falling = [1, 1, 1, 1, 1, 0.75, 0.5, 0.25]
    assert [rate.dense for rate in rates] == falling
    assert [rate.tables for rate in rates] == [2 * x if tables_fall else 2 for x in falling]
    stopping = dataclasses.replace(
        settings, early_stopping=3
    )  # with an end after epochs 1, 3 and 5
    rates = [compute_rates(stopping, step, 10, 2) for step in range(10)]
    assert [rate.dense for rate in rates] == [1, 1, 1, 1, 1, 0.5, 1, 1, 1, 0.5]


def test_boosted_trees_learn_what_a_regression_cannot():
    """A hump in a number, and of two ids that a row has the first; rows of weight 0 are noise."""
    random = np.random.default_rng(0)
    number, ids = random.normal(0, 1, 4000).astype(np.float32), random.integers(3, 9, 8000)
    labels = (np.abs(number) + (ids[::2] % 3 == 0) > 1.2).astype(np.float32)
    noise = np.arange(4000) % 4 == 0
    column = Column(ids, np.repeat(np.arange(4000), 2))
    given = np.where(noise, 1 - labels, labels)
    sample = RowSample(number[:, None], [column], {"y": given}, (~noise).astype(np.float32))
    assert auroc(Trees(sample, sample, "y").logits(sample), labels) > 0.99


def test_baselines_are_those_of_scikit_learn(split):
    """With inputs divided by the root of their penalty, whose weights have the penalty 1."""
    from scipy import sparse
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import OneHotEncoder

    settings = fill_sizes(parse_settings([f"--binary_path={split}", "--dense_bins=0"]), 0, 1)
    schema = read_schema(settings)
    with process_group():
        start, found = compute_baselines(settings, model_config(settings, schema), None)
    train_rows, test_rows = (pq.read_table(split / part).to_pandas() for part in ("train", "test"))
    names = list(schema.categorical)
    encoder = OneHotEncoder(handle_unknown="ignore").fit(train_rows[names].to_numpy())
    sizes = [len(values) for values in encoder.categories_]
    penalties = start.regressions["label"].penalties.repeat(sizes)
    assert 1 <= min(penalties) < max(penalties) <= 200

    def inputs(rows):
        ids = encoder.transform(rows[names].to_numpy()) @ sparse.diags_array(penalties**-0.5)
        return sparse.hstack([ids, rows[list(schema.dense)].to_numpy(float)], format="csr")

    model = LogisticRegression(max_iter=1000).fit(inputs(train_rows), train_rows["label"])
    labels = test_rows["label"].to_numpy()
    expected = compute_metrics(model.decision_function(inputs(test_rows)), labels)
    beside = found["test", REGRESSION]["label"]
    assert beside.auroc == pytest.approx(expected.auroc, abs=1e-3)
    assert beside.log_loss == pytest.approx(expected.log_loss, abs=1e-3)
    rate = train_rows["label"].mean()
    log_loss = -np.mean(np.where(labels > 0.5, np.log(rate), np.log(1 - rate)))
    assert found["test", CLICK_RATE]["label"].log_loss == pytest.approx(log_loss)


def test_baselines_stand_beside_the_model(split, tmp_path, caplog):
    caplog.set_level("INFO")
    train_here(f"--binary_path={split}", f"--log_path={tmp_path}", "--batch_size=500")
    names = [(event["split"], event["name"]) for event in events(tmp_path, "baseline")]
    assert names == [(s, name) for s in ("valid", "test") for name in (CLICK_RATE, REGRESSION)]
    page = (tmp_path / "training.html").read_text()
    assert all(
        f"{split}, {name}" in page and f"{split}, {name}" in caplog.text for split, name in names
    )
    assert "tables 8 wide, dlrm of layers 16,8 and 16,1, 500 samples per step" in caplog.text
