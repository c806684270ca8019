"""``python -m benchmarks.inference``: both systems agree, all stages are timed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from benchmarks.inference import main
from benchmarks.serving import make_requests, start_server
from nvt_torchrec.inference.export.onnx_file import export_onnx
from nvt_torchrec.inference.model.bundle import write_bundle
from nvt_torchrec.inference.predictor import Predictor
from tests.inference.bundles import ROWS
from tests.inference.conftest import Trained

ONNX = "onnx: tensors to probability"
OURS = ["ours: rows to probability", "  read", "  encode"]
STOCK = ["stock: frame to probability", "  Workflow.transform", "  plain model"]


def test_the_table(shop: Trained, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_bundle(shop.workflow, shop.checkpoint, tmp_path / "bundle")
    export_onnx(tmp_path / "bundle", tmp_path / "export")
    flags = [*shop.flags, "--input", str(shop.raw / "day_2.csv"), "--seconds", "0.1"]
    flags += ["--onnx", str(tmp_path / "export" / "model.onnx")]
    assert main([*flags, "--batch_sizes", "1,500"]) == 0
    printed = capsys.readouterr().out
    lines = re.findall(r"^ *(\d+)  (.{28}) *([\d.]+) +([\d.]+) +([\d.]+) +([\d,]+)$", printed, re.M)
    for size in (1, 500):
        timings = {name.rstrip(): figures for batch, name, *figures in lines if int(batch) == size}
        assert sorted(timings) == sorted([*OURS, ONNX, *STOCK])
        for figures in timings.values():
            p50, p90, p99, rows_per_s = (float(figure.replace(",", "")) for figure in figures)
            assert 0 < p50 <= p90 <= p99
            assert rows_per_s == pytest.approx(size / p50 * 1e3, rel=0.1)
    assert "batch 500:" in printed
    assert "times faster than Workflow.transform" in printed
    one_row = r"^(?:without additional load|\d+ cores busy) +([\d.]+) +([\d.]+)$"
    latencies = re.findall(one_row, printed, re.M)
    assert [0 < float(p50) <= float(p99) for p50, p99 in latencies] == [True, True]
    other = onnx.load(tmp_path / "export" / "model.onnx")
    for weights in other.graph.initializer:
        if weights.data_type == onnx.TensorProto.FLOAT:
            zeros = np.zeros(weights.dims, np.float32)
            weights.CopyFrom(onnx.numpy_helper.from_array(zeros, weights.name))
    onnx.save(other, tmp_path / "other.onnx")
    flags = ["--bundle", str(tmp_path / "bundle"), "--input", str(shop.raw / "day_2.csv")]
    with pytest.raises(AssertionError, match="Not equal to tolerance"):  # of another model
        main([*flags, "--onnx", str(tmp_path / "other.onnx")])


def test_requests_of_a_server(small_bundle: Path) -> None:
    """What the benchmark asks a server, and counts of it."""
    predictor = Predictor.load(small_bundle)
    requests = make_requests(predictor, ROWS)
    command = [sys.executable, "-m", "inference", "serve", "--port", 0, "--bundle", small_bundle]
    with start_server(command) as server:
        answers = dict(server.ask(requests, len(requests)))
        server.measure(requests, 2 * len(requests))
        resident, own = server.memory_mb
        assert resident > own > 0
    answered = [answers[i] for i in range(len(ROWS))]
    np.testing.assert_allclose(answered, predictor.predict(ROWS), atol=1e-6)
    assert server.cpu_ms[0] >= 0
