"""docs/specs.md: every example loads, and every key has one."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, InputFormat
from nvt_torchrec.formats.feature_spec.derivations import DERIVATIONS
from nvt_torchrec.formats.feature_spec.negatives import NegativesRule
from nvt_torchrec.formats.feature_spec.raw_types.time import EPOCHS
from nvt_torchrec.formats.feature_spec.split import SPLIT_BY, Split, spec_key
from nvt_torchrec.formats.feature_spec.toml_file import load_spec, shipped_specs

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "specs.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```toml\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
#: What an example that is a part of a spec needs besides.
LABEL = '\n[label]\nname = "label"\n'
CATEGORY = '\n[[categorical]]\nnames = "category"\nraw = "string"\n'


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_load(example: str, tmp_path: Path) -> None:
    value = tomllib.loads(example)
    whole = example + (LABEL if "label" not in value else "")
    whole += CATEGORY if "categorical" not in value else ""
    path = tmp_path / "spec.toml"
    path.write_text(whole, encoding="utf-8")
    spec = load_spec(path)
    assert parse(type(spec), spec.to_dict(), "a spec") == spec


def test_every_key_has_an_example() -> None:
    keys = {key for example in EXAMPLES for key in _keys(tomllib.loads(example))}
    own = {"name", "reading", "derive", "aggregate"}
    wanted = {"names", "from", "nulls", "trim", "lenient", "derive"}
    wanted |= {
        "time_format",
        "reference",
        "boundaries",
        "threshold",
        "positive",
        "negative",
        "weight",
        "train",
    }
    for kind in (InputFormat, DenseColumn, CategoricalColumn):
        wanted |= {field.name for field in dataclasses.fields(kind)} - own
    wanted |= {field.name for field in dataclasses.fields(Split)}
    wanted |= {"events", "aggregate", "of", "values", "window", "smoothing", "known"}
    wanted |= {"table", "path", "key", "input"}
    wanted |= {"vector", "width", "dtype"}
    wanted |= {"negatives", "value"}
    wanted |= {field.name for field in dataclasses.fields(NegativesRule)} - {"table"}
    wanted |= {"source"}
    assert {spec_key(key) for key in wanted} <= keys
    for word in (*DERIVATIONS, *SPLIT_BY, *EPOCHS, *shipped_specs()):
        assert re.search(rf"\b{word}\b", TEXT), word


def _keys(value: object) -> set[str]:
    if isinstance(value, list):
        return {key for item in value for key in _keys(item)}
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in _keys(item)}
    return set()
