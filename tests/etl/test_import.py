"""``python -m etl import`` of TorchRec's and NVIDIA's training sets."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import etl.importers.parts
from clicklog.errors import BadInputError, SettingsError
from clicklog.schema import TableSchema
from etl.__main__ import main
from etl.importers.arrays import find_source
from etl.output import UNFINISHED_FILE
from tests.etl.training_sets import (
    SIZES,
    SPLIT,
    assert_rows,
    feature_spec,
    import_set,
    is_sound,
    read_rows,
    write_bin,
    write_npy,
)


@pytest.mark.parametrize("sparse", [np.int32, np.int64])
def test_npy(tmp_path: Path, sparse) -> None:
    days = write_npy(tmp_path / "in", [70, 50, 41], sparse)
    manifest = import_set(tmp_path / "in", tmp_path / "out", workers=2)
    train = tuple(np.concatenate(parts) for parts in zip(*days[:2], strict=True))
    assert_rows(read_rows(tmp_path / "out", "train"), train)
    assert_rows(read_rows(tmp_path / "out", "valid"), tuple(part[:21] for part in days[2]))
    assert_rows(read_rows(tmp_path / "out", "test"), tuple(part[21:] for part in days[2]))
    assert TableSchema.read(tmp_path / "out" / SPLIT).table_sizes == SIZES
    assert manifest["rows"] == {"in": 161, "out": 161, "rejected": 0}
    assert manifest["splits"]["train"]["positives"] == train[0].sum()
    assert [day["rows"] for day in manifest["by_day"].values()] == [70, 50, 41]
    assert is_sound(tmp_path / "out")
    assert not (tmp_path / "out" / UNFINISHED_FILE).exists()
    assert not (tmp_path / "out" / ".work").exists()


def test_npy_of_one_day_and_contiguous_ids(tmp_path: Path) -> None:
    """One day is cut 80/10/10; what contiguous preprocessing wrote beside goes before."""
    ((label, dense, ids),) = write_npy(tmp_path / "in", [100])
    np.save(tmp_path / "in" / "day_0_sparse_contig_freq.npy", ids + 1)
    import_set(tmp_path / "in", tmp_path / "out")
    assert_rows(read_rows(tmp_path / "out", "train"), (label[:80], dense[:80], ids[:80] + 1))
    assert len(read_rows(tmp_path / "out", "valid")[0]) == 10


def test_npy_by_column(tmp_path: Path) -> None:
    ((label, dense, ids),) = write_npy(tmp_path / "in", [100])
    np.save(tmp_path / "in" / "day_0_dense.npy", np.asfortranarray(dense))
    import_set(tmp_path / "in", tmp_path / "out")
    assert_rows(read_rows(tmp_path / "out", "train"), (label[:80], dense[:80], ids[:80]))


def test_kaggle(tmp_path: Path) -> None:
    ((label, dense, ids),) = write_npy(tmp_path / "in", [100])
    for name in ("labels", "dense", "sparse"):
        (tmp_path / "in" / f"day_0_{name}.npy").rename(tmp_path / "in" / f"train_{name}.npy")
    np.save(tmp_path / "in" / "test_dense.npy", dense)  # without labels: left out
    import_set(tmp_path / "in", tmp_path / "out")
    assert_rows(read_rows(tmp_path / "out", "train"), (label[:80], dense[:80], ids[:80]))


@pytest.mark.parametrize("flavour", ["TorchRec", "NVIDIA"])
def test_split_binary(tmp_path: Path, flavour: str) -> None:
    rows = {"train": 90, "validation": 30, "test": 20}
    splits = write_bin(tmp_path / "in", rows, flavour)
    source = find_source(tmp_path / "in")
    assert source.kind == f"{flavour}'s split binary set"
    import_set(tmp_path / "in", tmp_path / "out")
    for split, name in (("train", "train"), ("valid", "validation"), ("test", "test")):
        assert_rows(read_rows(tmp_path / "out", split), splits[name])
    assert is_sound(tmp_path / "out")


def test_without_a_validation_set(tmp_path: Path, caplog) -> None:
    write_bin(tmp_path / "in", {"train": 90, "test": 30}, "NVIDIA")
    import_set(tmp_path / "in", tmp_path / "out")
    assert "no rows for valid" in caplog.text
    assert is_sound(tmp_path / "out", allowed=("splits",))


def test_feature_spec(tmp_path: Path) -> None:
    splits = write_bin(tmp_path / "in", {"train": 90, "test": 30}, "NVIDIA")
    feature_spec(tmp_path / "in", splits)
    import_set(tmp_path / "in", tmp_path / "out")
    for split, expected in splits.items():
        assert_rows(read_rows(tmp_path / "out", split), expected)
    schema = TableSchema.read(tmp_path / "out" / SPLIT)
    assert schema.table_sizes == tuple(size + 5 for size in SIZES)  # its cardinalities
    assert schema.dense[:2] == ("num_0", "num_1")
    assert schema.categorical[:2] == ("cat_0", "cat_1")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"source_spec": {"train": [], "test": []}}, "(train|test) has no file of label"),
        ({"source_spec": {"exam": []}}, "split 'exam'"),
        ({"channel_spec": {"label": ["label"]}}, "no feature specification: KeyError"),
        (
            {"source_spec": {"train": [{"type": "csv", "features": ["label"], "files": ["a"]}]}},
            "a source of type 'csv'",
        ),
    ],
)
def test_feature_spec_that_is_none(tmp_path: Path, change: dict, what: str) -> None:
    splits = write_bin(tmp_path / "in", {"train": 90}, "NVIDIA")
    feature_spec(tmp_path / "in", splits, **change)
    with pytest.raises(BadInputError, match=what):
        find_source(tmp_path / "in")


@pytest.mark.parametrize("flavour", ["TorchRec", "NVIDIA"])
@pytest.mark.parametrize("name", ["cat_7.bin", "numerical.bin", "label.bin"])
@pytest.mark.parametrize("bytes_off", [-8, -1, 4])
def test_a_bin_file_of_another_length(
    tmp_path: Path, flavour: str, name: str, bytes_off: int
) -> None:
    """Read as it is, it would shift every row after the end."""
    write_bin(tmp_path / "in", {"train": 90, "test": 30}, flavour)
    path = tmp_path / "in" / "train" / name
    data = path.read_bytes()
    path.write_bytes(data[:bytes_off] if bytes_off < 0 else data + bytes(bytes_off))
    with pytest.raises(BadInputError, match=r"bytes, not .* of .* bytes") as error:
        find_source(tmp_path / "in")
    if name != "label.bin":  # of that, the others tell
        assert name in error.value.what
    assert not (tmp_path / "out").exists()


def test_a_bin_file_is_missing(tmp_path: Path) -> None:
    write_bin(tmp_path / "in", {"train": 90, "test": 30})
    (tmp_path / "in" / "train" / "cat_7.bin").unlink()
    with pytest.raises(BadInputError, match=r"cat_7\.bin: missing"):
        find_source(tmp_path / "in")
    (tmp_path / "in" / "train" / "cat_8.bin").rename(tmp_path / "in" / "train" / "cat_7.bin")
    with pytest.raises(BadInputError, match=r"cat_8\.bin: missing"):
        find_source(tmp_path / "in")


def test_npy_that_does_not_fit(tmp_path: Path) -> None:
    directory = tmp_path / "in"
    write_npy(directory, [70, 50, 41])
    sparse = np.load(directory / "day_1_sparse.npy")
    path = directory / "day_1_sparse.npy"
    np.save(path, sparse[:-1])
    with pytest.raises(BadInputError, match=r"day_1_sparse\.npy: 49 rows, .* has 50"):
        find_source(directory)
    np.save(path, sparse[:, :-1])
    with pytest.raises(BadInputError, match=r"day_1_sparse\.npy: 25 columns, .* has 26"):
        find_source(directory)
    np.save(path, sparse.astype(np.float32))
    with pytest.raises(BadInputError, match=r"day_1_sparse\.npy: float32 of shape \[50, 26\]"):
        find_source(directory)
    np.save(path, sparse.astype(object), allow_pickle=True)
    with pytest.raises(BadInputError, match=r"day_1_sparse\.npy: not a whole \.npy file"):
        find_source(directory)
    np.save(path, sparse)
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(BadInputError, match=r"day_1_sparse\.npy: not a whole \.npy file"):
        find_source(directory)
    path.write_bytes(data + b"1")
    with pytest.raises(BadInputError, match=r"day_1_sparse\.npy: \d+ bytes, \d+ by its header"):
        find_source(directory)
    path.unlink()
    with pytest.raises(BadInputError, match=r"day_1_sparse\.npy: missing"):
        find_source(directory)
    for name in ("dense", "labels"):
        (directory / f"day_1_{name}.npy").unlink()
    with pytest.raises(BadInputError, match=r"day_1_dense\.npy: missing, there is a later day"):
        find_source(directory)
    write_npy(tmp_path / "empty", [1])
    for path in (tmp_path / "empty").iterdir():
        np.save(path, np.load(path)[:0])
    with pytest.raises(BadInputError, match="empty: its arrays have no rows"):
        find_source(tmp_path / "empty")


@pytest.mark.parametrize(
    ("name", "row", "column", "value", "what"),
    [
        ("labels", 7, 0, -1, "row 7: column label: -1"),
        ("labels", 7, 0, 2, "row 7: column label: 2"),
        ("dense", 9, 3, np.nan, "row 9: column int_3: nan"),
        ("dense", 9, 3, np.inf, "row 9: column int_3: inf"),
        ("sparse", 9, 4, -1, "row 9: column cat_4: -1"),
        ("sparse", 9, 4, 2**31 - 1, "row 9: column cat_4: 2147483647"),
    ],
)
def test_values_that_no_training_takes(tmp_path: Path, name, row, column, value, what) -> None:
    write_npy(tmp_path / "in", [70, 50, 41])
    path = tmp_path / "in" / f"day_1_{name}.npy"
    array = np.load(path)
    array[row, column] = value
    np.save(path, array)
    with pytest.raises(BadInputError, match=f"day_1_{name}.npy: {what}"):
        import_set(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_bytes_that_are_no_bool(tmp_path: Path) -> None:
    write_bin(tmp_path / "in", {"train": 90, "test": 30}, "NVIDIA")
    path = tmp_path / "in" / "train" / "label.bin"
    data = bytearray(path.read_bytes())
    data[5] = 2
    path.write_bytes(data)
    with pytest.raises(BadInputError, match=r"label\.bin: row 5: column label: 2"):
        import_set(tmp_path / "in", tmp_path / "out")


def test_table_sizes(tmp_path: Path) -> None:
    write_npy(tmp_path / "in", [70, 50, 41])
    larger = tuple(size + 1 for size in SIZES)
    import_set(tmp_path / "in", tmp_path / "larger", num_embeddings_per_feature=larger)
    assert TableSchema.read(tmp_path / "larger" / SPLIT).table_sizes == larger
    small = (SIZES[0] - 1, *SIZES[1:])
    with pytest.raises(BadInputError, match=r"column cat_0: 9\n.*the table has 9 rows"):
        import_set(tmp_path / "in", tmp_path / "small", num_embeddings_per_feature=small)
    with pytest.raises(SettingsError, match="25 table sizes, the set has 26"):
        import_set(tmp_path / "in", tmp_path / "few", num_embeddings_per_feature=SIZES[1:])
    with pytest.raises(SettingsError, match="a table of 0 rows"):
        import_set(tmp_path / "in", tmp_path / "none", num_embeddings_per_feature=(0, *SIZES[1:]))
    with pytest.raises(SettingsError, match="without table sizes"):
        import_set(tmp_path / "in", tmp_path / "modulo", modulo=True)


def test_modulo(tmp_path: Path) -> None:
    """As TorchRec takes raw hashes: also those that were negative in int32."""
    ((_, _, ids),) = write_npy(tmp_path / "in", [100])
    raw = (ids * 0x9E3779B9 + 12345).astype(np.uint32).view(np.int32)
    np.save(tmp_path / "in" / "day_0_sparse.npy", raw)
    import_set(tmp_path / "in", tmp_path / "out", num_embeddings_per_feature=SIZES, modulo=True)
    expected = raw[:80] % np.array(SIZES, np.int32)  # NumPy's, as TorchRec's
    np.testing.assert_array_equal(read_rows(tmp_path / "out", "train")[2], expected)
    assert is_sound(tmp_path / "out")


def test_parts_and_workers_change_nothing(tmp_path: Path, monkeypatch) -> None:
    write_npy(tmp_path / "in", [70, 50, 41])
    import_set(tmp_path / "in", tmp_path / "one")
    monkeypatch.setattr(etl.importers.parts, "ROWS_PER_PART", 16)
    import_set(tmp_path / "in", tmp_path / "many", workers=4)
    assert len(list((tmp_path / "many" / SPLIT / "train").glob("*.parquet"))) == 9
    for split in ("train", "valid", "test"):
        assert_rows(read_rows(tmp_path / "many", split), read_rows(tmp_path / "one", split))
    assert is_sound(tmp_path / "many")


def test_command_line(tmp_path: Path, capsys) -> None:
    write_bin(tmp_path / "in", {"train": 90, "validation": 30, "test": 30})
    arguments = ["import", "--input_path", str(tmp_path / "in"), "--output_path"]
    sizes = ",".join(map(str, SIZES))
    assert main([*arguments, str(tmp_path / "out"), "--num_embeddings_per_feature", sizes]) == 0
    shown = capsys.readouterr().out
    assert "TorchRec's split binary set, 150 rows" in shown
    assert f"--num_embeddings_per_feature {sizes}" in shown
    assert main([*arguments, str(tmp_path / "two"), "--num_embeddings_per_feature", "a,b"]) == 2
    assert main([*arguments, str(tmp_path / "two"), "--trust_pickle"]) == 2
    assert (
        main(["import", "--input_path", str(tmp_path), "--output_path", str(tmp_path / "x")]) == 2
    )
    assert "no training set of a known format" in capsys.readouterr().err
    value = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert value["settings"]["import"] == "TorchRec's split binary set"


def test_memory_is_bounded_and_nothing_heavy_is_imported(tmp_path: Path) -> None:
    """84 MB of .npy pass through parts of 4 Ki rows."""
    program = """
        import resource, sys
        from pathlib import Path
        import numpy as np
        directory = Path(sys.argv[1]) / "in"
        directory.mkdir()
        rows = 260_000
        for day in range(2):
            for name, shape, dtype in (("dense", (rows, 13), np.float32),
                    ("sparse", (rows, 26), np.int32), ("labels", (rows, 1), np.int32)):
                array = np.lib.format.open_memmap(
                    directory / f"day_{day}_{name}.npy", "w+", dtype, shape)
                del array  # zeros, of holes
        import etl.importers.parts
        from etl.importers.arrays import find_source
        from etl.importers.parts import ImportSettings, import_arrays
        etl.importers.parts.ROWS_PER_PART = 4096
        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        before = peak()
        import_arrays(find_source(directory), ImportSettings(directory, Path(sys.argv[1]) / "out"))
        print(peak() - before)
        heavy = {"nvtabular", "dask", "pandas", "torch"} & set(sys.modules)
        assert not heavy, heavy
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    assert float(done.stdout) < 40
