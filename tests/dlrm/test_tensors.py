"""What a damaged or forged list of tensors may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.dlrm.checkpoint.tensors import Chunk, StoredTensor, check_places


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
