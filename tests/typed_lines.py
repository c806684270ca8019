"""Lines of Python of README and docs as a user writes them: mypy checks them, nothing runs them."""

from __future__ import annotations

from typing import assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from nvt_torchrec import ClickModel, Encoder, EtlSettings, KJTLoader, Predictor, Scorer, run
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.training import TrainResult, TrainSettings, train

manifest = run(EtlSettings("clicks.csv", "OUT2", spec="spec.toml", days="0-3"))
assert_type(manifest, Manifest)
for batch in KJTLoader("OUT/criteo_binary/split/train", 2048, rank=0, world_size=8, shuffle=True):
    assert_type(batch.dense_features, torch.Tensor)
    assert_type(batch.labels, torch.Tensor)
    assert_type(batch.sparse_features, KeyedJaggedTensor)

settings = TrainSettings(binary_path="OUT/criteo_binary/split", save_checkpoint_path="CKPT")
assert_type(train(settings), TrainResult)

rows = [{"int_0": 1, "cat_0": "68fd1e64"}]
assert_type(Predictor.load("OUT/workflow", "CKPT").predict(rows), NDArray[np.float32])
dense, ids = Encoder.load("OUT/workflow").encode(rows)
assert_type(dense, torch.Tensor)
assert_type(ids, KeyedJaggedTensor)
assert_type(Scorer.load("BUNDLE").predict(dense, ids), NDArray[np.float32])

model = ClickModel(folder="fit").fit({"user": ["u1"], "clicked": [1]}, label="clicked")
assert_type(model, ClickModel)
assert_type(model.predict_proba({"user": ["u1"]}), NDArray[np.float64])
