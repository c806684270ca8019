"""Reading into a buffer that is there already, such as pinned memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.lines import read_into


@pytest.mark.parametrize("remote", [False, True])
def test_only_the_bytes_asked_for(tmp_path: Path, remote: bool) -> None:
    path = tmp_path / "day_0"
    path.write_bytes(bytes(range(100)))
    buffer = np.full(10, 255, np.uint8)
    read_into(f"file://{path}" if remote else str(path), 20, 26, memoryview(buffer))
    assert buffer.tolist() == [20, 21, 22, 23, 24, 25, 255, 255, 255, 255]


def test_a_file_that_shrank(tmp_path: Path) -> None:
    path = tmp_path / "day_0"
    path.write_bytes(b"12345")
    with pytest.raises(BadInputError, match="5 bytes instead of 8"):
        read_into(str(path), 2, 8, memoryview(bytearray(9)))
