"""What a damaged or forged list of tensors may not do: allocate, or fail as anything but damage."""

from __future__ import annotations

import pickle
import tracemalloc
from pathlib import Path

import pytest
from torch.distributed.checkpoint.metadata import Metadata

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.dlrm.checkpoint.tensors import Chunk, StoredTensor, check_places, read_tensors


@pytest.mark.parametrize(
    "content",
    [
        b"Nr" + (1 << 26).to_bytes(4, "little") + b".",  # an index in the memo
        b"\x80\x05\x96" + (1 << 28).to_bytes(8, "little") + b".",  # a bytearray
    ],
)
def test_a_small_pickle_takes_little_memory(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(BadInputError, match="damaged"):
        read_tensors(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 24


def test_names_that_are_no_text(tmp_path: Path) -> None:
    metadata = Metadata({7: None}, storage_data={})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(BadInputError, match="a tensor is named 7, which is not text"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(("begin", "good"), [(40, True), (39, False), (0, False)])
def test_chunks_do_not_share_bytes(tmp_path: Path, begin: int, good: bool) -> None:
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
    tensors = {
        name: StoredTensor("float32", (10,), (Chunk((0,), (10,), "__0_0.distcp", at, 40),))
        for name, at in (("a", 0), ("b", begin))
    }
    if good:
        check_places(tmp_path, tensors)
        return
    with pytest.raises(BadInputError, match="two chunks share the bytes"):
        check_places(tmp_path, tensors)
