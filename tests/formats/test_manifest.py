"""How pages name a log and its split, by the manifest."""

from __future__ import annotations

import dataclasses

import pytest

from nvt_torchrec.formats.manifest import InputFile
from tests.manifests import PLAIN, ROWS


def test_a_log_is_named_by_its_first_and_last_file():
    assert PLAIN.log_name == "day_0"
    several = [InputFile(day, f"raw/day_{day}", {}, ROWS, "") for day in range(3)]
    named = dataclasses.replace(PLAIN, inputs=several).log_name
    assert named == "3 files, raw/day_0 to raw/day_2"


def test_days_have_the_titles_of_their_files():
    dates = {20000: "2024-10-04", 20001: "2024-10-05", 20002: "2024-10-06"}
    inputs = [InputFile(day, f"raw/{date}.csv", {}, ROWS, "") for day, date in dates.items()]
    days = {"train": [20000, 20001], "valid": [], "test": [20002]}
    text = dataclasses.replace(PLAIN, inputs=inputs, days=days).split_text
    assert text == "by days: train 2024-10-04 to 2024-10-05, valid none, test 2024-10-06"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ({"by": "share", "valid": 0.1, "test": 0.2, "seed": 0}, "valid 0.1, test 0.2, seed 0"),
        ({"by": "files", "train_files": ["a", "b"], "valid": 0.1}, "train files a, b, valid 0.1"),
    ],
)
def test_other_splits_are_named_by_their_keys(rule, text):
    assert dataclasses.replace(PLAIN, split=rule).split_text == f"by {rule['by']}: {text}"
