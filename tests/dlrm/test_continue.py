"""``--continue_from``: tables of a new generation go on from a checkpoint of an earlier one."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from clicklog.errors import BadInputError, OutputError, SchemaError, SettingsError
from dlrm import evaluate as evaluate_module
from dlrm import train as train_module
from dlrm.checkpoint.store import load_model, read_model_file
from dlrm.checkpoint.writer import finished
from dlrm.evaluate import score
from nvt_loader import KJTLoader
from tests.dlrm.continuing import read_all, save_start_here
from tests.dlrm.generations import (
    DIGESTS,
    SPEC,
    sources,
    table_sizes,
    write_output,
    write_workflow,
)
from tests.dlrm.resuming import assert_same
from tests.dlrm.runs import events, losses, torchrun, train_here, train_many
from tests.dlrm.test_checkpoint import Attack, change_model_file, forge

RATES = {"sgd": 0.3, "adagrad": 0.02, "rowwise_adagrad": 0.05, "adam": 0.005}
SHARDINGS = ("table_wise", "row_wise", "column_wise")
_TABLES = "model.dlrm.sparse_arch.embedding_bag_collection.embedding_bags."


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[Path]:
    """By generation, the splits with the same rows."""
    root = tmp_path_factory.mktemp("outputs")
    return [write_output(root / f"{number}", number) for number in range(3)]


def flags(data: Path, optimizer: str = "rowwise_adagrad", *more: str, batch: int = 32) -> list[str]:
    return [
        f"--binary_path={data}",
        f"--batch_size={batch}",
        f"--optimizer={optimizer}",
        f"--learning_rate={RATES[optimizer]}",
        "--throughput_check_freq_within_epoch=1000",
        *more,
    ]


@pytest.fixture(scope="module")
def trained(outputs, tmp_path_factory) -> dict[tuple[str, int, str], Path]:
    """Checkpoints of generation 0 by optimizer, world size and kind of sharding."""
    root = tmp_path_factory.mktemp("trained")
    found, runs = {}, []
    for optimizer in RATES:
        for ranks, kind in ((1, "table_wise"), *((2, kind) for kind in SHARDINGS)):
            path = found[optimizer, ranks, kind] = root / f"{optimizer}-{ranks}-{kind}"
            more = [f"--save_checkpoint_path={path}", "--max_steps=8", f"--sharding={kind}"]
            runs.append((ranks, flags(outputs[0], optimizer, *more, batch=32 // ranks)))
    for ranks, run in runs:
        if ranks == 1:
            train_here(*run)
    train_many([run for ranks, run in runs if ranks == 2], 2)
    return found


def assert_grown(then: Path, now: Path, generation: int = 2, since: int = 0) -> None:
    """Compare two checkpoints row by row, by the values of the ids."""
    before, after = read_all(then), read_all(now)
    assert before.keys() == after.keys()
    columns = {f"t_{column.name}": column for column in SPEC.categorical}
    for name, tensor in after.items():
        table = next((table for table in columns if f".{table}.weight" in name), None)
        if table is None:
            assert torch.equal(tensor, before[name]), name
            continue
        origin = sources(columns[table], since)
        assert tensor.shape[0] == table_sizes(generation)[list(columns).index(table)]
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
    for optimizer in RATES
    for ranks, then in ((1, "table_wise"), *((2, kind) for kind in SHARDINGS))
    for now in SHARDINGS
    # moments of column shards: see test_moments_of_column_shards
    if optimizer != "rowwise_adagrad" or "column_wise" not in (then, now)
]


def test_on_one_rank(outputs, trained, tmp_path):
    """From one rank and from two, and from each kind of sharding."""
    for optimizer, ranks, then, now in CASES:
        if now == "table_wise":  # on one rank they are all the same
            path, before = tmp_path / f"{optimizer}-{ranks}-{then}", trained[optimizer, ranks, then]
            save_start_here(flags(outputs[2], optimizer, f"--continue_from={before}"), path)
            assert_grown(before, path)


@pytest.mark.timeout(900)
def test_on_two_ranks(outputs, trained, tmp_path):
    """From each kind of sharding to each."""
    runs = {}
    for optimizer, ranks, then, now in CASES:
        before = trained[optimizer, ranks, then]
        more = [f"--continue_from={before}", f"--sharding={now}"]
        path = tmp_path / f"{optimizer}-{ranks}-{then}-{now}"
        runs[path] = before, flags(outputs[2], optimizer, *more, batch=16)
    jobs = json.dumps([[job, str(path)] for path, (_, job) in runs.items()])
    result = torchrun("tests/dlrm/continuing.py", jobs, timeout=800)
    assert result.returncode == 0, result.stderr
    for path, (before, _) in runs.items():
        assert_grown(before, path)


@pytest.mark.timeout(600)
def test_moments_of_column_shards(outputs, trained, tmp_path):
    """Bit by bit under the same plan, else the mean over the columns, or that of the row."""
    kinds = [("column_wise", kind) for kind in SHARDINGS] + [("table_wise", "column_wise")]
    jobs, paths = [], {}
    for then, now in kinds:
        before, path = trained["rowwise_adagrad", 2, then], tmp_path / f"{then}-{now}"
        more = [f"--continue_from={before}", f"--sharding={now}"]
        jobs.append([flags(outputs[2], "rowwise_adagrad", *more, batch=16), str(path)])
        paths[then, now] = before, path
    result = torchrun("tests/dlrm/continuing.py", json.dumps(jobs), timeout=500)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("tables have other column shards") == 3
    for (then, now), (before, path) in paths.items():
        for number, column in enumerate(SPEC.categorical):
            name = f"{_TABLES}t_{column.name}.weight".replace("model.", "optimizer.tables.", 1)
            name = f"{name}.t_{column.name}.momentum1"
            old, new = read_all(before)[name], read_all(path)[name]
            old = old.view(2, -1) if then == "column_wise" else old.view(1, -1)
            new = new.view(2, -1) if now == "column_wise" else new.view(1, -1)
            assert new.shape[1] == table_sizes(2)[number]
            origin = sources(column, 0)
            kept = np.flatnonzero(origin == np.arange(len(origin)))
            if then == now:
                expected = old[:, kept]
            else:
                expected = old[:, kept].double().mean(0, keepdim=True).float()
            assert torch.equal(new[:, kept], expected.expand(len(new), -1))
            assert old[:, kept].any()
            assert not np.delete(new.numpy(), kept, axis=1).any()


def test_the_first_predictions_are_those_of_the_old_model(outputs, trained, tmp_path, monkeypatch):
    """By evaluation: rows as each generation encodes them; values that were not known included."""
    seen = []
    original = evaluate_module.compute_metrics

    def keep(logits, labels):
        seen.append(logits)
        return original(logits, labels)

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


def test_the_first_predictions_of_the_saved_model(outputs, trained, tmp_path):
    before = trained["sgd", 2, "column_wise"]
    save_start_here(flags(outputs[2], "sgd", f"--continue_from={before}"), tmp_path / "start")
    expected, _ = score(load_model(before)[0], KJTLoader(outputs[0] / "train", 64, device="cpu"))
    model, config = load_model(tmp_path / "start")
    assert config.num_embeddings == table_sizes(2)
    loader = KJTLoader(outputs[2] / "train", 64, device="cpu")
    assert torch.equal(torch.from_numpy(score(model, loader)[0]), torch.from_numpy(expected))
    changed = sum(
        int((old.sparse_features.values() != new.sparse_features.values()).sum())
        for old, new in zip(KJTLoader(outputs[0] / "train", 64, device="cpu"), loader, strict=True)
    )
    assert changed > 100


@pytest.mark.timeout(600)
def test_two_ranks_continue_as_one(outputs, trained, tmp_path):
    """The same first predictions, and then the same losses, on new days and replayed rows."""
    before = tmp_path / "before"
    two = ["--sharding=row_wise", "--throughput_check_freq_within_epoch=1"]
    train_here(*flags(outputs[0], "adagrad", "--days=0", f"--save_checkpoint_path={before}"))

    def test_mode(data: Path, how: str, log: str) -> list[str]:
        more = ["--mode=test", f"--{how}={before}", f"--log_path={tmp_path / log}", *two]
        return flags(data, "adagrad", *more, batch=16)

    def continued_flags(log: str, batch: int, *more: str) -> list[str]:
        run = [f"--continue_from={before}", "--days=new", "--replay=0.3", *more]
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
    found = [losses(tmp_path / log) for log in ("one", "two")]
    assert len(found[0]) == -(-(260 + 329 + round(0.3 * 340)) // 32)
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)


def test_multi_hot_columns(tmp_path):
    data = [write_output(tmp_path / f"{n}", n, multi_hot=("cat_0", "cat_4")) for n in (0, 2)]
    train_here(*flags(data[0], "adagrad", f"--save_checkpoint_path={tmp_path / 'then'}"))
    save_start_here(
        flags(data[1], "adagrad", f"--continue_from={tmp_path / 'then'}"), tmp_path / "now"
    )
    assert_grown(tmp_path / "then", tmp_path / "now")
    logits = [
        score(load_model(tmp_path / name)[0], KJTLoader(path / "test", 64, device="cpu"))[0]
        for name, path in zip(("then", "now"), data, strict=True)
    ]
    assert np.array_equal(*logits)


@pytest.mark.parametrize("optimizer", RATES)
def test_a_continued_run_is_one_that_was_not_interrupted(outputs, tmp_path, optimizer):
    """On the same generation: the second of two epochs, with the optimizer's state and steps."""
    short = ["--limit_train_batches=6", "--limit_val_batches=1", "--validation_freq_within_epoch=4"]
    flags_ = [*flags(outputs[0], optimizer), *short, "--limit_test_batches=1"]
    train_here(*flags_, "--epochs=2", f"--save_checkpoint_path={tmp_path / 'both'}")
    train_here(*flags_, f"--save_checkpoint_path={tmp_path / 'first'}")
    train_here(
        *flags_,
        f"--continue_from={tmp_path / 'first'}",
        f"--save_checkpoint_path={tmp_path / 'second'}",
    )
    assert_same(tmp_path / "second", tmp_path / "both")
    first, second, both = (
        read_model_file(tmp_path / name)["training"] for name in ("first", "second", "both")
    )
    assert second["steps"] == first["steps"]
    assert second["optimizer_steps"] == both["optimizer_steps"] == 2 * first["steps"]


