"""docs/flags.md against the parsers: ours, and the flags of the programs that it replaces."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from nvt_torchrec.base.command_line import add_arguments
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.dlrm.settings.flags import build_parser, parse_settings
from nvt_torchrec.dlrm.settings.other_trainers import LEFT_OUT, RENAMED
from nvt_torchrec.dlrm.settings.train_settings import TrainSettings
from tests.dlrm.runs import ROOT

PEERS = json.loads((ROOT / "tests" / "dlrm" / "peer_flags.json").read_text())
PAGE = (ROOT / "docs" / "flags.md").read_text()
THEIRS, OURS = PAGE.split("## Theirs")[1].split("## Only here")

#: Flag → (programs that have it, what the page says).
TABLE = {
    flag: (of.split(", "), text)
    for flag, of, text in re.findall(r"^\| `(--\w+)` \| ([^|]+) \| (.+) \|$", THEIRS, re.M)
}
ONLY_HERE = dict(re.findall(r"^\| `(--\w+)` \| (.+) \|$", OURS, re.M))

PARSER = build_parser()
add_arguments(PARSER, TrainSettings)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer["name"])
def test_every_flag_of_theirs_is_in_the_table(peer):
    listed = {flag for flag, (of, _) in TABLE.items() if peer["name"] in of}
    assert listed == set(peer["flags"])
    assert peer["commit"].startswith(re.search(rf"\| {peer['name']} \|.*`(\w+)`", PAGE).group(1))


def test_our_flags_are_those_that_are_here_and_those_only_here():
    here = {flag for flag, (_, text) in TABLE.items() if text.startswith("here")}
    assert here.isdisjoint(ONLY_HERE)
    assert here | set(ONLY_HERE) == PARSER.flags()


def test_the_page_describes_our_own_flags_as_the_help_does():
    fields = TrainSettings.__dataclass_fields__
    texts = {flag: fields[flag.removeprefix("--")].metadata["rules"].text for flag in ONLY_HERE}
    assert texts == ONLY_HERE


@pytest.mark.parametrize("flag", TABLE)
def test_a_flag_is_here_or_the_error_says_what_to_do(flag):
    _, text = TABLE[flag]
    what = re.match(r"here|renamed|left out", text).group()
    if what == "here":
        second = re.match(r"here: a second name of `(--\w+)`", text)
        if second:
            (action,) = [a for a in PARSER._actions if flag in a.option_strings]
            assert second.group(1) in action.option_strings
        return
    with pytest.raises(SettingsError, match=f"unknown argument {flag}") as error:
        parse_settings([flag, "1"])
    if what == "renamed":
        name = re.match(r"renamed: `(--\w+.*?)`", text).group(1)
        assert name == RENAMED[flag]
        assert name.split()[0] in PARSER.flags()
        assert error.value.remedy == f"it is called {name} here"
    else:
        assert text == f"left out: {LEFT_OUT[flag]}"
        assert error.value.remedy.startswith("leave it out: ")


#: Command lines in the manner of each program's users; NVIDIA's with our names of the schedule.
COMMANDS = {
    "nvt": "--num_embeddings_per_feature 40000000,39060,17295,7424,20265,3,7122,1543,63,40000000,"
    "3067956,405282,10,2209,11938,155,4,976,14,40000000,40000000,40000000,590152,12973,108,36 "
    "--over_arch_layer_sizes 1024,1024,512,256,1 --dense_arch_layer_sizes 512,256,128 "
    "--embedding_dim 128 --binary_path D --learning_rate 1.0 "
    "--validation_freq_within_epoch 1000000 "
    "--throughput_check_freq_within_epoch 1000000 --batch_size 256",
    "dlrm": "--embedding_dim 128 --dense_arch_layer_sizes 512,256,128 --over_arch_layer_sizes "
    "1024,1024,512,256,1 --num_embeddings_per_feature 40000000,39060,17295 --epochs 1 --pin_memory "
    "--batch_size 8192 --interaction_type=dcn --dcn_num_layers=3 --dcn_low_rank_dim=512 --adagrad "
    "--learning_rate 0.005 --multi_hot_distribution_type uniform --multi_hot_sizes=3,2,1",
    "NVIDIA": "--mode train --max_table_size 1000 --hash_indices --amp --epochs 5 --max_steps 500 "
    "--benchmark_warmup_steps 250 --batch_size 65536 --test_batch_size 65536 --seed 12345 "
    "--auc_threshold 0.8025 --test_freq 100 --test_after 0.5 --print_freq 10 --lr_policy nvidia "
    "--decay_power 2 --decay_end_lr 0 --log_path log --save_checkpoint_path c",
}


@pytest.mark.parametrize("program", COMMANDS)
def test_the_command_lines_of_the_others_are_understood(program):
    parse_settings(shlex.split(COMMANDS[program]))
