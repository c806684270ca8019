"""Rows that are kept in memory between counting and encoding: read once, and the same output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nvt_torchrec.clicklog.text.tokenizer import parse_criteo
from nvt_torchrec.etl.engines import host, kept_rows
from nvt_torchrec.etl.run import run
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.formats.rows import Jagged, RawRows, count_bytes, make_empty_mask
from tests.etl.runs import tree
from tests.logs import CRITEO, random_rows, text_of

#: A label, 13 and 26 values of four bytes, two masks and a line of eight bytes.
_BYTES_OF_A_ROW = 1 + 4 * (13 + 26) + 8 * 3


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
    for name, max_bytes in {"twice": 0, "kept": num_kept * _BYTES_OF_A_ROW + 4096}.items():
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


def test_each_column_and_malformed_row_is_counted_once() -> None:
    text = text_of(random_rows(50, 0)).encode()
    assert count_bytes(parse_criteo(text, CRITEO, label=True)) == 50 * _BYTES_OF_A_ROW
    bad = count_bytes(parse_criteo(text + b"x" * 9000, CRITEO, label=True, max_bad_rows=1))
    assert 9000 < bad - 50 * _BYTES_OF_A_ROW < 10_000


def test_texts_and_lists_are_counted() -> None:
    lists = Jagged(np.array([0, 2]), pa.array(["a", "bcd"]))
    rows = RawRows(
        labels=np.zeros((1, 1), np.uint8),
        dense=np.zeros((0, 1)),
        dense_missing=make_empty_mask(0, 1),
        categorical=[pa.array(["text"]), lists],
        categorical_missing=make_empty_mask(2, 1),
        line=np.zeros(1, np.int64),
    )
    offsets_of_texts = 4 * (1 + 2)  # Arrow counts one for each value
    assert count_bytes(rows) == 1 + 8 * 3 + len("textabcd") + offsets_of_texts + 16