def test_what_a_checkpoint_records(outputs, trained, tmp_path):
    before = trained["adagrad", 1, "table_wise"]
    then = read_model_file(before)["training"]
    assert (then["generation"], then["days"], then["continued_from"]) == (0, [0, 1, 2], None)
    assert then["workflow_digest"] == DIGESTS[0]
    more = [f"--continue_from={before}", "--days=1", "--max_steps=2", f"--log_path={tmp_path}"]
    more.append(f"--save_checkpoint_path={tmp_path / 'now'}")
    train_here(*flags(outputs[2], "adagrad", *more))
    now = read_model_file(tmp_path / "now")["training"]
    assert (now["generation"], now["days"], now["workflow_digest"]) == (2, [0, 1, 2], DIGESTS[2])
    assert (now["steps"], now["optimizer_steps"]) == (2, 10)
    assert now["continued_from"]["checkpoint"] == str(before)
    assert (
        now["continued_from"]["digest"]
        == json.loads((before / "model.json").read_text())["blake2b"]
    )
    (event,) = events(tmp_path, "continue")
    # cat_0: 10 new and 5, 9 reused; twice 14 new and 17, 40; cat_4: 13 new and 8
    assert (event["new_rows"], event["reused_rows"]) == (10 + 2 * 14 + 13, 2 + 2 * 2 + 1)


