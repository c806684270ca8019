"""Specs and schemas that say anything: errors of this project, or a spec that works."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError, ClickLogError, SettingsError
from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.toml_file import load_spec, shipped_specs
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from tests.mutations import broken_texts, expect_own_errors, mutated

_TOML_VALUES = (
    "-1", "0", "1", "true", "9223372036854775808", "0x" + "f" * 5000, "1e400", "nan", "inf", '""',
    '"x"', '"a{0..99999999999}"', '"a{9..1}"', f'"a{{0..{"9" * 5000}}}"', "[]", "[[]]", "[1]", "{}",
    "{x = 1}", '["a", "a"]', '"../x"', "1979-05-27", "[" * 80 + "]" * 80,
)  # fmt: skip


@pytest.mark.parametrize("name", ["census", "criteo_x4", "retail"])
def test_specs_in_toml(tmp_path: Path, name: str) -> None:
    """Values exchanged, lines left out, doubled or put elsewhere."""
    lines = shipped_specs()[name].read_text().splitlines()
    file = tmp_path / "spec.toml"
    refused = 0
    for seed in range(400):
        rng, changed = random.Random(seed), list(lines)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(changed))
            what = rng.random()
            if what < 0.7:
                value = rng.choice(_TOML_VALUES)
                changed[at] = re.sub("=.*", lambda _, value=value: f"= {value}", changed[at])
            elif what < 0.8:
                del changed[at]
            else:
                changed.insert(rng.randrange(len(changed)), changed[at])
        file.write_text("\n".join(changed))
        try:
            load_spec(file)
        except SettingsError as error:
            refused += str(file) in str(error)
    assert refused > 100


def test_what_is_no_file_is_no_spec(tmp_path: Path) -> None:
    """It used to fill the memory."""
    (tmp_path / "spec.toml").symlink_to("/dev/zero")
    with pytest.raises(SettingsError, match=r"spec\.toml: not a feature spec: not a regular file"):
        load_spec(tmp_path / "spec.toml")
    with pytest.raises(SettingsError, match="not a regular file"):
        load_spec(tmp_path)  # a directory
    with pytest.raises(SettingsError, match=r"none\.toml: no such file\n.*avazu"):
        load_spec(tmp_path / "none.toml")


def test_toml_that_is_deep(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    for text in ("x = " + "[" * 5_000, "x = " + "{a=" * 5_000, "a." * 5_000 + "b = 1"):
        file.write_text(text)
        with pytest.raises(SettingsError, match=str(file)):
            load_spec(file)


def test_specs_in_json() -> None:
    value = json.loads(json.dumps(load_spec("retail").to_dict()))
    for seed in range(500):
        try:
            parse(FeatureSpec, mutated(value, seed), "a spec")
        except BadInputError:
            continue


def test_schemas(tmp_path: Path) -> None:
    history = StoredHistory("recent", ("cat_0",))
    columns = "label", ("int_0",), ("cat_0", "cat_1"), (5, 9), ("cat_1",)
    TableSchema(*columns, histories=(history,)).write(tmp_path)
    file = tmp_path / ".merlin" / "schema.json"
    expect_own_errors(file, lambda: TableSchema.read(tmp_path).arrow, rounds=600)


def test_json_that_parsers_disagree_on(tmp_path: Path) -> None:
    file = tmp_path / "value.json"
    file.write_text('{"a": {"b": 1, "b": 2}}')
    with pytest.raises(BadInputError, match=r"(?s)value\.json.*key 'b' occurs twice"):
        read_json(file, "a value")
    for name, content in broken_texts('{"a": [1, 2]}').items():
        file.write_bytes(content)
        if name in ("a list", "null"):
            read_json(file, "a value")
            continue
        with pytest.raises(ClickLogError, match="cannot be read as a value"):
            read_json(file, "a value")
