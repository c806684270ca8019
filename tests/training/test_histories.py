"""Histories in training: means over shared tables, the same by every plan, and what they gain."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.config import ModelConfig
from nvt_torchrec.models.contract import Columns
from nvt_torchrec.models.head import build_head
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.training.data.loaders import TrainBatch, spread_events
from nvt_torchrec.training.loop.finish import _permute_column
from nvt_torchrec.training.settings.train_settings import parse_settings
from nvt_torchrec.training.sharding.model_config import model_config
from nvt_torchrec.training.sharding.plan_only import plan_only
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
MAX_EVENTS = "--max_events=5"
SHORT = ["--first_order=0.5", "--seed=5", "--epochs=1", "--throughput_check_freq_within_epoch=1"]
#: Models of events one by one; the second computes what a model without them is given.
DIN = "--model=din"
MEANS = "--model=tests.training.test_histories:build_means"
ATTENTION = ["--model=examples.attention:build", "--model_settings=positions=true"]
#: Each plan with one optimizer, and each other optimizer with one plan.
CASES = [*(("adagrad", how) for how in SHARDINGS), *((name, "row_wise") for name in RATES)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of four features, two columns among them, of which one has lists, and one of two; the
    last step is empty on one of two ranks."""
    root = tmp_path_factory.mktemp("histories") / "criteo_binary" / "split"
    files = {"train": [300, 200, 13], "valid": [99], "test": [50]}
    shared = {"multi_hot": ("cat_3",), "vocabularies": ("cat_0", "item", "cat_2", "item")}
    schema = write_split(root, files, table_sizes=(10, 50, 200, 50), **shared)
    schema = add_history(root, schema, RECENT, keys=12)
    add_history(root, schema, SEEN, keys=3)
    return root