def test_lower_rates_and_no_warm_up_unless_given(outputs, trained, tmp_path):
    before = trained["adagrad", 1, "table_wise"]
    own = [flag for flag in flags(outputs[2], "adagrad") if "learning_rate" not in flag]
    own += ["--max_steps=2", f"--log_path={tmp_path}"]
    train_here(*own)
    train_here(*own, f"--continue_from={before}")
    train_here(*own, f"--continue_from={before}", "--lr_warmup_steps=7", "--learning_rate=0.5")
    starts = [event["settings"] for event in events(tmp_path, "start")]
    assert [start["lr_warmup_steps"] for start in starts] == [10, 0, 7]
    first, continued, given = (start["learning_rate"] for start in starts)
    assert continued < first
    assert given == 0.5


def continued(data: Path, before: Path, path: Path, *more: str) -> list[str]:
    return flags(
        data,
        "rowwise_adagrad",
        f"--continue_from={before}",
        f"--checkpoint_dir={path / 'steps'}",
        "--checkpoint_freq=4",
        f"--log_path={path / 'log'}",
        f"--save_checkpoint_path={path / 'final'}",
        *more,
    )


def interrupted(monkeypatch, step: int, *flags_: str) -> None:
    """Train until step ``step`` (from 0)."""
    calls = iter(range(10**9))
    original = train_module.set_learning_rate

    def pull(optimizer, value):
        if next(calls) == step:
            raise KeyboardInterrupt
        original(optimizer, value)

    with monkeypatch.context() as patch:
        patch.setattr(train_module, "set_learning_rate", pull)
        with pytest.raises(KeyboardInterrupt):
            train_here(*flags_)


