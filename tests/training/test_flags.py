"""docs/flags.md against the parsers: ours, and the flags of the programs that it replaces."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from nvt_torchrec.base.command_line import add_arguments
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.training.settings.train_settings import (
    TrainSettings,
    build_parser,
    parse_settings,
)
from tests.nvt_loader.data import write_split
from tests.training.runs import ROOT, events, passed, run_command

PEERS = json.loads((ROOT / "tests" / "training" / "peer_flags.json").read_text())
PAGE = (ROOT / "docs" / "flags.md").read_text()
SAME, RENAMED_HERE, OMITTED, OURS = (
    part.split("\n## ")[0]
    for part in re.split(r"## The same name|## Another name|## Left out|## Only here", PAGE)[1:]
)

PARSER = build_parser()
add_arguments(PARSER, TrainSettings)


def flags_in(text: str) -> set[str]:
    """Return the flags in a list, or in the first column of a table."""
    cells = [line.split("|")[1] if line.startswith("|") else line for line in text.splitlines()]
    return set(re.findall(r"`(--\w+)`", "\n".join(cells)))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer["name"])
def test_every_flag_of_theirs_is_on_the_page(peer):
    same = flags_in(SAME)
    assert set(peer["flags"]) <= same | flags_in(RENAMED_HERE) | flags_in(OMITTED)
    assert peer["name"] != "nvt" or set(peer["flags"]) <= same
    assert peer["commit"].startswith(re.search(rf"\| {peer['name']} \|.*`(\w+)`", PAGE).group(1))


def test_every_flag_of_ours_is_on_the_page():
    theirs = {flag for peer in PEERS for flag in peer["flags"]}
    ours = {flag for flag in PARSER.flags() if not flag.startswith("--no-")}
    assert flags_in(SAME) == ours & theirs
    assert flags_in(OURS) == ours - theirs


def test_other_flags_are_refused_with_what_to_use():
    """The parser of NVIDIA, absl's, takes --noX, and one dash."""
    flags = ["--noamp", "--noadagrad"]
    with pytest.raises(SettingsError) as error:
        parse_settings([*flags, "-amp", "--learning_rat=1"])
    lines = dict(line.split(": ", 1) for line in error.value.remedy.split("\n  -> "))
    assert lines == {
        **dict.fromkeys(flags, "leave it out: a switch is off unless it is given"),
        "-amp": "it takes two dashes: --amp",
        "--learning_rat": "did you mean --learning_rate?",
    }


#: The command in the README of TorchRec's example, but for 8 ranks and its larger tables.
SEED = (
    "torchx run -s local_cwd dist.ddp -j 1x2 --script train_torchrec.py -- "
    "--num_embeddings_per_feature 400,390,172,742,202,3,712,154,63,400,306,405,"
    "10,220,119,155,4,97,14,400,400,400,590,129,108,36 "
    "--over_arch_layer_sizes 1024,1024,512,256,1 --dense_arch_layer_sizes 512,256,128 "
    "--embedding_dim 128 --binary_path {path}/criteo_binary/split/ --learning_rate 1.0 "
    "--validation_freq_within_epoch 1000000 --throughput_check_freq_within_epoch 1000000 "
    "--batch_size 256"
)
#: The values of each column, which published sizes count.
VALUES = tuple(map(int, re.search(r"per_feature ([\d,]+)", SEED)[1].split(",")))


@pytest.fixture
def full(tmp_path) -> Path:
    """An output of the ETL for a log with all these values."""
    rows = {"train": [1000], "valid": [300], "test": [300]}
    sizes = tuple(values + 3 for values in VALUES)
    write_split(tmp_path / "criteo_binary" / "split", rows, table_sizes=sizes, dense=13)
    return tmp_path


def test_the_command_of_the_example(full):
    """It runs literally, with three dashes where its README has them; cat_5 needs 6 rows."""
    (full / "train_torchrec.py").symlink_to(ROOT / "train_torchrec.py")
    command = shlex.split(SEED.format(path=full))
    printed = passed(run_command([*command, "---adagrad"], cwd=full)).stderr
    assert printed.count("cat_5 3 → 6") == 1
    assert printed.count("---adagrad: read as --adagrad") == 1
    assert "Traceback" not in printed
    (log,) = (full / "training_log").iterdir()
    (start,) = events(log, "start")
    assert start["model"]["num_embeddings"] == [values + 3 for values in VALUES]
    assert start["settings"]["adagrad"]
    assert {event["split"] for event in events(log, "evaluation")} == {"valid", "test"}
