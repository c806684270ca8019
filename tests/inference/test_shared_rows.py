"""Models whose tables have fewer rows than the data have ids (--hash_indices)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.etl.run import EtlSettings, run
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.schema import TableSchema
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.model.served_checkpoint import check_pair
from nvt_torchrec.inference.predictor import Predictor
from nvt_torchrec.inference.scorer import Scorer
from nvt_torchrec.nvt_loader import KJTLoader
from nvt_torchrec.nvt_loader.cpu.blocks import LoaderBatch
from tests.inference.conftest import TRAINING
from tests.logs import CRITEO, write_log
from tests.nvt_loader.data import add_history
from tests.training.runs import config_of, model_of, train_here
from tests.training.runs import score as score_batches

LIMIT, MAX_EVENTS = 20, 3


def share_rows(batch: LoaderBatch, sizes: tuple[int, ...]) -> LoaderBatch:
    """Map each id by its own, as docs/flags.md says it."""
    values, lengths = [], []
    for column, size in zip(batch.sparse_features.to_dict().values(), sizes, strict=True):
        values += [
            row if row < size else 3 + (row - 3) % (size - 3) for row in column.values().tolist()
        ]
        lengths.append(column.lengths())
    keys = batch.sparse_features.keys()
    shared = KeyedJaggedTensor(keys, torch.tensor(values), lengths=torch.cat(lengths))
    return dataclasses.replace(batch, sparse_features=shared)


@pytest.mark.parametrize("with_history", [False, True], ids=["plain", "history"])
def test_every_way_of_scoring_maps_ids_as_the_training_does(
    tmp_path: Path, with_history: bool
) -> None:
    """From raw rows and encoded ones, of histories, too; the exported file compares itself."""
    write_log(tmp_path / "raw", [400, 300, 201], seed=5)
    run(EtlSettings(str(tmp_path / "raw"), tmp_path / "out", CRITEO, engine="cpu"))
    parquet = tmp_path / "out" / "criteo_binary" / "split"
    schema = TableSchema.read(parquet)
    assert max(schema.table_sizes) > LIMIT
    if with_history:
        add_history(parquet, schema, StoredHistory("recent", ("cat_3", "cat_5")), keys=20)
    paths = [f"--binary_path={parquet}", f"--save_checkpoint_path={tmp_path / 'checkpoint'}"]
    limits = [f"--max_table_size={LIMIT}", "--hash_indices", f"--max_events={MAX_EVENTS}"]
    train_here(*paths, *TRAINING, "--first_order=0.2", *limits)
    config = config_of(tmp_path / "checkpoint")
    assert config.num_embeddings == tuple(min(size, LIMIT) for size in schema.table_sizes)
    workflow = tmp_path / "out" / "workflow"
    write_bundle(workflow, tmp_path / "checkpoint", tmp_path / "bundle")

    loader = KJTLoader(parquet / "test", 64, device="cpu", max_events=MAX_EVENTS)
    sizes = config.feature_rows
    batches = list(loader)
    logits, _ = score_batches(
        model_of(tmp_path / "checkpoint"), [share_rows(batch, sizes) for batch in batches]
    )
    expected = 1 / (1 + np.exp(-logits))
    scorer = Scorer.load(tmp_path / "bundle")
    got = [scorer.predict(batch.dense_features, batch.sparse_features) for batch in batches]
    np.testing.assert_allclose(np.concatenate(got), expected, atol=1e-6)
    predictor = Predictor.load(tmp_path / "bundle")
    if not with_history:  # the log has none
        # the last day is divided into valid and test
        valid = KJTLoader(parquet / "valid", 64, device="cpu")
        others, _ = score_batches(
            model_of(tmp_path / "checkpoint"), [share_rows(batch, sizes) for batch in valid]
        )
        day = np.concatenate([expected, 1 / (1 + np.exp(-others))])
        scores = predictor.predict(tmp_path / "raw" / "day_2")
        np.testing.assert_allclose(np.sort(scores), np.sort(day), atol=1e-6)
    export_onnx(tmp_path / "bundle", tmp_path / "onnx")  # compares the file with the bundle

    small = dataclasses.replace(config, hash_indices=False)
    with pytest.raises(SchemaError, match=f"has {LIMIT} rows"):
        check_pair(predictor.workflow.schema, "", small, "", workflow, "the checkpoint")