def test_a_resumed_run_does_not_begin_again(outputs, trained, tmp_path, monkeypatch):
    """It goes on from its own checkpoint, also when that of the earlier generation is gone."""
    gone = Path(shutil.copytree(trained["rowwise_adagrad", 2, "row_wise"], tmp_path / "gone"))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_here(*continued(outputs[2], gone, whole))
    interrupted(monkeypatch, 2, *continued(outputs[2], gone, broken))  # without a checkpoint yet
    assert not finished(broken / "steps")
    interrupted(monkeypatch, 14, *continued(outputs[2], gone, broken, "--resume"))
    shutil.rmtree(gone)
    train_here(*continued(outputs[2], gone, broken, "--resume"))
    assert [event["step"] for event in events(broken / "log", "resume")] == [12]
    assert len(events(broken / "log", "continue")) == 2
    assert_same(whole / "final", broken / "final")
    records = [read_model_file(path / "final")["training"] for path in (whole, broken)]
    for name in ("optimizer_steps", "days", "continued_from", "generation"):
        assert records[0][name] == records[1][name]


def test_new_days_are_those_of_the_run_when_it_resumes(outputs, tmp_path, monkeypatch):
    """They are new to the checkpoint that it continued from, not to its own."""
    before, path = tmp_path / "before", tmp_path / "run"
    train_here(
        *flags(outputs[0], "rowwise_adagrad", "--days=0", f"--save_checkpoint_path={before}")
    )
    new = ["--days=new", "--replay=0.25"]
    train_here(*continued(outputs[2], before, tmp_path / "whole", *new))
    interrupted(monkeypatch, 9, *continued(outputs[2], before, path, *new))
    result = train_here(*continued(outputs[2], before, path, "--resume", *new))
    assert result.samples == 260 + 329 + 340 // 4
    assert_same(path / "final", tmp_path / "whole" / "final")
    assert read_model_file(path / "final")["training"]["days"] == [0, 1, 2]
    shutil.rmtree(path / "final")
    for other, message in (
        ("--replay=0.3", "replay was 0.25, is 0.3"),
        ("--seed=5", "seed was 0, is 5"),
    ):
        with pytest.raises(SettingsError, match=message):
            train_here(*continued(outputs[2], before, path, "--resume", *new, other))
    for all_days in ([], ["--days=all"]):
        with pytest.raises(SettingsError, match=r"days was new, is None; replay was 0\.25"):
            train_here(*continued(outputs[2], before, path, "--resume", *all_days))