class Means(nn.Module):
    """Layers over vectors; with lists over their means, in the place of those in ``vectors``."""

    def __init__(self, columns: Columns) -> None:
        super().__init__()
        sizes = nn.Linear(columns.width, 8), nn.ReLU(), nn.Linear(8, 1)
        self.layers, self.maximum = nn.Sequential(*sizes), columns.max_events
        self.places = [columns.vectors.index(name) for name in columns.lists]

    def forward(
        self,
        dense: torch.Tensor,
        vectors: torch.Tensor,
        lists: torch.Tensor | None = None,
        present: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if lists is not None and present is not None:
            means = lists.sum(2) / present.sum(2, keepdim=True).clamp(min=1) * self.maximum**0.5
            parts = [*vectors.unbind(1)]
            for j, place in enumerate(self.places):
                parts[place] = means[:, j]
            vectors = torch.stack(parts, 1)
        return self.layers(torch.cat([dense, vectors.flatten(1)], 1))


def build_means(columns: Columns) -> Means:
    return Means(columns)


def test_every_plan_trains_the_same(data: Path, tmp_path: Path) -> None:
    """As a DLRM in plain PyTorch: features of one table whose gradients were not added, lists that
    were not summed or histories that were, would train otherwise, and so would linear weights
    shared by two columns of a vocabulary, or a table for each of them.
    """
    runs = {}
    for name, how in CASES:
        log = tmp_path / name / how
        more = [*SHORT, MAX_EVENTS, f"--sharding={how}", f"--log_path={log}"]
        runs[name, how] = flags(data, name, *more, batch=16)
    attending = {how: [*SHORT, MAX_EVENTS, DIN, f"--sharding={how}"] for how in SHARDINGS}
    for how, more in attending.items():
        log = f"--log_path={tmp_path / 'din' / how}"
        runs["din", how] = flags(data, "adagrad", *more, log, batch=16)
    train_many(list(runs.values()), 2)
    train_here(
        *flags(data, "adagrad", *SHORT, MAX_EVENTS, DIN, f"--log_path={tmp_path / 'din' / 'one'}")
    )
    expected = losses(tmp_path / "din" / "one")
    for how in attending:
        np.testing.assert_allclose(losses(tmp_path / "din" / how), expected, rtol=0, atol=1e-5)
    for name in RATES:
        expected = reference_losses(data, *flags(data, name, *SHORT, MAX_EVENTS))
        train_here(*flags(data, name, *SHORT, MAX_EVENTS, f"--log_path={tmp_path / name / 'one'}"))
        of_name = [tmp_path / name / how for other, how in runs if other == name]
        for log in [tmp_path / name / "one", *of_name]:
            np.testing.assert_allclose(losses(log), expected, rtol=0, atol=1e-5, err_msg=str(log))


def test_lists_have_the_events_of_the_means(data: Path, tmp_path: Path) -> None:
    """A model that takes means of lists trains as on the means: places in a wrong order, events of
    another row, gradients or linear weights that are lost would show."""
    found = []
    for number, sequences in enumerate(("", "--sequences=recent", "--sequences=seen,recent")):
        log = tmp_path / str(number)
        more = [sequences] if sequences else []
        train_here(*flags(data, "adagrad", *SHORT, MAX_EVENTS, MEANS, *more, f"--log_path={log}"))
        found.append(losses(log))
        np.testing.assert_allclose(found[number], found[0], rtol=0, atol=1e-5)
    log = f"--log_path={tmp_path / 'amp'}"
    train_here(
        *flags(data, "adagrad", *SHORT, MAX_EVENTS, MEANS, "--sequences=recent", "--amp", log)
    )
    amp = losses(tmp_path / "amp")
    assert amp != found[0]
    np.testing.assert_allclose(amp, found[0], rtol=0, atol=2e-2)


def test_the_newest_event_is_in_the_last_place(data: Path) -> None:
    """And a column that changes its rows does so with all of its places."""
    settings = parse_settings([f"--binary_path={data}", MAX_EVENTS, DIN, "--sequences=recent"])
    config = model_config(settings.fill_in({"embedding_dim": 8}), TableSchema.read(data))
    assert config.lists == ("recent.cat_1", "recent.cat_2")
    loader = KJTLoader(data / "train", 64, label=("label",), device="cpu", max_events=5)
    (batch,) = itertools.islice(loader, 1)
    padded = TrainBatch.pad(batch, 70, 70)
    spread = spread_events(padded, config)
    columns, places = batch.sparse_features.to_dict(), spread.sparse_features.to_dict()
    assert [*places] == [*config.lookups]
    for name in config.lists:
        newest = [ids[-1] for ids in columns[name].to_dense() if len(ids)]
        assert places[f"{name}:4"].values().tolist() == newest
        whole = [ids for ids in columns[name].to_dense() if len(ids) == 5]
        oldest = places[f"{name}:0"].values().tolist()
        assert oldest == [ids[0] for ids in whole] != [ids[4] for ids in whole]
    order = torch.cat([torch.randperm(64), torch.arange(64, 70)])
    for name in ("cat_2", "recent.cat_2", "seen.cat_1"):
        pooled = replace(config, sequences=())
        once = spread_events(_permute_column(padded, name, pooled, order), config)
        again = _permute_column(spread, name, config, order)
        for of_batch in ("values", "lengths"):
            assert torch.equal(*(getattr(b.sparse_features, of_batch)() for b in (once, again)))


def test_models_that_take_no_events(data: Path, tmp_path: Path) -> None:
    """A sentence, before anything is trained."""
    for more, text in {
        ("--sequences=recnt", DIN): "--sequences recnt: the data have no such history",
        ("--sequences=seen", "--model=deepfm"): "--sequences has no effect with --model deepfm",
        (DIN, "--max_events=9000"): "9000 events in 3 columns of sequences: a model gets at most",
        (DIN, "--max_events=0"): "attends to the events of histories, but the data have",
        ("--model=examples.deepfm:build", "--sequences=seen"): "unexpected keyword argument",
        (ATTENTION[0],): "missing 2 required positional arguments",
    }.items():
        with pytest.raises((SettingsError, SchemaError), match=text):
            train_here(*flags(data, "adagrad", *more))


@pytest.mark.parametrize("more", [[], [DIN, "--sequences=recent"]], ids=["means", "din"])
def test_a_killed_run_resumes_bit_by_bit(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    """With the events of the run; another number of events is another model."""
    model = more[:1]
    train_here(*flags_of(data, tmp_path / "whole", MAX_EVENTS, *more))
    train_until_pulled(monkeypatch, 25, *flags_of(data, tmp_path / "killed", MAX_EVENTS, *more))
    with pytest.raises(SchemaError, match="max_events was 5, is 6"):
        train_here(*flags_of(data, tmp_path / "killed", "--max_events=6", *model), "--resume")
    if more:
        with pytest.raises(SchemaError, match=r"sequences was .*recent.*, is .*seen"):
            train_here(*flags_of(data, tmp_path / "killed", *model, "--sequences=seen"), "--resume")
    train_here(*flags_of(data, tmp_path / "killed", *model), "--resume")
    config = config_of(tmp_path / "killed" / "final")
    assert (config.max_events, config.sequences) == (5, ("recent",) if more else ())
    assert_same(tmp_path / "whole" / "final", tmp_path / "killed" / "final")


@pytest.mark.parametrize("model", [*MODELS, "own", "din", "attention"])
def test_every_model_takes_histories(data: Path, tmp_path: Path, model: str) -> None:
    """As further vectors, an own model by their names; the checkpoint says which there were."""
    path = tmp_path / "checkpoint"
    own = ["--model=examples.deepfm:build"]
    others = {"own": own, "din": [DIN], "attention": [*ATTENTION, "--sequences=recent"]}
    chosen = {**MODELS, **others}[model]
    run = flags(data, "adagrad", *chosen, "--max_steps=4", f"--save_checkpoint_path={path}")
    train_here(*run)
    config = config_of(path)
    assert config.max_events == 50
    names = {"din": ("recent", "seen"), "attention": ("recent",)}
    assert config.sequences == names.get(model, ())
    assert config.vectors == (
        "cat_0",
        "cat_1",
        "cat_2",
        "cat_3",
        "recent.cat_1",
        "recent.cat_2",
        "seen.cat_1",
    )
    assert ModelConfig.from_dict(config.to_dict()) == config
    with_own_tables = replace(config, vocabularies=())
    assert "vocabularies was None" in config.describe_differences(with_own_tables)


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
        r"too good to be true\n.*look at column recent\.cat_2, which alone has 1\.0", caplog.text
    )


def test_plans_without_gpus_and_other_loaders(data: Path) -> None:
    """A table is planned once, and Merlin's loader reads no histories."""
    for model in ("--model=dlrm", DIN):
        text = plan_only(parse_settings([f"--binary_path={data}", "--plan_only=8", model]))
        assert re.findall(r"^t_\w+", text, re.M) == ["t_cat_0", "t_item", "t_cat_2"]
    with pytest.raises(SettingsError, match="Merlin's Loader cannot read histories"):
        train_here(*flags(data), "--loader=merlin")
    train_here(*flags(data), "--loader=merlin", "--max_events=0", "--max_steps=2")


@pytest.mark.parametrize("model", [[], [DIN]], ids=["dlrm", "din"])
def test_tables_that_have_grown(tmp_path: Path, model: list[str]) -> None:
    """Rows of a later generation, histories included, are predicted as by the checkpoint before."""
    history, outputs = StoredHistory("recent", ("cat_0", "cat_1")), {}
    for generation in (0, 2):
        outputs[generation] = write_output(tmp_path / f"out-{generation}", generation)
        schema = TableSchema.read(outputs[generation])
        add_history(outputs[generation], schema, history, keys=9)
    checkpoint = tmp_path / "checkpoint"
    keep = f"--save_checkpoint_path={checkpoint}"
    train_here(*flags(outputs[0]), MAX_EVENTS, "--max_steps=8", keep, *model)
    before, after = (
        train_here(f"--binary_path={path}", "--mode=test", f"--{how}={checkpoint}", *model).metrics[
            "test"
        ]
        for path, how in ((outputs[0], "load_checkpoint_path"), (outputs[2], "continue_from"))
    )
    assert after == pytest.approx(before, abs=1e-6)
    again = tmp_path / "again"
    more = [f"--continue_from={checkpoint}", f"--save_checkpoint_path={again}", "--max_steps=4"]
    train_here(*flags(outputs[2]), *more, *model)
    assert config_of(again).max_events == 5
    assert config_of(again).num_embeddings[0] > config_of(checkpoint).num_embeddings[0]


def test_first_order_weights_of_several_labels() -> None:
    """Each feature of a table has its own for each label; vectors keep none of them."""
    config = dlrm(("i",), ("a", "b"), (5, 7), 8, (8,), (4, 2), 0.5)
    histories = StoredHistory("x", ("b",)), StoredHistory("y", ("b", "a"))
    config = replace(config, labels=("k", "l"), histories=histories, max_events=3)
    assert config.first_order_coordinates == {"a": 0, "b": 0, "x.b": 2, "y.b": 4, "y.a": 2}
    term = build_head(config).first_order
    assert term is not None
    vectors, dense = torch.randn(3, 5, 8), torch.randn(3, 1)
    found, rest = term(dense, vectors)
    pairs = [
        vectors[:, i, at : at + 2] for i, at in enumerate(config.first_order_coordinates.values())
    ]
    torch.testing.assert_close(found, 0.5 * sum(pairs))
    assert torch.equal(rest, torch.cat([torch.zeros(3, 5, 6), vectors[..., 6:]], 2))
    with pytest.raises(SchemaError, match="embedding_dim 6 with 2 labels and up to 3 features"):
        replace(config, embedding_dim=6)
    with pytest.raises(SchemaError, match=r"a history of \{'c'"):
        replace(config, histories=(StoredHistory("x", ("c",)),))
