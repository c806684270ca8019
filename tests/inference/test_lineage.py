"""Where bundles come from: what they record, and ``python -m inference lineage``."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.formats.etl_output import SWITCH_FILE
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.model.bundle import FORMAT as BUNDLE_FORMAT
from nvt_torchrec.inference.model.bundle import (
    compute_bundle_digest,
    read_description,
    write_bundle,
)
from nvt_torchrec.workflows.description import inspect
from tests.inference.bundles import make_bundle, make_origin
from tests.inference.conftest import Trained
from tests.inference.test_bundle import rewritten


def test_bundles_say_where_they_come_from(bundle: Path, trained: Trained) -> None:
    model = json.loads((trained.checkpoint / "model.json").read_text())
    record = model["training"]
    description = read_description(bundle)
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
        read_description(copy)


def test_what_the_command_prints(tmp_path: Path, capsys) -> None:
    bundle = make_bundle(tmp_path / "b", generation=2, origin=make_origin(2, (0, 1)))
    assert main(["lineage", str(bundle)]) == 0
    lines = capsys.readouterr().out.splitlines()
    description = read_description(bundle)
    assert lines[0].startswith(
        f"bundle      {bundle}: {compute_bundle_digest(bundle)[:12]}, float32, "
    )
    assert f"checkpoint  {description.origin.checkpoint.digest[:12]}, " in lines[1]
    assert "generation 2, days 0-1, continued from bbbb" in lines[1]
    assert lines[2] == f"workflow    {description.workflow_digest[:12]}, generation 2"
    assert [line.split()[0] for line in lines[4:]] == ["0", "1", "2"]
    (bundle / "weights" / "module.top.0.bias.npy").write_bytes(
        (bundle / "weights" / "module.top.1.weight.npy").read_bytes()
    )
    assert main(["lineage", str(bundle)]) == 2
    assert "module.top.0.bias.npy" in capsys.readouterr().err


def test_a_checkpoint_of_an_earlier_generation(trained: Trained, tmp_path: Path) -> None:
    """The remedy is to train on, not to look for another workflow."""
    line = {"days": (9,), "ancestors": inspect(trained.workflow).lineage}
    later = rewritten(trained.workflow, tmp_path / "later", another=2**32 - 1, **line)
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
