"""Real processes: every row once, equal steps, resuming on other world sizes."""

from __future__ import annotations

import json

import pytest

from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import rows_of
from tests.nvt_loader.ranks import draw
from tests.ranks import run_ranks

ROWS = 1881  # 19 full steps of 96, and one of 57


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": [1000, 100, 700, 50, 31]})
    return root / "train"


def test_two_processes_stop_and_four_go_on(train, tmp_path):
    run_ranks(2, draw, train, tmp_path / "two.json", 96, 7)
    two = json.loads((tmp_path / "two.json").read_text())
    run_ranks(4, draw, train, tmp_path / "four.json", 96, 10**6, two["state"])
    four = json.loads((tmp_path / "four.json").read_text())

    alone = KJTLoader(train, 96, shuffle=True, device="cpu")
    epochs = [[rows_of([batch]) for batch in alone] for _ in range(3)]
    assert two["steps"] == four["steps"] == 20
    assert two["epochs"] == [epochs[0][:7], epochs[1][:7]]
    assert (two["state"]["epoch"], two["state"]["step"]) == (1, 5)
    assert four["epochs"] == [epochs[1][5:], epochs[2]]
    assert sorted(row for step in four["epochs"][1] for row in step) == list(range(ROWS))
    for ranks, found in ((2, two), (4, four)):
        missing = 18 * (96 // ranks) + 57 - 57 * (ranks - 1) // ranks  # all but its first step
        refusal = f"the ranks together got {ROWS - missing} rows in this epoch, {ROWS} were planned"
        assert found["refusals"] == [refusal] * ranks
