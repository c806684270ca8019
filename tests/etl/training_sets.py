"""Training sets as TorchRec and NVIDIA preprocess them, small; and what an import made of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import yaml

from clicklog.schema import TableSchema
from etl.check.findings import NOTE
from etl.commands.check import check
from etl.importers.arrays import find_source
from etl.importers.parts import ImportSettings, import_arrays

SPLIT = Path("criteo_binary") / "split"
SIZES = tuple(10 + j for j in range(26))


def random_rows(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Labels [n], dense [n, 13], ids [n, 26] that reach the sizes' ends."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, SIZES, (rows, 26))
    ids[0], ids[-1] = 0, np.array(SIZES) - 1
    return rng.integers(0, 2, rows), rng.normal(size=(rows, 13)).astype(np.float32), ids


def write_npy(directory: Path, rows_by_day: list[int], sparse=np.int32) -> list[tuple]:
    directory.mkdir(parents=True, exist_ok=True)
    days = []
    for day, rows in enumerate(rows_by_day):
        label, dense, ids = random_rows(rows, day)
        np.save(directory / f"day_{day}_labels.npy", label.astype(np.int32).reshape(-1, 1))
        np.save(directory / f"day_{day}_dense.npy", dense)
        np.save(directory / f"day_{day}_sparse.npy", ids.astype(sparse))
        days.append((label, dense, ids))
    return days


def write_bin(directory: Path, rows: dict[str, int], flavour: str = "TorchRec") -> dict:
    splits = {}
    for seed, (split, count) in enumerate(rows.items()):
        label, dense, ids = random_rows(count, seed)
        own = directory / split
        own.mkdir(parents=True)
        if flavour == "TorchRec":
            label.astype(np.float32).tofile(own / "label.bin")
            dense.tofile(own / "numerical.bin")
            kinds = [np.int32] * 26
        else:
            label.astype(bool).tofile(own / "label.bin")
            dense = dense.astype(np.float16)
            dense.tofile(own / "numerical.bin")
            kinds = [np.int8] * 9 + [np.int16] * 9 + [np.int32] * 8
        for j, kind in enumerate(kinds):
            ids[:, j].astype(kind).tofile(own / f"cat_{j}.bin")
        splits[split] = (label, dense.astype(np.float32), ids)
    return splits


def import_set(directory: Path, output: Path, **options) -> dict:
    return import_arrays(find_source(directory), ImportSettings(directory, output, **options))


def read_rows(output: Path, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    files = sorted(
        (output / SPLIT / split).glob("*.parquet"), key=lambda path: int(path.name.split(".")[1])
    )
    table = pq.ParquetDataset([str(file) for file in files]).read()
    assert table.schema.remove_metadata() == TableSchema.read(output / SPLIT).arrow
    columns = [table[name].to_numpy() for name in table.schema.names]
    return columns[0], np.stack(columns[1:14], 1), np.stack(columns[14:], 1)


def assert_rows(found: tuple, expected: tuple) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def is_sound(output: Path, allowed: tuple[str, ...] = ()) -> bool:
    """By ``python -m etl check``."""
    found = [one for one in check(output) if one.severity != NOTE and one.kind not in allowed]
    assert not found, list(map(str, found))
    return True


def feature_spec(directory: Path, splits: dict, **changed) -> dict:
    """As NVIDIA's scripts write it; the names of categories end in .bin there."""
    kinds = ["int8"] * 9 + ["int16"] * 9 + ["int32"] * 8
    dense, cats = [f"num_{i}" for i in range(13)], [f"cat_{j}.bin" for j in range(26)]
    features = {name: {"dtype": "float16"} for name in dense} | {"label": {"dtype": "bool"}}
    for name, kind, size in zip(cats, kinds, SIZES, strict=True):
        features[name] = {"dtype": kind, "cardinality": size + 5}

    def files(split: str) -> list:
        by_file = {"numerical.bin": dense, "label.bin": ["label"]} | {name: [name] for name in cats}
        return [
            {"type": "split_binary", "features": names, "files": [f"{split}/{file}"]}
            for file, names in by_file.items()
        ]

    value = {
        "feature_spec": features,
        "source_spec": {split: files(split) for split in splits},
        "channel_spec": {"label": ["label"], "numerical": dense, "categorical": cats},
        "metadata": {},
    } | changed
    (directory / "feature_spec.yaml").write_text(yaml.dump(value))
    return value