def test_a_directory_of_another_run(outputs, trained, tmp_path):
    first, second = (trained["rowwise_adagrad", ranks, "table_wise"] for ranks in (1, 2))
    run = continued(outputs[2], first, tmp_path, "--max_steps=4")
    train_here(*run)
    shutil.rmtree(tmp_path / "final")
    with pytest.raises(OutputError, match=r"holds a run, up to step_00000004\n.*--resume"):
        train_here(*run)
    with pytest.raises(
        SettingsError,
        match=r"continued from .*table_wise, not from (?s:.*)a --checkpoint_dir of its own",
    ):
        train_here(*continued(outputs[2], second, tmp_path, "--resume"))
    anew = [flag for flag in run if "continue_from" not in flag]
    anew = [flag.replace(str(tmp_path), str(tmp_path / "anew")) for flag in anew]
    train_here(*anew)
    shutil.rmtree(tmp_path / "anew" / "final")
    with pytest.raises(SettingsError, match="holds a run that began anew, not from"):
        train_here(*continued(outputs[2], second, tmp_path / "anew", "--resume"))


def test_a_directory_that_has_a_newer_checkpoint_by_now(outputs, trained, tmp_path):
    """The run goes on from its own checkpoint, which began from the one that was newest then."""
    before, run = tmp_path / "before", tmp_path / "run"
    steps = before / "steps"
    shutil.copytree(trained["rowwise_adagrad", 1, "table_wise"], steps / "step_00000008")
    train_here(*continued(outputs[2], steps, run, "--max_steps=4"))
    shutil.rmtree(run / "final")
    shutil.copytree(trained["rowwise_adagrad", 2, "table_wise"], steps / "step_00000009")
    train_here(*continued(outputs[2], steps, run, "--resume", "--max_steps=6"))
    training = read_model_file(run / "final")["training"]
    assert training["continued_from"]["checkpoint"] == str(steps / "step_00000008")
    assert (training["steps"], training["optimizer_steps"]) == (6, 14)


def test_which_checkpoint_is_meant(outputs, trained, tmp_path):
    """A final one, a periodic one, or the newest of a directory of them."""
    run = continued(outputs[2], trained["rowwise_adagrad", 1, "table_wise"], tmp_path)
    train_here(*run, "--max_steps=10")
    for name, steps in (("final", 18), ("steps", 16), ("steps/step_00000004", 12)):
        given = f"--continue_from={tmp_path / name}"
        start = tmp_path / "starts" / name.replace("/", "-")
        save_start_here(flags(outputs[2], "rowwise_adagrad", given), start)
        assert read_model_file(start)["training"]["optimizer_steps"] == steps
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadInputError, match=r"no checkpoint\n.*--save_checkpoint_path named"):
            train_here(*flags(outputs[2], "rowwise_adagrad", f"--continue_from={path}"))


def refusal(data: Path, checkpoint: Path, *more: str, optimizer: str = "sgd", error=SchemaError):
    with pytest.raises(error) as caught:
        train_here(*flags(data, optimizer, f"--continue_from={checkpoint}", *more))
    return str(caught.value)


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained["sgd", 1, "table_wise"], tmp_path / "copy"))


def test_what_is_no_ancestor_is_refused(outputs, copy, tmp_path):
    record = read_model_file(copy)["training"]
    change_model_file(copy, training={**record, "workflow_digest": "f" * 64})
    text = refusal(outputs[2], copy)
    assert (
        f"of workflow {'f' * 12}… (generation 0), which is none of the generations 0 to 2" in text
    )
    assert "train anew" in text
    change_model_file(copy, training={**record, "workflow_digest": None})
    assert "does not name the workflow of its data" in refusal(outputs[2], copy)
    change_model_file(copy, training={**record, "workflow_digest": DIGESTS[2]})
    assert "none of the generations 0 to 1" in refusal(outputs[1], copy), "a descendant"


