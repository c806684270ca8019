"""The pages of docs/recipes: their commands exist, and run on small logs of the same formats."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.command_line import Parser, parse
from nvt_torchrec.etl.__main__ import COMMANDS as ETL
from nvt_torchrec.formats.feature_spec.toml_file import shipped_specs
from nvt_torchrec.inference.__main__ import COMMANDS as INFERENCE
from nvt_torchrec.training.settings.train_settings import parse_settings
from tests import shell
from tests.lookalikes.logs import LOGS
from tests.shell import ROOT

PAGES = {page.stem: page.read_text() for page in sorted((ROOT / "docs" / "recipes").glob("*.md"))}
_BLOCK = re.compile(r"^```(bash(?: download)?)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: For logs a thousand times smaller than the real ones: fewer rows a step, and smaller layers.
_SMALLER = [(r"--batch_size \d+", "--batch_size 128"), (r"512,256,(\d+)\b", r"64,\1")]
_METRICS = re.compile(r"^ *(valid|test) +[\d,]+ +[\d,]+ +(0\.\d+)", re.MULTILINE)


def commands(name: str, kind: str = "bash") -> str:
    """Return the commands of a recipe, which expect the log in RAW, or those that download it."""
    return "\n".join(block for found, block in _BLOCK.findall(PAGES[name]) if found == kind)


def test_each_log_has_a_recipe() -> None:
    assert set(PAGES) == set(shipped_specs()) - {"retail", "movielens_latest"}


@pytest.mark.parametrize("name", PAGES)
def test_commands_exist_with_their_flags(name: str) -> None:
    assert re.search(r"https://|kaggle competitions", commands(name, "bash download"))
    lines = commands(name).replace("\\\n", " ").splitlines()
    programs = [shlex.split(line) for line in lines if line.startswith("nvt-")]
    assert len(programs) >= 4
    for program in programs:
        if program[0] == "nvt-train":
            parse_settings(program[1:])
            continue
        called, subcommand, *arguments = program
        commands_of = {"nvt-etl": ETL, "nvt-infer": INFERENCE}[called]
        module = importlib.import_module(commands_of[subcommand][0])
        parse(Parser(prog=subcommand), arguments, *module.SETTINGS)


@pytest.mark.parametrize("name", ["census", "movielens"])
def test_small_logs_are_trained_with_the_defaults(name: str) -> None:
    """On census income, flags for layers and optimizer were worse than none."""
    (line,) = [line for line in commands(name).splitlines() if line.startswith("nvt-train")]
    flags = [word for word in shlex.split(line) if word.startswith("--")]
    assert flags == ["--binary_path", "--save_checkpoint_path"]


@pytest.mark.parametrize("name", ["avazu", "census"])  # one without and one with dense columns
def test_a_recipe_learns_and_scores_raw_rows(name: str, tmp_path: Path) -> None:
    rows = 6000
    LOGS[name](tmp_path / "RAW", rows, 1)
    script = commands(name)
    for pattern, smaller in _SMALLER:
        script = re.sub(pattern, smaller, script)
    status, printed = shell.run(tmp_path, f"set -eu\n{script}")
    assert status == 0, printed[-6000:]
    assert float(dict(_METRICS.findall(printed))["test"]) > 0.6
    assert '"auroc"' in printed  # of the raw rows
    scored = pq.read_table(tmp_path / "predictions.parquet")
    assert len(scored) == (1000 if name == "avazu" else rows // 2)
