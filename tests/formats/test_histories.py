"""The store of histories: written, read, and opened when a stranger has made it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError, OutputError, SchemaError
from nvt_torchrec.formats.histories import HistoryStore, StoredHistory, write_history
from nvt_torchrec.formats.schema import TableSchema

RECENT = StoredHistory("recent", ("item", "shop"))


def _write(root: Path) -> Path:
    """Keys 0 to 2 in two calls, keys 3 and 4 of another day; return the first directory."""
    with write_history(root, RECENT, 0) as writer:
        writer.add([2], {"item": np.array([5, 3]), "shop": np.array([1, 2])})
        writer.add([0, 1], {"item": np.array([9]), "shop": np.array([0])})
    with write_history(root, RECENT, 3) as writer:
        writer.add([3, 0], {"item": np.array([7, 8, 9]), "shop": np.array([4, 4, 4])})
    return root / "_histories" / "recent" / "0"


def _open(root: Path) -> HistoryStore:
    return HistoryStore(root, RECENT, (10, 5))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    """The newest events, oldest first, of any directory; a store without events opens, too."""
    directory = _write(tmp_path)
    assert np.load(directory / "offsets.npy").tolist() == [0, 2, 2, 3]
    store = _open(tmp_path)
    lists = [
        [ids.tolist() for ids in store.read_newest(*row, 2)] for row in [(0, 1), (0, 2), (3, 3)]
    ]
    assert lists == [[[5], [1]], [[5, 3], [1, 2]], [[8, 9], [4, 4]]]
    assert [len(ids) for ids in store.read_newest(-1, 0, 2)] == [0, 0]
    with pytest.raises(OutputError, match="exists"), write_history(tmp_path, RECENT, 3):
        pass
    with write_history(tmp_path / "empty", RECENT, 0):
        pass
    assert len(HistoryStore(tmp_path / "empty", RECENT, (1, 1)).parts[0].offsets) == 1


@pytest.mark.parametrize("row", [(-1, 1), (-2, 0), (5, 0), (2**31 - 1, 1), (0, 3), (1, 1), (0, -1)])
def test_pointers_outside_the_store(tmp_path: Path, row: tuple[int, int]) -> None:
    """Else events of another key, or bytes of anything, would be a row's past."""
    _write(tmp_path)
    with pytest.raises(SchemaError, match=f"key {row[0]} "):
        _open(tmp_path).read_newest(*row, 50)


def _save(name: str, values: object, dtype: type | str) -> Callable[[Path], object]:
    return lambda root: np.save(root / name, np.array(values, dtype), allow_pickle=True)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_save("item.npy", [5, 3, 9], np.int64), r"item\.npy.*holds int64"),
        (_save("item.npy", [[5, 3, 9]], np.int32), r"item\.npy.*in 1 dimensions"),
        (_save("item.npy", [{"x": 1}], object), r"item\.npy.*is not an \.npy file"),
        (_save("item.npy", [5, 3], np.int32), r"2 events in item\.npy.*from 0 to 3"),
        (_save("offsets.npy", [], np.int64), "no offsets in offsets"),
        (_save("offsets.npy", [-1, 2, 2, 3], np.int64), "from -1 to 3"),
        (_save("offsets.npy", [0, 3], np.int64), r"without a gap; .*\(complete up to 1\)"),
        (lambda root: os.truncate(root / "shop.npy", 130), r"shop\.npy: is not an"),
        (lambda root: (root / "shop.npy").unlink(), r"shop\.npy: No such file"),
        (lambda root: (root / "shop.npy").unlink() or os.mkfifo(root / "shop.npy"), "regular"),
        (lambda root: (root.parent / "²").mkdir(), "expected directories of keys"),
        (lambda root: (root.parent / "007").mkdir(), "expected directories of keys"),
        (lambda root: root.rename(root.parent / "1"), "expected directories of keys"),
        (lambda root: shutil.rmtree(root.parent), "No such file"),
    ],
)
def test_a_strangers_store(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """Mapped files of other types and lengths would be read as ids, or end the process."""
    damage(_write(tmp_path))
    with pytest.raises(BadInputError, match=message):
        _open(tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("offsets", [0, 2**62, 2, 3], "1 events of key 0"),
        ("offsets", [0, -5, 2, 3], "1 events of key 0"),
        ("item", [10, 3, 9], r"item\.npy: id 10 at position 0, .*10 rows of column item"),
        ("shop", [-1, 2, 0], r"shop\.npy: id -1 at position 0"),
    ],
)
def test_a_strangers_values(tmp_path: Path, name: str, values: list[int], message: str) -> None:
    """They are checked when they are read: a store may be larger than the memory."""
    _save(f"{name}.npy", values, np.int64 if name == "offsets" else np.int32)(_write(tmp_path))
    with pytest.raises(SchemaError, match=message):
        _open(tmp_path).read_newest(0, 1, 50)


def test_a_file_that_is_written_to(tmp_path: Path) -> None:
    """Reading beyond the new end of a mapped file would end the process."""
    directory = _write(tmp_path)
    store = _open(tmp_path)
    os.truncate(directory / "item.npy", 100)
    with pytest.raises(BadInputError, match=r"item\.npy: was written to"):
        store.check()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/etc", "offsets", "x\0"])
def test_names_that_are_no_names_of_files(name: str) -> None:
    """A schema from elsewhere would read files anywhere."""
    for made in (lambda: StoredHistory(name, ("x",)), lambda: StoredHistory("x", (name,))):
        with pytest.raises(SchemaError, match="cannot be the name of a file"):
            made()


def test_schemas_with_histories(tmp_path: Path) -> None:
    """They survive the file, Merlin reads it, and what cannot be a history's column is refused."""
    import nvt_torchrec.nvt_compat  # noqa: F401

    from merlin.schema.io.tensorflow_metadata import TensorflowMetadata

    columns = ("label", ("int_0",), ("item", "shop", "tags"), (10, 5, 7), ("tags",), "")
    schema = TableSchema(*columns, (RECENT,))
    schema.write(tmp_path)
    assert TableSchema.read(tmp_path) == schema
    assert schema.columns[-3:] == ["tags", "recent.key", "recent.events"]
    features = {"item": "item", "shop": "shop", "tags": "tags"}
    assert schema.features == features | {"recent.item": "item", "recent.shop": "shop"}
    assert list(schema.features) == [*schema.categorical, *RECENT.features]
    read = TensorflowMetadata.from_json(json.dumps(schema.to_dict())).to_merlin_schema()
    assert read.column_names == schema.columns
    for other, message in [
        (StoredHistory("recent", ("tags",)), "column tags is not a categorical column with one id"),
        (StoredHistory("recent", ("int_0",)), "column int_0"),
    ]:
        with pytest.raises(SchemaError, match=message):
            TableSchema(*columns, (other,))
    with pytest.raises(SchemaError, match=r"two columns are called recent\.key"):
        TableSchema(*columns, (RECENT, RECENT))
