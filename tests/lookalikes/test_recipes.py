"""The pages of docs/recipes: their commands exist, and run on look-alikes."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from benchmarks.recipes.lookalikes import LOOKALIKES
from benchmarks.recipes.pages import downloads, page, recipes, script
from benchmarks.recipes.run import run_recipe
from nvt_torchrec.base.command_line import Parser, parse
from nvt_torchrec.dlrm.settings.flags import parse_settings
from nvt_torchrec.etl.__main__ import COMMANDS as ETL
from nvt_torchrec.formats.spec.toml_file import shipped_specs
from nvt_torchrec.inference.__main__ import COMMANDS as INFERENCE


def test_each_log_has_a_recipe() -> None:
    named = set(shipped_specs()) - {"retail", "movielens_latest"}
    assert set(recipes()) == named
    assert named <= set(LOOKALIKES)


@pytest.mark.parametrize("name", recipes())
def test_commands_exist_with_their_flags(name: str) -> None:
    assert re.search(rf"^\| `{name}` \| [\d,]+ \| 0\.\d+ \|$", page(name), re.MULTILINE)
    assert re.search(r"https://|kaggle competitions", downloads(name))
    lines = script(name).replace("\\\n", " ").splitlines()
    commands = [shlex.split(line) for line in lines if line.startswith("python ")]
    assert len(commands) >= 4
    for command in commands:
        if command[1] == "train_torchrec.py":
            parse_settings(command[2:])
            continue
        room, subcommand, *arguments = command[2:]
        module = importlib.import_module({"etl": ETL, "inference": INFERENCE}[room][subcommand][0])
        parse(Parser(prog=subcommand), arguments, *module.SETTINGS)


@pytest.mark.parametrize("name", ["avazu", "census"])  # one without and one with dense columns
def test_a_recipe_learns_and_scores_raw_rows(name: str, tmp_path: Path) -> None:
    rows = 6000
    found = run_recipe(name, tmp_path, rows)
    assert found.auroc["test"] > 0.6
    assert '"auroc"' in found.printed  # of the raw rows
    scored = pq.read_table(tmp_path / "predictions.parquet")
    assert len(scored) == (1000 if name == "avazu" else rows // 2)
