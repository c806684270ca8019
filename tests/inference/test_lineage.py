"""Where bundles come from: what they record, and ``python -m inference lineage``."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.atomic import read_json, write_json
from nvt_torchrec.dlrm.checkpoint.record import FORMAT
from nvt_torchrec.inference import Predictor, write_bundle
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.lineage import read_lineage
from nvt_torchrec.inference.model.bundle import describe
from nvt_torchrec.workflows.description import inspect
from tests.inference.bundles import make_bundle, make_origin, make_workflow
from tests.inference.conftest import Trained


def _rewrite(bundle: Path, **changes) -> None:
    value = read_json(bundle / "bundle.json", "a bundle")
    write_json(bundle / "bundle.json", {**value, **changes})


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


def test_bundles_of_before_are_opened(bundle: Path, tmp_path: Path, capsys) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    value = read_json(copy / "bundle.json", "a bundle")
    del value["origin"], value["generation"]
    write_json(copy / "bundle.json", value)
    Predictor.load(copy, check=True)
    assert main(["lineage", str(copy)]) == 2  # its workflow has a generation
    found = read_lineage(copy)
    assert found.checkpoint is None
    assert any("before checkpoints were recorded" in line for line in found.unverified)


def test_everything_at_hand_is_verified(bundle: Path, trained: Trained, capsys) -> None:
    flags = [bundle, "--checkpoint", trained.checkpoint, "--workflow", trained.workflow]
    status, found, err = _lineage(capsys, *flags)
    assert (status, found["wrong"], err) == (0, [], "")
    about = {line.split(":")[0] for line in found["verified"]}
    assert about == {"bundle", "checkpoint", "workflow", "days"}
    assert [day["day"] for day in found["days"]] == [0, 1, 2]
    assert [day["generation"] for day in found["days"]] == [0, 0, None]  # day 2 is not counted
    for day, rows in zip(found["days"], (400, 300, 201), strict=True):
        (file,) = day["files"]
        assert file["path"] == str(trained.raw / f"day_{day['day']}")
        assert file["fingerprint"]["size"] == os.path.getsize(file["path"])
        assert file["rows"]["in"] == rows
    assert main(["lineage", *map(str, flags)]) == 0
    text = capsys.readouterr().out
    for part in ("generation 0", f"{trained.raw / 'day_1'}: ", "learning_rate 0.1", "torchrec "):
        assert part in text
    assert "\nnot verified\n" in text
    for line in found["verified"] + found["unverified"]:
        assert f"\n  {line}" in text


def test_what_is_not_at_hand_is_listed(bundle: Path, capsys) -> None:
    status, found, _ = _lineage(capsys, bundle)
    assert status == 0
    for hint in ("--checkpoint", "--workflow", "--output_path"):
        assert any(hint in line for line in found["unverified"]), hint


def test_days_that_changed(bundle: Path, trained: Trained, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    shutil.copytree(trained.workflow, out / "workflow")
    manifest = read_json(trained.workflow.parent / "manifest.json", "a manifest")
    raw = shutil.copytree(trained.raw, tmp_path / "raw")
    for entry in manifest["inputs"]:
        entry["path"] = str(raw / Path(entry["path"]).name)
    write_json(out / "manifest.json", manifest)
    (raw / "day_0").write_bytes((raw / "day_0").read_bytes()[:-1])
    os.utime(raw / "day_1", (1, 1))
    (raw / "day_2").unlink()
    status, found, err = _lineage(capsys, bundle, "--output_path", out)
    assert status == 2
    assert len(found["wrong"]) == 1
    assert "day_0" in found["wrong"][0]
    assert "day_0" in err
    assert any("day_1" in line and "time of change" in line for line in found["unverified"])
    assert any("day_2" in line and "not there now" in line for line in found["unverified"])
    write_json(out / "manifest.json", {**manifest, "inputs": [{"day": "x"}]})
    with pytest.raises(BadInputError, match=r"manifest\.json: damaged: inputs"):
        read_lineage(bundle, output=out)


def test_another_checkpoint(bundle: Path, trained: Trained, tmp_path: Path, capsys) -> None:
    other = shutil.copytree(trained.checkpoint, tmp_path / "other")
    record = json.loads((other / "model.json").read_text())
    record["training"]["steps"] += 1
    write_json(other / "model.json", record | {"blake2b": FORMAT.digest(record)})
    status, found, err = _lineage(capsys, bundle, "--checkpoint", other)
    assert status == 2
    assert len(found["wrong"]) == 1
    assert "other/model.json" in found["wrong"][0]
    assert "does not come from what it claims" in err
    damaged = next(other.glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    _, found, _ = _lineage(capsys, bundle, "--checkpoint", other)
    assert len(found["wrong"]) == 2


def test_the_line_of_descent(tmp_path: Path, capsys) -> None:
    bundle = make_bundle(tmp_path / "b", generation=2, origin=make_origin(2, (0, 1)))
    status, found, _ = _lineage(capsys, bundle)
    assert status == 0
    assert found["workflow"]["generation"] == 2
    assert [day["generation"] for day in found["days"]] == [0, 1, 2]
    assert [day["trained"] for day in found["days"]] == [True, True, False]
    # a workflow that was extended since is a descendant
    later = make_workflow(tmp_path / "later", generation=2)
    metadata = read_json(later / "metadata.json", "a workflow")
    last = metadata["lineage"][-1]
    metadata["lineage"].append({**last, "number": 3, "days": [9]})
    write_json(later / "metadata.json", metadata)
    status, found, _ = _lineage(capsys, bundle, "--workflow", later)
    assert (status, found["wrong"]) == (0, [])
    stranger = make_workflow(tmp_path / "stranger", seed=5, generation=4)
    status, found, err = _lineage(capsys, bundle, "--workflow", stranger)
    assert status == 2
    assert "does not descend from it" in err


def test_days_that_add_nothing(tmp_path: Path, capsys) -> None:
    """The checkpoint was trained before the last generation, which encodes every row equally."""
    bundle = make_bundle(tmp_path / "b", generation=2, equal=2, origin=make_origin(1, (0, 1)))
    status, found, _ = _lineage(capsys, bundle)
    assert (status, found["wrong"]) == (0, [])


def test_claims_that_contradict_each_other(tmp_path: Path, capsys) -> None:
    bundle = make_bundle(tmp_path / "b", generation=2, origin=make_origin(1, (0,)))
    status, found, err = _lineage(capsys, bundle)
    assert status == 2
    assert "trained on generation 1 of the workflow, which is at generation 2" in err
    _rewrite(bundle, generation=3)
    _, found, _ = _lineage(capsys, bundle)
    assert "bundle: the generation of its workflow: 2, not 3" in found["wrong"]
    (bundle / "weights" / "top.0.bias.npy").write_bytes(
        (bundle / "weights" / "top.1.weight.npy").read_bytes()
    )
    _, found, _ = _lineage(capsys, bundle)
    assert any("top.0.bias.npy" in line for line in found["wrong"])


def test_a_checkpoint_of_an_earlier_generation(trained: Trained, tmp_path: Path) -> None:
    """The remedy is to train on, not to look for another workflow."""
    from tests.inference.test_bundle import _rewritten

    later = _rewritten(trained.workflow, tmp_path / "later", another=2**32 - 1)
    metadata = read_json(later / "metadata.json", "a workflow")
    values = {name: one["values"] for name, one in metadata["vocabularies"].items()}
    first = dataclasses.asdict(inspect(trained.workflow).lineage[0])
    second = {"number": 1, "digest": metadata["digest"], "days": [9], "reused": {}}
    metadata["lineage"] = [first, {**second, "values": values}]
    write_json(later / "metadata.json", metadata)
    with pytest.raises(
        SchemaError, match=r"trained on generation 0 .* is at generation 1\n.*--continue_from"
    ):
        write_bundle(later, trained.checkpoint, tmp_path / "bundle")
    write_bundle(trained.workflow, trained.checkpoint, tmp_path / "before")
    write_bundle(later, trained.checkpoint, tmp_path / "before")  # is there already: no error


def test_an_output_between_two_generations(trained: Trained, tmp_path: Path) -> None:
    from nvt_torchrec.formats.etl_output import SWITCH_FILE

    out = tmp_path / "out"
    shutil.copytree(trained.workflow, out / "workflow")
    (out / SWITCH_FILE).write_text("{}")
    with pytest.raises(BadInputError, match=r"(?s)new generation.*--resume"):
        write_bundle(out / "workflow", trained.checkpoint, tmp_path / "bundle")
