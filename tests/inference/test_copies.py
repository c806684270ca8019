"""Objects go to other processes by their paths, and are opened there again."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.inference.encoder import Encoder
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.scorer import Scorer
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cpu.blocks import LoaderBatch
from tests.inference.bundles import ROWS, make_bundle


def double(batch: LoaderBatch) -> LoaderBatch:
    batch.dense_features = batch.dense_features * 2
    return batch


def make_loader() -> KJTLoader:
    """A loader that has given an epoch and begun another one."""
    rows = 1000
    numbers = {name: pa.array(np.arange(rows), pa.int32()) for name in ("a", "b")}
    table = pa.table({"label": pa.array(np.arange(rows) % 2, pa.float32()), **numbers})
    schema = TableSchema("label", dense=("a",), categorical=("b",), table_sizes=(rows,))
    loader = KJTLoader(table, 64, schema=schema, shuffle=True, seed=3, table_sizes=iter([rows + 7]))
    loader.map(double)
    assert len(list(loader)) == len(loader)
    return loader


def use(
    predictor: Predictor, scorer: Scorer, encoder: Encoder, loader: KJTLoader
) -> tuple[np.ndarray, np.ndarray, list[list[float]]]:
    dense, ids = encoder.encode(ROWS)
    batches = [batch.dense_features[:, 0].tolist() for batch in loader]
    return predictor.predict(ROWS), scorer.predict(dense, ids), batches


def test_a_spawned_process_gets_copies(small_bundle: Path) -> None:
    encoder = Encoder.load(small_bundle / "workflow")
    objects = Predictor.load(small_bundle), Scorer.load(small_bundle), encoder, make_loader()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        got = pool.apply(use, objects)
    expected = use(*objects)  # after it: the copy of the loader begins where this one begins
    for copied, own in zip(got[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(copied, own)
    assert got[2] == expected[2]
    assert len(pickle.dumps(objects[0])) < 4000  # no tables


def test_a_copy_of_other_files_is_refused(tmp_path: Path) -> None:
    make_bundle(tmp_path / "bundle", seed=1)
    encoder = Encoder.load(tmp_path / "bundle" / "workflow")
    copies = [pickle.dumps(x) for x in (Predictor.load(tmp_path / "bundle"), encoder)]
    (tmp_path / "bundle").rename(tmp_path / "before")
    (tmp_path / "bundle.workflow").rename(tmp_path / "workflow before")
    make_bundle(tmp_path / "bundle", seed=2)
    for copy in copies:
        with pytest.raises(SchemaError, match="replaced since it was opened"):
            pickle.loads(copy)
