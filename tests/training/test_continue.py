"""``--continue_from``: tables of a new generation go on from a checkpoint of an earlier one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.loop import evaluate as evaluate_module
from tests.training.continuing import (
    PLACEMENTS,
    RATES,
    SHARDINGS,
    TABLES,
    flags,
    read_all,
    save_start_here,
    save_starts,
    train_checkpoints,
)
from tests.training.generations import DIGESTS, SPEC, sources, table_sizes
from tests.training.runs import assert_same, events, losses, train_here, train_many

#: Optimizers by what they keep of a table: a moment for each weight, or one for each row.
KEPT = ("adagrad", "rowwise_adagrad")


@pytest.fixture(scope="module")
def trained(outputs, tmp_path_factory) -> dict[tuple[str, int, str], Path]:
    """Checkpoints of generation 0 by optimizer, world size and kind of sharding."""
    every = [(optimizer, *placement) for optimizer in KEPT for placement in PLACEMENTS]
    return train_checkpoints(tmp_path_factory.mktemp("trained"), outputs[0], every)


def assert_grown(then: Path, now: Path, generation: int = 2, since: int = 0) -> None:
    """Compare two checkpoints row by row, by the values of the ids."""
    before, after = read_all(then), read_all(now)
    assert before.keys() == after.keys()
    columns = {f"t_{column.vocabulary_name}": column for column in SPEC.categorical}
    for name, tensor in after.items():
        table = next((table for table in columns if f".{table}.weight" in name), None)
        if table is None:
            assert torch.equal(tensor, before[name]), name
            continue
        origin = sources(columns[table], since)
        assert tensor.shape[0] == table_sizes(generation)[SPEC.categorical.index(columns[table])]
        kept = np.flatnonzero(origin == np.arange(len(origin)))
        kept = kept[kept < len(before[name])]
        assert len(kept) < len(tensor) or table == "t_cat_3"
        assert torch.equal(tensor[kept], before[name][kept]), name
        anew = np.setdiff1d(np.arange(len(tensor)), kept)
        if name.endswith(f"{table}.weight"):
            assert torch.equal(tensor[anew], before[name][origin[anew]]), name
        else:
            assert not tensor[anew].any(), name


CASES = [
    (optimizer, ranks, then, now)
    for optimizer in KEPT
    for ranks, then in PLACEMENTS
    for now in SHARDINGS
    # moments of column shards: see test_moments_of_column_shards
    if optimizer != "rowwise_adagrad" or "column_wise" not in (then, now)
]


def test_on_one_rank(outputs, trained, tmp_path):
    """From one rank and from two, and from each kind of sharding."""
    for optimizer, ranks, then, now in CASES:
        # on one rank they are all the same
        if now == ("row_wise" if then == "table_wise" else "table_wise"):
            path, before = tmp_path / f"{optimizer}-{ranks}-{then}", trained[optimizer, ranks, then]
            save_start_here(flags(outputs[2], optimizer, f"--continue_from={before}"), path)
            assert_grown(before, path)


@pytest.mark.timeout(900)
def test_on_two_ranks(outputs, trained, tmp_path):
    """From each kind of sharding to each."""
    runs, checkpoints = {}, {}
    for optimizer, ranks, then, now in CASES:
        path = tmp_path / f"{optimizer}-{ranks}-{then}-{now}"
        checkpoints[path] = trained[optimizer, ranks, then]
        more = [f"--continue_from={checkpoints[path]}", f"--sharding={now}"]
        runs[path] = flags(outputs[2], optimizer, *more, batch=16)
    save_starts(runs)
    for path, before in checkpoints.items():
        assert_grown(before, path)


def test_moments_of_column_shards(outputs, trained, tmp_path):
    """Bit by bit under the same plan; under another one they are refused."""
    before, path = trained["rowwise_adagrad", 2, "column_wise"], tmp_path / "same"
    given = flags(outputs[2], "rowwise_adagrad", f"--continue_from={before}", batch=16)
    save_starts({path: [*given, "--sharding=column_wise"]})
    for number, column in enumerate(SPEC.categorical):
        table = f"t_{column.vocabulary_name}"
        name = f"{TABLES}{table}.weight".replace("model.", "optimizer.tables.", 1)
        name = f"{name}.{table}.momentum1"
        old, new = (read_all(checkpoint)[name].view(2, -1) for checkpoint in (before, path))
        assert new.shape[1] == table_sizes(2)[number]
        origin = sources(column, 0)
        kept = np.flatnonzero(origin == np.arange(len(origin)))
        assert torch.equal(new[:, kept], old[:, kept])
        assert old[:, kept].any()
        assert not np.delete(new.numpy(), kept, axis=1).any()
    with pytest.raises(
        SchemaError, match=r"momentum1 has the shape .*, but this run needs .*\n.*moment per column"
    ):
        save_start_here(given, tmp_path / "other")


def test_the_first_predictions_are_those_of_the_old_model(outputs, trained, tmp_path, monkeypatch):
    """By evaluation: rows as each generation encodes them; values that were not known included."""
    seen = []
    original = evaluate_module.compute_metrics

    def keep(logits, *others):
        seen.append(logits)
        return original(logits, *others)

    monkeypatch.setattr(evaluate_module, "compute_metrics", keep)
    before = trained["adagrad", 2, "row_wise"]
    train_here(*flags(outputs[0], "adagrad", "--mode=test", f"--load_checkpoint_path={before}"))
    for generation, optimizer in ((0, "adagrad"), (1, "adagrad"), (2, "sgd")):  # it is not needed
        more = ["--mode=test", f"--continue_from={before}"]
        train_here(*flags(outputs[generation], optimizer, *more))
    assert len(seen) == 4
    assert len(set(seen[0].tolist())) > 100
    for logits in seen[1:]:
        assert np.array_equal(logits, seen[0])


@pytest.mark.timeout(600)
def test_two_ranks_continue_as_one(outputs, trained, tmp_path):
    """The same first predictions, and then the same losses, on new days."""
    before = tmp_path / "before"
    two = ["--sharding=row_wise", "--throughput_check_freq_within_epoch=1"]
    train_here(*flags(outputs[0], "adagrad", "--days=0", f"--save_checkpoint_path={before}"))

    def test_mode(data: Path, how: str, log: str) -> list[str]:
        more = ["--mode=test", f"--{how}={before}", f"--log_path={tmp_path / log}", *two]
        return flags(data, "adagrad", *more, batch=16)

    def continued_flags(log: str, batch: int, *more: str) -> list[str]:
        run = [f"--continue_from={before}", "--days=new", *more]
        more = (*run, "--shuffle_training_set", f"--log_path={tmp_path / log}")
        return flags(outputs[2], "adagrad", *more, batch=batch)

    runs = [
        test_mode(outputs[0], "load_checkpoint_path", "then"),
        test_mode(outputs[2], "continue_from", "now"),
        continued_flags("two", 16, *two),
    ]
    train_many(runs, 2)
    train_here(*continued_flags("one", 32, two[1]))
    (then,), (now,) = (events(tmp_path / log, "evaluation") for log in ("then", "now"))
    for name in ("auroc", "log_loss", "mean_prediction"):
        assert then[name] == now[name]
    curves = [losses(tmp_path / log) for log in ("one", "two")]
    assert len(curves[0]) == -(-(260 + 329) // 32)
    np.testing.assert_allclose(*curves, rtol=0, atol=1e-5)


@pytest.mark.parametrize("optimizer", RATES)
def test_a_continued_run_is_one_that_was_not_interrupted(outputs, tmp_path, optimizer):
    """On the same generation: the second of two epochs, with the optimizer's state and steps."""
    short = ["--limit_train_batches=6", "--limit_val_batches=1", "--validation_freq_within_epoch=4"]
    flags_ = [*flags(outputs[0], optimizer), *short, "--limit_test_batches=1"]
    train_here(*flags_, "--epochs=2", f"--save_checkpoint_path={tmp_path / 'both'}")
    train_here(*flags_, f"--save_checkpoint_path={tmp_path / 'first'}")
    saved = f"--save_checkpoint_path={tmp_path / 'second'}"
    train_here(*flags_, f"--continue_from={tmp_path / 'first'}", saved)
    assert_same(tmp_path / "second", tmp_path / "both")
    first, second, both = (
        CheckpointRecord.read(tmp_path / name).training for name in ("first", "second", "both")
    )
    assert second["steps"] == first["steps"]
    assert second["optimizer_steps"] == both["optimizer_steps"] == 2 * first["steps"]


def test_what_a_checkpoint_records(outputs, trained, tmp_path):
    before = trained["adagrad", 1, "table_wise"]
    then = CheckpointRecord.read(before).training
    assert (then["generation"], then["days"], then["continued_from"]) == (0, [0, 1, 2], None)
    assert then["workflow_digest"] == DIGESTS[0]
    more = [f"--continue_from={before}", "--days=1", "--max_steps=2", f"--log_path={tmp_path}"]
    more.append(f"--save_checkpoint_path={tmp_path / 'now'}")
    train_here(*flags(outputs[2], "adagrad", *more))
    now = CheckpointRecord.read(tmp_path / "now").training
    assert (now["generation"], now["days"], now["workflow_digest"]) == (2, [0, 1, 2], DIGESTS[2])
    assert (now["steps"], now["optimizer_steps"]) == (2, 10)
    assert now["continued_from"]["checkpoint"] == str(before)
    assert (
        now["continued_from"]["digest"]
        == json.loads((before / "model.json").read_text())["blake2b"]
    )
    (event,) = events(tmp_path, "continue")
    assert event["new_rows"] == 10 + 14 + 13  # of cat_0, the shared vocabulary and cat_4
