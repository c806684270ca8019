"""Thresholds come from a file; what is wrong with it is named."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.etl.drift.thresholds import ColumnThresholds, Thresholds, load_thresholds
from nvt_torchrec.formats.spec.toml_file import load_spec

RETAIL = load_spec("retail")


def load(tmp_path: Path, text: str, spec=None) -> Thresholds:
    file = tmp_path / "thresholds.toml"
    file.write_text(text)
    return load_thresholds(file, spec or load_spec())


def test_what_is_not_set_keeps_its_default(tmp_path: Path):
    assert load(tmp_path, "") == Thresholds()
    found = load(
        tmp_path,
        """
        label_rate = 1
        [default]
        psi = 0.1
        [columns.cat_3]
        unseen_share = inf
        """,
    )
    assert found.label_rate == 1.0
    assert found.malformed_share == Thresholds().malformed_share
    assert found.of("cat_4") == ColumnThresholds(psi=0.1)
    assert found.of("cat_3") == ColumnThresholds(psi=0.1, unseen_share=inf)
    assert found.to_dict()["columns"]["cat_3"]["unseen_share"] is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[default]\npsy = 1", r"default: unknown key 'psy'(.|\n)*did you mean 'psi'"),
        ("label = 1", r"unknown key 'label'(.|\n)*label_rate"),
        ("[columns.cat_30]\npsi = 1", r"columns: unknown column 'cat_30'(.|\n)*cat_"),
        ("[columns.cat_3]\nlabel_rate = 1", r"columns.cat_3: unknown key 'label_rate'"),
        ("[default]\npsi = -1", r"default.psi = -1(.|\n)*at least 0"),
        ("[default]\npsi = nan", r"default.psi = nan"),
        ("[default]\npsi = '0.2'", r"default.psi = '0.2'"),
        ("[default]\npsi = true", r"default.psi = True"),
        ("default = 1", r"default is 1 instead of a table"),
        ("[columns]\ncat_3 = 1", r"columns.cat_3 is 1 instead of a table"),
        ("columns = []", r"columns is \[\] instead of a table"),
        ("false_alarm_rate = 0", r"false_alarm_rate = 0"),
        ("false_alarm_rate = 1", r"false_alarm_rate = 1"),
        ("false_alarm_rate = inf", r"false_alarm_rate = inf"),
        ("[columns.int_3]\nunseen_share = 1", r"int_3.unseen_share has no effect: .* dense"),
        ("psi = = 1", r"cannot be read as thresholds"),
    ],
)
def test_errors_name_key_and_remedy(tmp_path: Path, text: str, message: str):
    with pytest.raises(SettingsError, match=message) as error:
        load(tmp_path, text)
    assert "thresholds.toml" in str(error.value)
    assert error.value.remedy


def test_a_hashed_column_has_no_unseen_values(tmp_path: Path):
    with pytest.raises(SettingsError, match="hashed"):
        load(tmp_path, "[columns.user]\nunseen_share = 1", RETAIL)
    assert load(tmp_path, "[columns.user]\npsi = 1", RETAIL).of("user").psi == 1


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(SettingsError, match=r"nowhere.toml(.|\n)*docs/drift.md"):
        load_thresholds(tmp_path / "nowhere.toml", load_spec())
