"""Shuffling: where rows go, in what memory, and what is left when it is interrupted."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.etl.parts.parquet import ROW_GROUP_ROWS, write_part
from nvt_torchrec.etl.parts.shuffle import Part, permute, round_keys, shuffle

SCHEMA = pa.schema(
    [
        pa.field("label", pa.float32(), nullable=False),
        pa.field("row", pa.int32(), nullable=False),
        pa.field("ids", pa.list_(pa.field("element", pa.int32(), nullable=False)), nullable=False),
    ]
)


def _table(rows: range) -> pa.Table:
    """Row g holds g, and a list that tells g, of 0 to 4 ids."""
    lists = [[g * 7 + i for i in range(g % 5)] for g in rows]
    label = np.array([g % 3 == 0 for g in rows], np.float32)
    return pa.table([label, np.array(rows, np.int32), lists], schema=SCHEMA)


def _write(root: Path, rows_by_part: list[int], days: list[int] | None = None) -> list[Part]:
    parts, begin = [], 0
    for i, rows in enumerate(rows_by_part):
        file = f"train/part.{i}.parquet"
        write_part(_table(range(begin, begin + rows)), root / file)
        parts.append(Part(file, rows, days[i] if days else 0))
        begin += rows
    return parts


def _read(root: Path, parts: list[Part]) -> list[int]:
    """The rows in their order; each must be whole."""
    order = []
    for part in parts:
        file = pq.ParquetFile(root / part.file, page_checksum_verification=True)
        assert file.schema_arrow == SCHEMA
        table = file.read()
        assert len(table) == part.rows
        order += table["row"].to_pylist()
        for row, label, ids in zip(*(table[i].to_pylist() for i in (1, 0, 2)), strict=True):
            assert label == (row % 3 == 0)
            assert ids == [row * 7 + i for i in range(row % 5)]
    return order


def _shuffled(root: Path, rows_by_part, days=None, *, workers=2, at_once=None, **options):
    parts = _write(root, rows_by_part, days)
    work = root / "work"
    options = {"mode": "full", "seed": 0, **options}
    shuffle(root, parts, work=work, workers=workers, bytes_at_once=at_once, **options)
    assert {file.suffix for file in work.rglob("*.*")} == {".json"}  # the space is given back
    return _read(root, parts)


@given(st.integers(1, 5000), st.integers(0, 2**70), st.data())
@settings(max_examples=60, deadline=None)
def test_permutation(n: int, seed: int, data) -> None:
    keys = round_keys(seed)
    whole = permute(0, n, n, keys)
    assert np.array_equal(np.sort(whole), np.arange(n))
    begin = data.draw(st.integers(0, n))
    end = data.draw(st.integers(begin, n))
    assert np.array_equal(permute(begin, end, n, keys), whole[begin:end])


def test_permutation_of_large_domains_stays_inside_and_apart() -> None:
    for n in (2**32 - 1, 2**32, 4_195_197_692, 2**60 + 1):
        images = permute(n - 5000, n, n, round_keys(3))
        assert images.min() >= 0
        assert images.max() < n
        assert len(np.unique(images)) == 5000


def test_permutation_stays_what_it_is() -> None:
    """An output must not change with the version of this program or of NumPy."""
    assert permute(0, 10, 10, round_keys(7)).tolist() == EXPECTED_OF_TEN


EXPECTED_OF_TEN = [1, 9, 0, 3, 5, 4, 2, 8, 7, 6]


@pytest.mark.parametrize("mode", ["full", "file"])
def test_order_is_of_seed_and_rows_alone(mode: str, tmp_path: Path) -> None:
    """Other parts, workers, memory: the same order; another seed: another."""
    first = _shuffled(tmp_path / "a", [300, 200, 500], [0, 0, 1], mode=mode)
    assert sorted(first) == list(range(1000))
    assert first != sorted(first)
    for i, (rows, days, workers, at_once) in enumerate(
        [
            ([500, 500], [0, 1], 1, None),
            ([100] * 10, [0] * 5 + [1] * 5, 4, 3000),
            ([0, 499, 1, 0, 500, 0], [0, 0, 0, 0, 1, 1], 3, 1),
        ]
    ):
        root = tmp_path / str(i)
        got = _shuffled(root, rows, days, mode=mode, workers=workers, at_once=at_once)
        assert got == first
    assert _shuffled(tmp_path / "seed", [300, 200, 500], [0, 0, 1], mode=mode, seed=1) != first


def test_no_rows(tmp_path: Path) -> None:
    assert _shuffled(tmp_path / "none", []) == []
    assert _shuffled(tmp_path / "empty", [0, 0]) == []
    assert _shuffled(tmp_path / "one", [1]) == [0]


def test_parts_are_written_as_the_engines_do(tmp_path: Path) -> None:
    """Row groups, checksums, encodings: those of a part that was written at once."""
    rows = ROW_GROUP_ROWS + 1000
    root = tmp_path / "big"
    table = pa.table(
        [np.zeros(rows, np.float32), np.arange(rows, dtype=np.int32), [[]] * rows], schema=SCHEMA
    )
    write_part(table, root / "train" / "part.0.parquet")
    parts = [Part("train/part.0.parquet", rows, 0)]
    shuffle(root, parts, mode="full", seed=0, work=root / "work", workers=1)
    got = pq.read_table(root / parts[0].file)
    write_part(got, root / "again.parquet")
    assert (root / parts[0].file).read_bytes() == (root / "again.parquet").read_bytes()
    assert pq.read_metadata(root / parts[0].file).num_row_groups == 2
    assert np.array_equal(np.sort(got["row"].to_numpy()), np.arange(rows))


class _Pulled(BaseException):
    """The plug: no handler of the code under test may take it."""


def test_interrupted_at_every_file_and_continued(tmp_path: Path, monkeypatch) -> None:
    """The process may end before or after any of its renames: the bytes come out the same."""
    rows = [40, 30, 0, 60, 20]
    parts = _write(tmp_path / "whole", rows)
    arguments = {"mode": "full", "seed": 3, "workers": 1, "bytes_at_once": 800}
    shuffle(tmp_path / "whole", parts, work=tmp_path / "whole" / "work", **arguments)
    expected = [(tmp_path / "whole" / part.file).read_bytes() for part in parts]

    replace = os.replace
    for when in itertools.product(range(1000), ("before", "after")):
        root = tmp_path / "-".join(map(str, when))
        _write(root, rows)
        count, pulled = itertools.count(), False

        def pull(source, target, *, count=count, when=when) -> None:
            now = next(count) == when[0]
            if now and when[1] == "before":
                raise _Pulled
            replace(source, target)
            if now:
                raise _Pulled

        with monkeypatch.context() as patch:
            patch.setattr("os.replace", pull)
            try:
                shuffle(root, parts, work=root / "work", **arguments)
            except _Pulled:
                pulled = True
        shuffle(root, parts, work=root / "work", **arguments)
        assert [(root / part.file).read_bytes() for part in parts] == expected, when
        if not pulled:
            break
    assert when[0] > 15  # plan, chunks, parts, buckets and their records


def test_a_continued_shuffle_does_not_repeat_what_is_done(tmp_path: Path, monkeypatch) -> None:
    parts = _write(tmp_path, [50] * 6)
    arguments = {"mode": "full", "seed": 0, "work": tmp_path / "work", "workers": 1}
    written: list[str] = []

    def write(table: pa.Table, path: Path) -> None:
        if len(written) == 3:
            raise OutputError("disk full")
        written.append(path.name)
        write_part(table, path)

    with monkeypatch.context() as patch:
        patch.setattr("nvt_torchrec.etl.parts.shuffle.write_part", write)
        with pytest.raises(OutputError, match="disk full"):
            shuffle(tmp_path, parts, bytes_at_once=1000, **arguments)
    monkeypatch.setattr(
        "nvt_torchrec.etl.parts.shuffle._scatter", None
    )  # it would have to read replaced parts
    with monkeypatch.context() as patch:
        finished = dict.fromkeys(("chunk.0", "bucket.0"), 0.0)
        patch.setattr("nvt_torchrec.etl.parts.shuffle.Journal.finished", lambda *_: finished)
        with pytest.raises(BadInputError, match="all rows were scattered is damaged"):
            shuffle(tmp_path, parts, bytes_at_once=1000, **arguments)
    written = ["none"] * 4
    monkeypatch.setattr("nvt_torchrec.etl.parts.shuffle.write_part", write)
    shuffle(tmp_path, parts, bytes_at_once=1000, **arguments)
    assert 3 <= len(written) - 4 <= 4  # of six; one bucket may be repeated
    assert sorted(_read(tmp_path, parts)) == list(range(300))


def test_refused(tmp_path: Path) -> None:
    parts = _write(tmp_path, [50, 50])
    arguments = {"mode": "full", "seed": 0, "work": tmp_path / "work", "workers": 1}
    with pytest.raises(BadInputError, match=r"part\.1\.parquet: 50 rows instead of 51"):
        shuffle(tmp_path, [parts[0], Part(parts[1].file, 51, 0)], **arguments)
    shuffle(tmp_path, parts, **arguments)
    with pytest.raises(OutputError, match=r"other settings or inputs:\n  seed: 0 before, 1 now"):
        shuffle(tmp_path, parts, **{**arguments, "seed": 1})


def test_damage_is_not_shuffled(tmp_path: Path) -> None:
    """A flipped byte in a part stops it before any part is replaced."""
    parts = _write(tmp_path, [5000, 5000])
    path = tmp_path / parts[1].file
    data = bytearray(path.read_bytes())
    data[pq.read_metadata(path).row_group(0).column(1).data_page_offset + 40] ^= 4
    path.write_bytes(data)
    before = (tmp_path / parts[0].file).read_bytes()
    with pytest.raises(BadInputError, match=r"part\.1\.parquet: cannot be read"):
        shuffle(tmp_path, parts, mode="full", seed=0, work=tmp_path / "work", workers=2)
    assert (tmp_path / parts[0].file).read_bytes() == before
