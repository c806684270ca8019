"""Histories in training: means over shared tables, the same by every plan, and what they gain."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.head import build_head
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.planning import plan_only
from tests.nvt_loader.data import add_history, write_split
from tests.training.continuing import RATES, SHARDINGS, flags
from tests.training.generations import write_output
from tests.training.reference import reference_losses
from tests.training.runs import (
    MODELS,
    assert_same,
    config_of,
    events,
    flags_of,
    losses,
    train_here,
    train_many,
    train_until_pulled,
)
from tests.training.shapes import dlrm

RECENT, SEEN = StoredHistory("recent", ("cat_1", "cat_2")), StoredHistory("seen", ("cat_1",))
MOST = "--max_events=5"
SHORT = ["--first_order=0.5", "--seed=5", "--epochs=1", "--throughput_check_freq_within_epoch=1"]
#: Each plan with one optimizer, and each other optimizer with one plan.
CASES = [*(("adagrad", how) for how in SHARDINGS), *((name, "row_wise") for name in RATES)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of three features, and one of two; the last step is empty on one of two ranks."""
    root = tmp_path_factory.mktemp("histories") / "criteo_binary" / "split"
    schema = write_split(root, {"train": [300, 200, 13], "valid": [99], "test": [50]})
    schema = add_history(root, schema, RECENT, keys=12)
    add_history(root, schema, SEEN, keys=3)
    return root


def test_every_plan_trains_the_same(data: Path, tmp_path: Path) -> None:
    """As a DLRM in plain PyTorch: features of one table whose gradients were not added, or divided
    by the number of events, would train otherwise, and so would first-order weights shared by two.
    """
    runs = {}
    for name, how in CASES:
        log = tmp_path / name / how
        more = [*SHORT, MOST, f"--sharding={how}", f"--log_path={log}"]
        runs[name, how] = flags(data, name, *more, batch=16)
    train_many(list(runs.values()), 2)
    for name in RATES:
        expected = reference_losses(data, *flags(data, name, *SHORT, MOST))
        train_here(*flags(data, name, *SHORT, MOST, f"--log_path={tmp_path / name / 'one'}"))
        of_name = [tmp_path / name / how for other, how in runs if other == name]
        for log in [tmp_path / name / "one", *of_name]:
            np.testing.assert_allclose(losses(log), expected, rtol=0, atol=1e-5, err_msg=str(log))


def test_a_killed_run_resumes_bit_by_bit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the events of the run; another number of events is another model."""
    train_here(*flags_of(data, tmp_path / "whole", MOST))
    train_until_pulled(monkeypatch, 25, *flags_of(data, tmp_path / "killed", MOST))
    with pytest.raises(SchemaError, match="max_events was 5, is 6"):
        train_here(*flags_of(data, tmp_path / "killed", "--max_events=6"), "--resume")
    train_here(*flags_of(data, tmp_path / "killed"), "--resume")
    assert config_of(tmp_path / "killed" / "final").max_events == 5
    assert_same(tmp_path / "whole" / "final", tmp_path / "killed" / "final")


@pytest.mark.parametrize("model", [*MODELS, "own"])
def test_every_model_takes_histories(data: Path, tmp_path: Path, model: str) -> None:
    """As further vectors, an own model by their names; the checkpoint says which there were."""
    path = tmp_path / "checkpoint"
    own = ["--model=examples.two_tower:build", '--model_settings=user=["recent.cat_1"]']
    run = flags(
        data, "adagrad", *MODELS.get(model, own), "--max_steps=4", f"--save_checkpoint_path={path}"
    )
    train_here(*run)
    config = config_of(path)
    assert config.max_events == 50
    assert config.vectors == (
        "cat_0",
        "cat_1",
        "cat_2",
        "recent.cat_1",
        "recent.cat_2",
        "seen.cat_1",
    )
    assert ModelConfig.from_dict(config.to_dict()) == config


def write_past(root: Path, click: Callable[[list[tuple[int, ...]]], float], keys: int) -> Path:
    """A log whose clicks depend on what the key of a row did before, and on nothing else."""
    files = {"train": [8000], "valid": [2000], "test": [2000]}
    schema = write_split(root, files, table_sizes=(10, 10, 40), row_group_rows=4096)
    add_history(root, schema, StoredHistory("recent", ("cat_2",)), keys=keys, click=click)
    return root


def test_clicks_that_depend_on_the_past(tmp_path: Path) -> None:
    """Half of a key's even ids is a logit of 0: the model finds it, and so does the regression that
    it starts from; without histories there is nothing to find."""

    def click(past: list[tuple[int, ...]]) -> float:
        even = [event[0] % 2 for event in past[-20:]]
        return 1 / (1 + np.exp(-8 * (np.mean(even) - 0.5))) if even else 0.5

    root = write_past(tmp_path / "split", click, keys=300)
    run = [f"--binary_path={root}", "--batch_size=256"]
    result = train_here(*run, "--max_events=20", f"--log_path={tmp_path / 'log'}")
    area = result.metrics["test"]["auroc"]
    assert 0.68 < area > result.baselines["test"]["logistic regression"]["auroc"] - 0.004
    (event,) = events(tmp_path / "log", "importance")
    assert "recent.cat_2" in str(event)
    assert train_here(*run, "--max_events=0").metrics["test"]["auroc"] < 0.55


def test_a_history_that_gives_the_label_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As one that holds the row itself: its name is in the warning."""
    root = write_past(tmp_path / "split", lambda past: past[-1][0] % 2 if past else 0.5, keys=20)
    train_here(f"--binary_path={root}", "--batch_size=128", "--max_events=1")
    assert re.search(
        r"too good to be true\n.*look at column recent\.cat_2, alone 1\.0", caplog.text
    )


