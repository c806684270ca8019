"""A loader of some files of a split, and of samples of others."""

from __future__ import annotations

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.parquet.dataset import read_dataset
from nvt_torchrec.nvt_loader.selection import Selection, select
from tests.nvt_loader import fake_libcudf
from tests.nvt_loader.data import write_split
from tests.nvt_loader.helper import assert_same, rows_of

FILES = (300, 450, 7, 200, 90)
STARTS = np.concatenate([[0], np.cumsum(FILES)])
NEW = ("part.3.parquet", "part.4.parquet")
OLD = (("part.0.parquet",), ("part.1.parquet", "part.2.parquet"))


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    root = tmp_path_factory.mktemp("split")
    write_split(root, {"train": list(FILES)}, multi_hot=())
    return root / "train"


def rows(train, selection, **options) -> list[int]:
    options = {"device": "cpu", **options}
    return rows_of(KJTLoader(train, 32, selection=selection, **options))


def of_files(*numbers: int) -> set[int]:
    return {row for n in numbers for row in range(STARTS[n], STARTS[n + 1])}


def test_some_files(train):
    found = rows(train, Selection(NEW), virtual_shards=1)
    assert found == list(range(757, 1047)), "in the order of the files"
    assert rows(train, Selection(NEW[::-1]), virtual_shards=1) == found
    assert sorted(rows(train, Selection(NEW), shuffle=True)) == found
    everything = Selection(tuple(f"part.{i}.parquet" for i in range(5)))
    whole = list(KJTLoader(train, 32, device="cpu"))
    assert_same(list(KJTLoader(train, 32, device="cpu", selection=everything)), whole)


@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 0.5, 1.0])
def test_a_share_of_each_group_is_exact(train, share):
    found = rows(train, Selection(NEW, OLD, share, (7,)))
    assert len(set(found)) == len(found)
    assert set(found) >= of_files(3, 4)
    assert len(set(found) & of_files(0)) == round(share * 300)
    assert len(set(found) & of_files(1, 2)) == round(share * 457)


def test_cuts_where_libcudf_decodes(train, monkeypatch):
    """Whole row groups are decoded there."""
    options = {"selection": Selection(NEW, OLD, 0.3, (1, 2)), "device": "cpu"}
    expected = list(KJTLoader(train, 32, **options))
    fake_libcudf.install(monkeypatch)
    assert_same(list(KJTLoader(train, 32, **options)), expected)


def test_lists_are_cut_as_well(tmp_path):
    write_split(tmp_path, {"train": [100, 80]}, multi_hot=("cat_1",))
    train = tmp_path / "train"
    by_row = {}
    for batch in KJTLoader(train, 1, device="cpu"):
        by_row[rows_of([batch])[0]] = batch.sparse_features["cat_1"].values().tolist()
    selection = Selection(("part.1.parquet",), (("part.0.parquet",),), 0.37)
    found = list(KJTLoader(train, 1, device="cpu", selection=selection))
    assert len(found) == 117
    for batch in found:
        assert batch.sparse_features["cat_1"].values().tolist() == by_row[rows_of([batch])[0]]


def test_undersampling_keeps_the_same_rows_of_a_cut(train):
    """A cut is made of rows of the file; of these negative ones are left out."""
    selection = Selection((), (("part.0.parquet",),), 0.4, (5,))
    cut = set(rows(train, selection))
    positives = {
        row
        for batch in KJTLoader(train, 32, device="cpu", selection=selection)
        for row, label in zip(rows_of([batch]), batch.labels.tolist(), strict=True)
        if label
    }
    found = rows(train, selection, undersampling_rate=0.3)
    assert positives < set(found) < cut
    assert len(set(found)) == len(found)
    assert set(rows(train, selection, undersampling_rate=0.0)) == positives
    assert set(rows(train, selection, undersampling_rate=1.0)) == cut


@pytest.mark.parametrize(
    "other",
    [
        None,
        Selection(NEW),
        Selection(NEW, OLD, 0.31, (1,)),
        Selection(NEW, OLD, 0.3, (2,)),
        Selection(NEW, OLD[:1], 0.3, (1,)),
    ],
)
def test_another_selection_is_refused(train, other):
    state = KJTLoader(
        train, 32, device="cpu", selection=Selection(NEW, OLD, 0.3, (1,))
    ).state_dict()
    with pytest.raises(SchemaError, match="have changed since the loader state was written"):
        KJTLoader(train, 32, device="cpu", selection=other).load_state_dict(state)


def test_a_cut_is_part_of_the_fingerprint(train):
    """Also where the same row groups are read, and as many rows of them."""
    one = select(read_dataset(train), Selection((), (("part.2.parquet",),), 0.5, (1,)))
    for seed in range(2, 50):
        other = select(read_dataset(train), Selection((), (("part.2.parquet",),), 0.5, (seed,)))
        if other.cuts != one.cuts:
            break
    assert other.source == one.source
    assert other.fingerprint() != one.fingerprint()


def test_what_cannot_be_selected(train):
    with pytest.raises(BadInputError, match=r"train/part\.9\.parquet: no such file"):
        KJTLoader(train, 32, device="cpu", selection=Selection(("part.9.parquet",)))
    with pytest.raises(SettingsError, match=r"part\.0\.parquet is selected twice"):
        Selection(("part.0.parquet",), OLD, 0.3)
    with pytest.raises(SettingsError, match=r"share = 1\.5"):
        Selection((), OLD, 1.5)
