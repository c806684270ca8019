"""Specs that ``etl guess`` writes run as they are, on each of the look-alikes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.recipes.lookalikes import LOOKALIKES
from nvt_torchrec.etl.__main__ import main


@pytest.mark.parametrize("engine", ["cpu", "dask"])
@pytest.mark.parametrize("name", sorted(set(LOOKALIKES) - {"criteo_x4"}))
def test_a_guessed_spec_runs_as_it_is(name: str, engine: str, tmp_path: Path, request) -> None:
    (tmp_path / "raw").mkdir()
    rows = 3000 if name.startswith("movielens") else 800  # few columns: rare values make rows equal
    path = LOOKALIKES[name](tmp_path / "raw", rows, 5)
    if path.is_dir():
        path = min(path.iterdir())
    spec, out = tmp_path / "spec.toml", tmp_path / "out"
    assert main(["guess", str(path), "--output", str(spec)]) in (0, None)
    options = ["--engine", "cpu"]
    if engine == "dask":
        options = ["--scheduler", request.getfixturevalue("dask_client").scheduler.address]
    arguments = ["--spec", str(spec), "--input_path", str(path), "--output_path", str(out)]
    assert main(["run", *arguments, *options]) == 0
    assert main(["check", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["rows"]["rejected"] == 0