def test_plans_without_gpus_and_other_loaders(data: Path) -> None:
    """A table is planned once, and Merlin's loader reads no histories."""
    text = plan_only(parse_settings([f"--binary_path={data}", "--plan_only=8"]))
    assert text.count("t_cat_1 ") == 1
    with pytest.raises(SettingsError, match="Merlin's Loader reads no histories"):
        train_here(*flags(data), "--loader=merlin")
    train_here(*flags(data), "--loader=merlin", "--max_events=0", "--max_steps=2")


def test_tables_that_have_grown(tmp_path: Path) -> None:
    """Rows of a later generation, histories included, are predicted as by the checkpoint before."""
    history, outputs = StoredHistory("recent", ("cat_0", "cat_1")), {}
    for generation in (0, 2):
        outputs[generation] = write_output(tmp_path / f"out-{generation}", generation)
        schema = TableSchema.read(outputs[generation])
        add_history(outputs[generation], schema, history, keys=9)
    checkpoint = tmp_path / "checkpoint"
    train_here(*flags(outputs[0]), MOST, "--max_steps=8", f"--save_checkpoint_path={checkpoint}")
    before, after = (
        train_here(f"--binary_path={path}", "--mode=test", f"--{how}={checkpoint}").metrics["test"]
        for path, how in ((outputs[0], "load_checkpoint_path"), (outputs[2], "continue_from"))
    )
    assert after == pytest.approx(before, abs=1e-6)
    again = tmp_path / "again"
    more = [f"--continue_from={checkpoint}", f"--save_checkpoint_path={again}", "--max_steps=4"]
    train_here(*flags(outputs[2]), *more)
    assert config_of(again).max_events == 5
    assert config_of(again).num_embeddings[0] > config_of(checkpoint).num_embeddings[0]


def test_first_order_weights_of_several_labels() -> None:
    """Each feature of a table has its own for each label; vectors keep none of them."""
    config = dlrm(("i",), ("a", "b"), (5, 7), 8, (8,), (4, 2), 0.5)
    histories = StoredHistory("x", ("b",)), StoredHistory("y", ("b", "a"))
    config = dataclasses.replace(config, labels=("k", "l"), histories=histories, max_events=3)
    assert config.term_places == {"a": 0, "b": 0, "x.b": 2, "y.b": 4, "y.a": 2}
    term = build_head(config).first_order
    assert term is not None
    vectors, dense = torch.randn(3, 5, 8), torch.randn(3, 1)
    found, rest = term(dense, vectors)
    pairs = [vectors[:, i, at : at + 2] for i, at in enumerate(config.term_places.values())]
    torch.testing.assert_close(found, 0.5 * sum(pairs))
    assert torch.equal(rest, torch.cat([torch.zeros(3, 5, 6), vectors[..., 6:]], 2))
    with pytest.raises(SchemaError, match="embedding_dim 6 with 2 labels and 2 histories"):
        dataclasses.replace(config, embedding_dim=6)
    with pytest.raises(SchemaError, match=r"a history of \{'c'"):
        dataclasses.replace(config, histories=(StoredHistory("x", ("c",)),))
