"""``--continue_from``: which checkpoint a run begins and resumes from, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError, SettingsError
from nvt_torchrec.models.checkpoint.record import CheckpointRecord
from nvt_torchrec.training.checkpoint.directories import list_complete
from tests.training.continuing import PLACEMENTS, flags, save_start_here, train_checkpoints
from tests.training.generations import DIGESTS, write_output, write_workflow
from tests.training.runs import assert_same, events, train_here, train_until_pulled, written_to
from tests.training.test_checkpoint import change_model_file


@pytest.fixture(scope="module")
def trained(outputs, tmp_path_factory) -> dict[tuple[int, str], Path]:
    """Checkpoints of generation 0 by world size and kind of sharding."""
    kinds = [("rowwise_adagrad", *kind) for kind in PLACEMENTS if kind[1] != "column_wise"]
    checkpoints = train_checkpoints(tmp_path_factory.mktemp("trained"), outputs[0], kinds)
    return {(ranks, sharding): path for (_, ranks, sharding), path in checkpoints.items()}


def continued(data: Path, before: Path, path: Path, *more: str) -> list[str]:
    steps = [f"--checkpoint_dir={path / 'steps'}", "--checkpoint_freq=4", *written_to(path)]
    return flags(data, "rowwise_adagrad", f"--continue_from={before}", *steps, *more)


def test_a_resumed_run_does_not_begin_again(outputs, trained, tmp_path, monkeypatch):
    """It goes on from its own checkpoint, also when that of the earlier generation is gone."""
    gone = Path(shutil.copytree(trained[2, "row_wise"], tmp_path / "gone"))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train_here(*continued(outputs[2], gone, whole))
    train_until_pulled(monkeypatch, 2, *continued(outputs[2], gone, broken))
    assert not list_complete(broken / "steps"), "without a checkpoint yet"
    train_until_pulled(monkeypatch, 14, *continued(outputs[2], gone, broken, "--resume"))
    shutil.rmtree(gone)
    train_here(*continued(outputs[2], gone, broken, "--resume"))
    assert [event["step"] for event in events(broken / "log", "resume")] == [12]
    assert len(events(broken / "log", "continue")) == 2
    assert_same(whole / "final", broken / "final")
    records = [CheckpointRecord.read(path / "final").training for path in (whole, broken)]
    for name in ("optimizer_steps", "days", "continued_from", "generation"):
        assert records[0][name] == records[1][name]


def test_new_days_are_those_of_the_run_when_it_resumes(outputs, tmp_path, monkeypatch):
    """They are new to the checkpoint that it continued from, not to its own."""
    before, path = tmp_path / "before", tmp_path / "run"
    saved = f"--save_checkpoint_path={before}"
    train_here(*flags(outputs[0], "rowwise_adagrad", "--days=0", saved))
    new = ["--days=new"]
    train_here(*continued(outputs[2], before, tmp_path / "whole", *new))
    train_until_pulled(monkeypatch, 9, *continued(outputs[2], before, path, *new))
    result = train_here(*continued(outputs[2], before, path, "--resume", *new))
    assert result.samples == 260 + 329
    assert_same(path / "final", tmp_path / "whole" / "final")
    assert CheckpointRecord.read(path / "final").training["days"] == [0, 1, 2]
    shutil.rmtree(path / "final")
    with pytest.raises(SettingsError, match="seed was 0, is 5"):
        train_here(*continued(outputs[2], before, path, "--resume", *new, "--seed=5"))
    for all_days in ([], ["--days=all"]):
        with pytest.raises(SettingsError, match="days was new, is None"):
            train_here(*continued(outputs[2], before, path, "--resume", *all_days))


def test_a_directory_of_another_run(outputs, trained, tmp_path):
    first, second = (trained[ranks, "table_wise"] for ranks in (1, 2))
    run = continued(outputs[2], first, tmp_path, "--max_steps=4")
    train_here(*run)
    shutil.rmtree(tmp_path / "final")
    with pytest.raises(OutputError, match=r"holds a run, up to step_00000004\n.*--resume"):
        train_here(*run)
    with pytest.raises(
        SettingsError,
        match=r"continued from .*table_wise, not from (?s:.*)its own --checkpoint_dir",
    ):
        train_here(*continued(outputs[2], second, tmp_path, "--resume"))
    anew = [flag for flag in run if "continue_from" not in flag]
    anew = [flag.replace(str(tmp_path), str(tmp_path / "anew")) for flag in anew]
    train_here(*anew)
    shutil.rmtree(tmp_path / "anew" / "final")
    with pytest.raises(SettingsError, match="holds a run that started from scratch, not from"):
        train_here(*continued(outputs[2], second, tmp_path / "anew", "--resume"))


def test_which_checkpoint_is_meant(outputs, trained, tmp_path):
    """A final one, a periodic one, or the newest of a directory of them."""
    run = continued(outputs[2], trained[1, "table_wise"], tmp_path)
    train_here(*run, "--max_steps=10")
    for name, steps in (("final", 18), ("steps", 16), ("steps/step_00000004", 12)):
        given = f"--continue_from={tmp_path / name}"
        start = tmp_path / "starts" / name.replace("/", "-")
        save_start_here(flags(outputs[2], "rowwise_adagrad", given), start)
        assert CheckpointRecord.read(start).training["optimizer_steps"] == steps
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(BadInputError, match=r"no checkpoint\n.*--save_checkpoint_path named"):
            train_here(*flags(outputs[2], "rowwise_adagrad", f"--continue_from={path}"))


def test_a_chain_of_checkpoints(outputs, tmp_path, monkeypatch):
    """Asked again, a run is done; ``--keep`` removes the older ones beside its checkpoint."""

    def run(name: str, *more: str) -> list[str]:
        checkpoint = f"--save_checkpoint_path={tmp_path / name}"
        return flags(outputs[0], "sgd", checkpoint, "--max_steps=2", *more)

    train_here(*run("a"))
    train_here(*run("other"))
    second = run("b", f"--continue_from={tmp_path / 'a'}", "--keep=2")
    train_here(*second)
    train_here(*run("c", f"--continue_from={tmp_path / 'b'}", "--keep=2"))
    assert {path.name for path in tmp_path.iterdir()} == {"b", "c", "other"}
    # of a step
    monkeypatch.setattr("nvt_torchrec.training.loop.train_steps.set_learning_rate", None)
    assert train_here(*second).steps == 2
    (tmp_path / "other").rename(tmp_path / "a")  # another checkpoint than that of "b"
    with pytest.raises(OutputError, match="already holds a checkpoint"):
        train_here(*second)


def refusal(
    data: Path, checkpoint: Path, *more: str, optimizer: str = "rowwise_adagrad", error=SchemaError
):
    with pytest.raises(error) as caught:
        train_here(*flags(data, optimizer, f"--continue_from={checkpoint}", *more))
    return str(caught.value)


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained[1, "table_wise"], tmp_path / "copy"))


def test_what_is_no_ancestor_is_refused(outputs, copy, tmp_path):
    record = CheckpointRecord.read(copy).training
    change_model_file(copy, training={**record, "workflow_digest": "f" * 64})
    text = refusal(outputs[2], copy)
    assert (
        f"of workflow {'f' * 12}… (generation 0), which is not one of the generations 0 to 2"
        in text
    )
    assert "train from scratch" in text
    change_model_file(copy, training={**record, "workflow_digest": None})
    assert "does not name the workflow of its data" in refusal(outputs[2], copy)
    change_model_file(copy, training={**record, "workflow_digest": DIGESTS[2]})
    assert "not one of the generations 0 to 1" in refusal(outputs[1], copy), "a descendant"


def test_data_without_a_whole_workflow(outputs, copy, tmp_path):
    data = write_output(tmp_path / "out", 2)
    workflow = tmp_path / "out" / "workflow"
    shutil.rmtree(workflow)
    assert "no such file" in refusal(data, copy, error=BadInputError)
    write_workflow(workflow, 2)
    next(workflow.rglob("unique.cat_4.parquet")).unlink()
    assert "unique.cat_4.parquet: missing" in refusal(data, copy, error=BadInputError)


def test_another_model_is_refused(outputs, copy):
    assert "embedding_dim was 8, is 16" in refusal(
        outputs[2], copy, "--embedding_dim=16", "--dense_arch_layer_sizes=16"
    )
    text = refusal(outputs[2], copy, "--over_arch_layer_sizes=8,1")
    assert "over_arch_layer_sizes was [16, 1], is [8, 1]" in text
    text = refusal(outputs[2], copy, optimizer="adagrad", error=SettingsError)
    assert (
        "optimizer rowwise_adagrad, but this run has adagrad\n  -> give --optimizer rowwise_adagrad"
        in text
    )
