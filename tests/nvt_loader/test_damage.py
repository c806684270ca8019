"""Damage anywhere in a file: an error or the right batches, never wrong ones, never an end."""

from __future__ import annotations

import os
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.nvt_loader import KJTLoader
from tests.nvt_loader import fake_libcudf
from tests.nvt_loader.data import WRITER, write_split
from tests.nvt_loader.helper import assert_same

ENCODINGS = {
    "dictionaries": {},
    "plain": {"use_dictionary": False},
    "small dictionaries, lz4": {"compression": "lz4", "dictionary_pagesize_limit": 64},
}


@pytest.fixture(params=ENCODINGS)
def part(tmp_path, request):
    """One of two files of a split."""
    write_split(tmp_path, {"train": [150, 150]}, row_group_rows=70)
    path = tmp_path / "train" / "part.1.parquet"
    pq.write_table(
        pq.read_table(path), path, row_group_size=70, **WRITER | ENCODINGS[request.param]
    )
    return path


def batches(part):
    return list(KJTLoader(part.parent, 16, device="cpu"))


def damaged(part, expected) -> bool:
    """Whether the damage was noticed; if not, nothing is wrong."""
    warned = ""
    try:
        found = batches(part)
    except ClickLogError as error:
        warned = str(error)
    assert warned == "" or str(part) in warned
    if not warned:
        assert_same(found, expected)
    return warned != ""


def footer_of(content: bytes) -> int:
    """Where the footer begins."""
    return len(content) - 8 - int.from_bytes(content[-8:-4], "little")


def flipped(content: bytes, begin: int, end: int, choose: random.Random) -> bytes:
    """The content with one bit changed between two places."""
    changed = bytearray(content)
    changed[choose.randrange(begin, end)] ^= 1 << choose.randrange(8)
    return bytes(changed)


def test_a_flipped_bit_anywhere(part):
    """Footers have no checksums; of some flips there pyarrow's accessors end the process."""
    whole, expected = part.read_bytes(), batches(part)
    footer, choose = footer_of(whole), random.Random(0)
    noticed = 0
    for begin, end, rounds in ((4, footer, 60), (footer, len(whole), 100)):
        for _ in range(rounds):
            part.write_bytes(flipped(whole, begin, end, choose))
            noticed += damaged(part, expected) and end == footer
    assert noticed > 30  # the others hit headers' statistics and the like


#: Files without checksums: the options of the writer, and the type of the ids.
UNSUMMED = {
    "plain": ({"use_dictionary": False}, pa.int32()),
    "dictionaries": ({}, pa.int32()),
    "small dictionaries": ({"dictionary_pagesize_limit": 64}, pa.int32()),
    "snappy": ({"compression": "snappy", "use_dictionary": False}, pa.int32()),
    "by Arrow": ({"compression": "lz4", "use_dictionary": False}, pa.int32()),
    "of another width": ({"use_dictionary": False}, pa.int64()),
    "lists": ({"use_dictionary": False}, pa.list_(pa.int32())),
}


@pytest.mark.parametrize("decoder", ["cpu", "libcudf"])
@pytest.mark.parametrize("what", UNSUMMED)
def test_a_flipped_bit_that_no_checksum_shows_gives_no_id_outside_its_table(
    tmp_path, monkeypatch, decoder, what
):
    """Whatever the footer says about the column: FBGEMM would read another row of the table."""
    if decoder == "libcudf":
        fake_libcudf.install(monkeypatch)
    options, kind = UNSUMMED[what]
    names = ("cat_0", "cat_1", "cat_2")
    lists = names if pa.types.is_list(kind) else ()
    write_split(tmp_path, {"train": [150]}, multi_hot=lists)
    path = tmp_path / "train" / "part.0.parquet"
    table = pq.read_table(path)
    for name in names:
        index = table.schema.get_field_index(name)
        table = table.set_column(index, name, table[name].cast(kind))
    options = {"compression": "none", "write_page_checksum": False, **options}
    pq.write_table(table, path, row_group_size=70, **options)
    sizes = dict(zip(names, (10, 50, 200), strict=True))
    whole = path.read_bytes()
    choose = random.Random(what)
    refused = 0
    for _ in range(40):
        path.write_bytes(flipped(whole, 4, footer_of(whole), choose))
        try:
            found = list(KJTLoader(path.parent, 16, device="cpu"))
        except ClickLogError as error:
            refused += "outside its table" in str(error)
            continue
        for batch in found:
            for name, size in sizes.items():
                ids = batch.sparse_features[name].values()
                assert bool(((ids >= 0) & (ids < size)).all())
    assert refused > 0


def test_a_file_cut_anywhere(part):
    whole, expected = part.read_bytes(), batches(part)
    for at in [*range(0, len(whole), len(whole) // 12), len(whole) - 1]:
        part.write_bytes(whole[:at])
        assert damaged(part, expected)


def test_a_file_cut_anywhere_after_planning(part):
    whole = part.read_bytes()
    for at in [*range(0, len(whole), len(whole) // 6), len(whole) - 1]:
        part.write_bytes(whole)
        loader = KJTLoader(part.parent, 16, device="cpu")
        os.truncate(part, at)
        with pytest.raises(ClickLogError, match=part.name):
            list(loader)


def test_zeros_in_the_place_of_a_block(part):
    """What a file system shows of a block that was never written."""
    whole, expected = part.read_bytes(), batches(part)
    for at in range(0, len(whole) - 512, len(whole) // 8):
        part.write_bytes(whole[:at] + bytes(512) + whole[at + 512 :])
        assert damaged(part, expected)
