"""The Triton repository, driven by a stand-in for Triton's Python module."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.inference.__main__ import main
from nvt_torchrec.inference.benchmark import first_rows
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.predictor import Predictor
from tests.inference import triton_python_backend_utils as pb
from tests.inference.conftest import Trained
from tests.mutations import flip_bit


def opened(model: Path) -> Any:
    """Triton's instance of a model of a repository."""
    spec = importlib.util.spec_from_file_location("model", model / "1" / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    instance = module.TritonPythonModel()
    instance.initialize({"model_instance_kind": "CPU", "model_instance_device_id": "0"})
    return instance


def tensor(name: str, kind: str, values: list) -> pb.Tensor:
    """Values as a client of Triton sends them."""
    if kind == "TYPE_FP64":
        array = np.array([np.nan if value is None else value for value in values], np.float64)
    else:
        texts = [json.dumps(v) if isinstance(v, list) else v or "" for v in values]
        array = np.array([text.encode() for text in texts], object)
    return pb.Tensor(name, array.reshape(-1, 1))


def test_a_triton_repository(
    shop: Trained, shop_predictor: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strings, lists, prices; bad rows harm nobody else."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    (tmp_path / "bundle" / "more").symlink_to("/dev/zero")  # is not copied
    flags = ["--bundle", str(tmp_path / "bundle"), "--output", str(tmp_path / "made")]
    assert main(["export", *flags, "--format", "triton"]) == 0
    repository = (tmp_path / "made").rename(tmp_path / "moved")
    [model] = repository.iterdir()
    config = (model / "config.pbtxt").read_text()
    assert 'backend: "python"' in config
    *inputs, output = re.findall(r'name: "(\w+)", data_type: (\w+), dims: \[ 1 \]', config)
    assert [name for name, _ in inputs] == list(shop_predictor.spec.sources(label=False))
    assert output == ("probability", "TYPE_FP32")

    rows = first_rows(str(sorted(shop.raw.iterdir())[-1]), shop_predictor.spec, 60)
    bad = [rows[0] | {"country": "x", "recent_products": [[1]]}]
    requests = [
        pb.InferenceRequest(
            [tensor(name, kind, [row[name] for row in part]) for name, kind in inputs]
        )
        for part in (rows[:1], bad, rows[1:20], rows[20:])
    ]
    instance = opened(model)
    first, refused, *others = instance.execute(requests)
    assert "row 0, column recent_products" in refused.error().message()
    scores = []
    for response in (first, *others):
        (answer,) = response.output_tensors()
        assert (answer.name(), answer.as_numpy().dtype) == ("probability", np.float32)
        assert answer.as_numpy().shape[1:] == (1,)
        scores.append(answer.as_numpy()[:, 0])
    np.testing.assert_allclose(np.concatenate(scores), shop_predictor.predict(rows), atol=1e-6)

    monkeypatch.setattr(instance._predictor, "predict_encoded", lambda *_: np.array([np.nan, 0.5]))
    refused, good = instance.execute([requests[0], requests[0]])
    assert "the model computed the score NaN" in refused.error().message()
    assert good.output_tensors()[0].as_numpy() == 0.5

    flip_bit(model / "1/bundle/weights/table.npy", -1)
    with pytest.raises(BadInputError, match=r"table\.npy: not the file that was written"):
        opened(model)
