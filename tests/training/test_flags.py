"""docs/flags.md against the parsers: ours, and the flags of the programs that it replaces."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from nvt_torchrec.base.command_line import add_arguments
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.training.settings.other_trainers import LEFT_OUT
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


def remedies_of(argv: list[str]) -> dict[str, str]:
    """Parse unknown flags, two or more; return what the error says to use instead of each."""
    with pytest.raises(SettingsError) as error:
        parse_settings(argv)
    return dict(line.split(": ", 1) for line in error.value.remedy.split("\n  -> "))


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer["name"])
def test_every_flag_of_theirs_leads_to_what_the_page_says(peer):
    """None leads to a flag that only looks alike, and each error names the page."""
    renamed = dict(re.findall(r"^\| `(--\w+)` \| `(.+)` \|$", RENAMED_HERE, re.M))
    unknown = [flag for flag in peer["flags"] if flag not in PARSER.flags()]
    assert unknown or peer["name"] == "nvt"
    for flag, remedy in (remedies_of([*unknown, "-amp"]) if unknown else {}).items():
        if flag in renamed:
            assert remedy == f"it is called {renamed[flag]} here (docs/flags.md)"
        elif flag != "-amp":
            assert remedy == "it does not exist here; docs/flags.md says why, or what to use"
            assert flag in flags_in(OMITTED)


def test_what_to_use_is_there():
    renamed = dict(re.findall(r"^\| `(--\w+)` \| `(.+)` \|$", RENAMED_HERE, re.M))
    assert {flag.split()[0] for flag in renamed.values()} <= PARSER.flags()
    assert not renamed.keys() & PARSER.flags()
    assert flags_in(OMITTED) == LEFT_OUT
    # each alias is on the page, so that the page can be read alone
    aliases = {
        f"--{alias.split()[0]}"
        for field in dataclasses.fields(TrainSettings)
        if "rules" in field.metadata
        for alias in field.metadata["rules"].aliases
    }
    assert aliases == renamed.keys()


@pytest.mark.parametrize(
    "name", ["dlrm_main.py", "nvt_preproc.sh", "inference_benchmark`", "cuda_dot"]
)
def test_their_programs_and_values_are_on_the_page(name):
    assert PAGE.count(name) >= 1


def test_other_flags_are_refused_with_what_to_use():
    """The parser of NVIDIA, absl's, takes --noX, and one dash."""
    flags = ["--noamp", "--nohash_indices", "--noshuffle_batch_order"]
    assert remedies_of([*flags, "-amp", "-shuffle", "--learning_rat=1"]) == {
        **dict.fromkeys(flags, "remove it: a switch is off unless it is given"),
        "-amp": "it takes two dashes: --amp",
        "-shuffle": "it is called --shuffle_training_set here (docs/flags.md)",
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
