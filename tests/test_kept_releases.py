"""What earlier releases wrote is opened by this code: see tests/keep_release.py."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from nvt_torchrec import KJTLoader, Predictor
from nvt_torchrec.etl.__main__ import main as etl
from tests.keep_release import DATA, KEPT, ROWS

RELEASES = sorted(path.name.removesuffix(".tar.xz") for path in DATA.glob("*.tar.xz"))


@pytest.fixture(scope="module", params=RELEASES)
def kept(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a release."""
    folder = tmp_path_factory.mktemp("kept")
    with tarfile.open(DATA / f"{request.param}.tar.xz") as packed:
        # a filter is an argument from Python 3.11.4 on
        packed.extraction_filter = getattr(tarfile, "data_filter", None)
        packed.extractall(folder)
    return folder


def test_there_is_a_release() -> None:
    """Without a file the tests below would be skipped in silence."""
    assert "0.2.0" in RELEASES


def test_what_is_kept(kept: Path) -> None:
    assert {path.name for path in kept.iterdir()} == set(KEPT)


@pytest.mark.parametrize("opened", ["BUNDLE", "CKPT"])
def test_scores_are_those_of_the_release(kept: Path, opened: str) -> None:
    """From the bundle, and from workflow and checkpoint."""
    predictor = (
        Predictor.load(kept / "BUNDLE")
        if opened == "BUNDLE"
        else Predictor.load(kept / "OUT" / "workflow", kept / "CKPT")
    )
    expected = pq.read_table(kept / "scores.parquet")["probability"].to_numpy()
    # Texts, as they stand in the log.
    with open(kept / "clicks.csv") as log:
        names = log.readline().strip().split(",")
    texts = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()))
    rows = pyarrow.csv.read_csv(kept / "clicks.csv", convert_options=texts)
    scores = predictor.predict(rows)
    assert len(scores) == ROWS
    assert scores.std() > 0.01
    np.testing.assert_allclose(scores, expected, atol=1e-6)


def test_the_output_is_whole_and_read(kept: Path) -> None:
    """By `etl check`, and by the loader."""
    assert etl(["check", str(kept / "OUT")]) == 0
    split = kept / "OUT" / "criteo_binary" / "split"
    rows = {
        name: sum(len(batch.labels) for batch in KJTLoader(split / name, 64, drop_last=False))
        for name in ("train", "valid", "test")
    }
    assert rows == {name: pq.read_table(split / name).num_rows for name in rows}
    assert sum(rows.values()) == ROWS
