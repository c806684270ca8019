"""Rows that are kept in memory between counting and encoding: read once, and the same output."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvt_torchrec.etl.engines import host, kept_rows
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from tests.etl.runs import tree
from tests.logs import CRITEO, random_rows, text_of

_BYTES_OF_A_ROW = 190


@pytest.mark.parametrize("num_kept", [0, 1500, 10**6], ids=["none", "some", "all"])
def test_blocks_that_fit_are_read_once(
    num_kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    log.mkdir()
    for day in range(4):
        rows = text_of(random_rows(1000, day))
        (log / f"day_{day}").write_text("x\n" + rows)
    reads = []
    read = host.read_block_chunks

    def count_reads(block, *args, **options):
        reads.append(block)
        return read(block, *args, **options)

    monkeypatch.setattr(host, "read_block_chunks", count_reads)
    outputs = {}
    for name, max_bytes in {"twice": 0, "kept": num_kept * _BYTES_OF_A_ROW}.items():
        reads.clear()
        monkeypatch.setattr(kept_rows, "MAX_BYTES", max_bytes)
        out = tmp_path / name
        run(EtlSettings(str(log), out, CRITEO, engine="cpu", block_mb=1, on_bad_rows="quarantine"))
        outputs[name] = tree(out), len(reads), len(set(reads))
    assert outputs["twice"][0] == outputs["kept"][0]
    _, read_twice, blocks = outputs["twice"]
    _, read_now, _ = outputs["kept"]
    if num_kept == 0:
        assert read_now == read_twice
    elif num_kept == 1500:
        assert blocks < read_now < read_twice
    else:
        assert read_now == blocks