def test_data_without_a_lineage(outputs, copy, tmp_path):
    data = write_output(tmp_path / "out", 2)
    file = tmp_path / "out" / "workflow" / "metadata.json"
    value = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in value.items() if k != "lineage"}))
    assert "names no generations" in refusal(data, copy)
    shutil.rmtree(file.parent)
    assert "no such file" in refusal(data, copy, error=BadInputError)
    write_workflow(file.parent, 2)
    (file.parent / "lineage" / "reused.2.parquet").unlink()
    assert "reused.2.parquet: missing" in refusal(data, copy, error=BadInputError)


def test_another_model_is_refused(outputs, copy):
    assert "embedding_dim was 8, is 16" in refusal(
        outputs[2], copy, "--embedding_dim=16", "--dense_arch_layer_sizes=16"
    )
    text = refusal(outputs[2], copy, "--over_arch_layer_sizes=8,1")
    assert "over_arch_layer_sizes was (16, 1), is (8, 1)" in text
    text = refusal(outputs[2], copy, optimizer="adam", error=SettingsError)
    assert "optimizer was sgd, is adam\n  -> give --optimizer sgd" in text


def test_a_table_in_which_new_values_would_share_rows(outputs, copy):
    sizes = ",".join(map(str, (33, *table_sizes(2)[1:])))
    more = ["--hash_indices", f"--num_embeddings_per_feature={sizes}"]
    text = refusal(outputs[2], copy, *more, error=SettingsError)
    assert "column cat_0 has 33 ids in the checkpoint's generation and 43 now" in text


def test_code_in_a_tensors_place(outputs, copy, tmp_path):
    """Tensors are read by torch.load with weights_only."""
    buffer = io.BytesIO()
    torch.save({"x": Attack(tmp_path / "attacked")}, buffer)
    (part,) = copy.glob("*.distcp")
    content = part.read_bytes() + buffer.getvalue()
    tensors = json.loads((copy / "tensors.json").read_text())
    begin = len(content) - len(buffer.getvalue())
    for tensor in tensors.values():
        if tensor["size"]:
            tensor["chunks"][0] |= {"begin": begin, "length": len(buffer.getvalue())}
            break
    forge(copy, part.name, content, pickled_only=False)
    forge(copy, "tensors.json", json.dumps(tensors).encode(), pickled_only=False)
    assert "damaged" in refusal(outputs[2], copy, error=BadInputError)
    assert not (tmp_path / "attacked").exists()


def test_another_tensor_in_a_tensors_place(outputs, copy):
    buffer = io.BytesIO()
    torch.save(torch.zeros(3), buffer)
    (part,) = copy.glob("*.distcp")
    content = part.read_bytes() + buffer.getvalue() + bytes(10_000)
    tensors = json.loads((copy / "tensors.json").read_text())
    chunk = tensors[f"{_TABLES}t_cat_0.weight"]["chunks"][0]
    chunk |= {"begin": part.stat().st_size, "length": len(buffer.getvalue())}
    forge(copy, part.name, content, pickled_only=False)
    forge(copy, "tensors.json", json.dumps(tensors).encode(), pickled_only=False)
    text = refusal(outputs[2], copy, error=BadInputError)
    assert "are no tensor [33, 8]" in text


def test_a_damaged_checkpoint(outputs, copy):
    (part,) = copy.glob("*.distcp")
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    text = refusal(outputs[2], copy, error=BadInputError)
    assert "the checkpoint is damaged" in text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--continue_from=a", "--load_checkpoint_path=b"], "are both set"),
        (["--continue_from=a", "--dataset_type=synthetic"], "have no days and no workflow"),
        (["--days=1", "--dataset_type=synthetic"], "have no days and no workflow"),
        (["--days=new"], "--days new without --continue_from"),
        (["--days=1-"], r"--days 1-\n.*all, new, or days such as 0-3,7"),
        (["--days=0-3", "--replay=0.1", "--continue_from=a"], "no effect without --days new"),
        (["--mode=inference_benchmark", "--continue_from=a"], "give --load_checkpoint_path"),
    ],
)
def test_settings_that_contradict_each_other(outputs, more, message):
    with pytest.raises(SettingsError, match=message):
        train_here(f"--binary_path={outputs[2]}", *more)
