"""Where bundles come from: what they record, and ``python -m inference lineage``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.formats.etl_output import SWITCH_FILE
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.lineage import read_lineage
from nvt_torchrec.inference.model.bundle import FORMAT as BUNDLE_FORMAT
from nvt_torchrec.inference.model.bundle import describe, write_bundle
from nvt_torchrec.models.checkpoint.record import FORMAT
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.writer import Descent
from tests.inference.bundles import make_bundle, make_origin, make_workflow
from tests.inference.conftest import Trained
from tests.inference.test_bundle import rewritten


def _rewrite(bundle: Path, **changes) -> None:
    value = read_json(bundle / "bundle.json", "a bundle")
    BUNDLE_FORMAT.write(bundle / "bundle.json", {**value, **changes})


def _lineage(capsys, *flags: str | Path) -> tuple[int, dict, str]:
    """Exit status, JSON and messages."""
    status = main(["lineage", *map(str, flags), "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out), err


def test_bundles_say_where_they_come_from(bundle: Path, trained: Trained) -> None:
    model = json.loads((trained.checkpoint / "model.json").read_text())
    record = model["training"]
    description = describe(bundle)
    origin = description.origin.checkpoint
    assert origin.digest == model["blake2b"]
    assert origin.continued_from is None
    assert (origin.steps, origin.samples) == (record["steps"], record["samples"])
    assert origin.generation == record.get("generation")
    assert origin.settings["learning_rate"] == 0.1
    assert "binary_path" not in origin.settings  # a place of this machine
    assert set(origin.versions) >= {"torch", "torchrec"}
    assert description.generation == inspect(trained.workflow).generation == 0


def test_a_bundle_that_lacks_its_origin(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    value = read_json(copy / "bundle.json", "a bundle")
    del value["origin"]
    BUNDLE_FORMAT.write(copy / "bundle.json", value)
    with pytest.raises(BadInputError, match=r"bundle\.json: damaged: origin is missing"):
        read_lineage(copy)


def test_everything_at_hand_is_verified(bundle: Path, trained: Trained, capsys) -> None:
    flags = [bundle, "--checkpoint", trained.checkpoint, "--workflow", trained.workflow]
    status, shown, err = _lineage(capsys, *flags)
    assert (status, shown["wrong"], err) == (0, [], "")
    about = {line.split(":")[0] for line in shown["verified"]}
    assert about == {"bundle", "checkpoint", "workflow"}
    assert shown["days"] == [{"day": day, "generation": 0, "trained": True} for day in (0, 1)]
    assert main(["lineage", *map(str, flags)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line in shown["verified"]:
        assert f"  {line}" in lines
    status, shown, _ = _lineage(capsys, bundle)
    assert status == 0
    for hint in ("--checkpoint", "--workflow"):
        assert any(hint in line for line in shown["unverified"]), hint


def test_another_checkpoint(bundle: Path, trained: Trained, tmp_path: Path, capsys) -> None:
    other = shutil.copytree(trained.checkpoint, tmp_path / "other")
    record = json.loads((other / "model.json").read_text())
    record["training"]["steps"] += 1
    write_json(other / "model.json", record | {"blake2b": FORMAT.digest(record)})
    status, shown, err = _lineage(capsys, bundle, "--checkpoint", other)
    assert status == 2
    assert len(shown["wrong"]) == 1
    assert "other/model.json" in shown["wrong"][0]
    assert "does not come from what it claims" in err
    damaged = next(other.glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    _, shown, _ = _lineage(capsys, bundle, "--checkpoint", other)
    assert len(shown["wrong"]) == 2


def test_the_line_of_descent(tmp_path: Path, capsys) -> None:
    bundle = make_bundle(tmp_path / "b", generation=2, origin=make_origin(2, (0, 1)))
    status, shown, _ = _lineage(capsys, bundle)
    assert status == 0
    assert shown["workflow"]["generation"] == 2
    assert [day["generation"] for day in shown["days"]] == [0, 1, 2]
    assert [day["trained"] for day in shown["days"]] == [True, True, False]
    # a workflow that was extended since is a descendant
    later = make_workflow(tmp_path / "later", generation=3, equal=2)
    status, shown, _ = _lineage(capsys, bundle, "--workflow", later)
    assert (status, shown["wrong"]) == (0, [])
    stranger = make_workflow(tmp_path / "stranger", seed=5, generation=4)
    status, shown, err = _lineage(capsys, bundle, "--workflow", stranger)
    assert status == 2
    assert "does not descend from it" in err


def test_days_that_add_nothing(tmp_path: Path, capsys) -> None:
    """The checkpoint was trained before the last generation, which encodes every row equally."""
    bundle = make_bundle(tmp_path / "b", generation=2, equal=2, origin=make_origin(1, (0, 1)))
    status, shown, _ = _lineage(capsys, bundle)
    assert (status, shown["wrong"]) == (0, [])


def test_claims_that_contradict_each_other(tmp_path: Path, capsys) -> None:
    bundle = make_bundle(tmp_path / "b", generation=2, origin=make_origin(1, (0,)))
    status, shown, err = _lineage(capsys, bundle)
    assert status == 2
    assert "trained on generation 1 of the workflow, which is at generation 2" in err
    _rewrite(bundle, generation=3)
    _, shown, _ = _lineage(capsys, bundle)
    assert "bundle: the generation of its workflow: 2, not 3" in shown["wrong"]
    (bundle / "weights" / "module.top.0.bias.npy").write_bytes(
        (bundle / "weights" / "module.top.1.weight.npy").read_bytes()
    )
    _, shown, _ = _lineage(capsys, bundle)
    assert any("module.top.0.bias.npy" in line for line in shown["wrong"])


def test_a_checkpoint_of_an_earlier_generation(trained: Trained, tmp_path: Path) -> None:
    """The remedy is to train on, not to look for another workflow."""
    descent = Descent((9,), inspect(trained.workflow).lineage)
    later = rewritten(trained.workflow, tmp_path / "later", another=2**32 - 1, descent=descent)
    with pytest.raises(
        SchemaError, match=r"trained on generation 0 .* is at generation 1\n.*--continue_from"
    ):
        write_bundle(later, trained.checkpoint, tmp_path / "bundle")
    write_bundle(trained.workflow, trained.checkpoint, tmp_path / "before")
    write_bundle(later, trained.checkpoint, tmp_path / "before")  # is there already: no error


def test_an_output_between_two_generations(trained: Trained, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.workflow, out / "workflow")
    (out / SWITCH_FILE).write_text("{}")
    with pytest.raises(BadInputError, match=r"(?s)new generation.*--resume"):
        write_bundle(out / "workflow", trained.checkpoint, tmp_path / "bundle")
