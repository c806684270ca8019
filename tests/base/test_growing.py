"""Arrays in files that are written a piece at a time."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import OutputError
from nvt_torchrec.base.files.growing import GrowingArray, create_array
from nvt_torchrec.base.files.mapping import map_array, write_array


@pytest.mark.parametrize("rows", [None, 1, 3])
@pytest.mark.parametrize("dtype", [np.int32, np.float64])
def test_pieces_are_written_as_the_whole_is(tmp_path: Path, rows: int | None, dtype: type) -> None:
    shape = (1000,) if rows is None else (rows, 1000)
    whole = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    with GrowingArray(tmp_path / "pieces.npy", dtype, rows) as array:
        for begin, end in ((0, 1), (1, 1), (1, 700), (700, 1000)):
            array.append(whole[..., begin:end])
        assert array.length == 1000
    write_array(tmp_path / "whole.npy", whole)
    assert (tmp_path / "pieces.npy").read_bytes() == (tmp_path / "whole.npy").read_bytes()
    with GrowingArray(tmp_path / "none.npy", dtype, rows):
        pass
    assert map_array(tmp_path / "none.npy").shape == (*shape[:-1], 0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["none.npy", "pieces.npy", "whole.npy"]


def test_nothing_is_left_of_pieces_after_an_error(tmp_path: Path) -> None:
    def fail() -> None:
        with GrowingArray(tmp_path / "a.npy", np.int64) as array:
            array.append(np.arange(3))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("shape", [(5,), (2, 3), (0,), (2, 0)])
def test_a_created_array_is_that_of_its_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    array = create_array(tmp_path / "a.npy", shape, np.int32)
    assert not array.any()
    array[...] = 7
    np.testing.assert_array_equal(map_array(tmp_path / "a.npy"), np.full(shape, 7, np.int32))


def test_a_full_disk_is_an_error_before_anything_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OutputError, match=r"a.npy: cannot be written: No space left") as caught:
        create_array(tmp_path / "a.npy", (5,), np.int64)
    assert caught.value.remedy
