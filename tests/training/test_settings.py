from __future__ import annotations

import shlex
import sys

import pytest

from nvt_torchrec.base.errors import SchemaError, SettingsError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.models.config import ModelConfig, OwnModel
from nvt_torchrec.training.settings.train_settings import TrainSettings, fill_sizes, parse_settings
from nvt_torchrec.training.sharding.model_config import model_config
from tests.training.runs import run_command


def test_defaults_are_those_of_the_example_but_for_rates_and_sizes():
    settings = parse_settings([])
    assert settings == TrainSettings(
        binary_path="/data/criteo_1tb/criteo_binary/split/",
        epochs=None,
        learning_rate=None,
        change_lr=False,
        lr_change_point=0.80,
        lr_after_change_point=3.0,
        adagrad=False,
        num_embeddings=None,
        num_embeddings_per_feature=None,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("---amp", r"unknown argument ---amp\n.*two dashes: --amp"),
        ("--batchsize 5", r"unknown argument --batchsize\n.*called --batch_size here"),
        ("--learning-rate=2", r"unknown argument --learning-rate\n.*did you mean --learning_rate"),
        ("--batch_size many", "--batch_size: invalid int value: 'many'"),
        ("--dense_arch_layer_sizes 5,x", "'5,x' is not a comma-separated list of integers"),
        ("--batch_size 0", "--batch_size 0\n.*at least 1"),
        ("--adagrad --optimizer sgd", "--adagrad and --optimizer are both set"),
        ("--lr_decay_start 5", "no effect without --lr_decay_steps"),
        (
            "--lr_warmup_steps 9 --lr_decay_start 5 --lr_decay_steps 3",
            "--lr_decay_start 5 is before the warm-up ends",
        ),
        ("--dcn_num_layers 2", "no effect without --interaction_type dcn"),
        ("--max_table_size 50", "without --hash_indices\n.*add --hash_indices"),
        ("--max_table_size 50 --hash_indices --num_embeddings 9", "both set"),
        ("--keep 2", "without a checkpoint to write\n.*--save_checkpoint_path"),
        ("--learning_rate 1 --change_lr --lr_warmup_steps 3", "give one schedule"),
        ("--embedding_dim 6 --dense_arch_layer_sizes 6", "--embedding_dim 6: not a multiple of 4"),
        ("--continue_from a --load_checkpoint_path b", "are both set"),
        ("--days new", "--days new without --continue_from"),
        ("--days 1-", r"days '1-': cannot read '1-'\n.*0-3,7"),
        (
            "--loader merlin --shuffle_training_set",
            "--loader merlin does not support --shuffle_training_set\n.*docs/loader.md",
        ),
    ],
)
def test_nonsense_is_refused_with_a_remedy(flags, message):
    with pytest.raises(SettingsError, match=message):
        parse_settings(shlex.split(flags))


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("---amp", "error: unknown argument ---amp\n  -> "),
        ("--binary_path=none", "error: --binary_path none: no such directory\n  -> "),
    ],
)
def test_help_and_errors_need_no_torch(flag, message):
    code = (
        "import sys, train_torchrec\n"
        f"status = train_torchrec.main([{flag!r}])\n"
        "assert status == 2, status\n"
        "assert 'torch' not in sys.modules"
    )
    result = run_command([sys.executable, "-c", code])
    assert result.returncode == 0, result.stderr
    assert result.stderr.startswith(message)


@pytest.mark.parametrize(
    ("directories", "message"),
    [
        ([], "no such directory"),
        (["."], "holds no train, valid, test\n.*python -m etl run"),
        (["train", "validation", "test"], "holds no valid\n.*rename the directory 'validation'"),
        (["train", "valid"], "holds no test"),
        (
            [f"criteo_binary/split/{split}" for split in ("train", "valid", "test")],
            "give the directory of the splits: --binary_path .*/criteo_binary/split",
        ),
    ],
)
def test_wrong_binary_path_gets_a_hint(tmp_path, directories, message):
    path = tmp_path / "split"
    for directory in directories:
        (path / directory).mkdir(parents=True)
    with pytest.raises(SettingsError, match=message):
        TrainSettings(binary_path=str(path)).check_data()


SCHEMA = TableSchema("label", ("int_0",), ("cat_0", "cat_1", "cat_2"), (10, 50, 200))


def small(**values) -> TrainSettings:
    return fill_sizes(TrainSettings(**values), rows=1000, ranks=1)


def sizes(**values) -> tuple[int, ...]:
    return model_config(small(**values), SCHEMA).num_embeddings


def test_table_sizes_come_from_the_data_or_the_flags():
    assert sizes() == (10, 50, 200)
    assert sizes(num_embeddings=200) == (200, 200, 200)
    assert sizes(num_embeddings_per_feature=(10, 51, 200)) == (10, 51, 200)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_embeddings": 196}, r"column cat_2 needs 200 rows .* gets 196"),
        (
            {"num_embeddings_per_feature": (6, 50, 7)},
            "column cat_0 needs 10 rows .* gets 6; column cat_2 needs 200 rows .* gets 7",
        ),
        ({"num_embeddings_per_feature": (10, 50)}, "has 2 sizes, but the data have 3"),
    ],
)
def test_table_too_small_for_the_data(values, message):
    with pytest.raises(SettingsError, match=message) as error:
        sizes(**values)
    assert "--num_embeddings_per_feature 10,50,200" in error.value.remedy


def test_model_config_round_trip():
    config = model_config(small(), SCHEMA)
    value = config.to_dict()
    assert value.pop("vector_scale") == 1  # as of checkpoints that do not have it
    value = {key: list(item) if isinstance(item, tuple) else item for key, item in value.items()}
    assert ModelConfig.from_dict(value) == config
    needed = value.keys() - {"own", "dense_bins"}
    lacking = [{k: v for k, v in value.items() if k != key} for key in needed]
    for broken in (None, [], {**value, "colour": 1}, {"dense": []}, *lacking):
        with pytest.raises(SchemaError, match="not the configuration of a model"):
            ModelConfig.from_dict(broken)


def test_checkpoints_of_earlier_versions_say_what_an_own_model_takes():
    """They had the steps of the module, which nothing runs any more."""
    config = model_config(small(), SCHEMA)
    value = config.to_dict()
    del value["own"]
    assert ModelConfig.from_dict(value | {"program": None}) == config
    program = {"tensors": [], "steps": [], "output": 0, "id_columns": ["cat_0"]}
    own = ModelConfig.from_dict(value | {"model": "theirs:build", "program": program}).own
    assert own == OwnModel(id_columns=("cat_0",))
    with pytest.raises(SchemaError, match="vector_scale 1e"):  # beyond float32
        ModelConfig.from_dict({**value, "vector_scale": 1e308})
    with pytest.raises(SchemaError, match="2 table sizes"):
        ModelConfig.from_dict({**value, "num_embeddings": [1, 2]})
