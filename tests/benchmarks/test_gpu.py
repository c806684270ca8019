"""benchmarks.gpu at a small size on a CPU, and the model of several GPUs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import etl
from benchmarks.gpu.paper import Paper, assign, messages, predict
from nvt_torchrec.clicklog.synthetic.model import MLPERF_CARDINALITIES

ROOT = Path(__file__).resolve().parents[2]


def test_copies() -> None:
    found = list(etl.copies(argparse.Namespace(seconds=0.01), torch.device("cpu")))
    assert found[0]["system"] == "limit"
    assert all(one["gb_per_s"] > 0 for one in found)


def test_the_loaders_at_a_small_size(tmp_path: Path) -> None:
    file = tmp_path / "results"
    command = [sys.executable, "-m", "benchmarks.gpu.worker", "loader", f"--results={file}"]
    command += ["--device=cpu", f"--data={tmp_path / 'data'}", "--rows=3000", "--seconds=0.1"]
    command += ["--max_table_rows=1000", "--batch_sizes=256"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in file.read_text().splitlines()]
    assert json.loads(done.stdout)["results"] == len(results)
    systems = [one["system"] for one in results]
    assert systems == ["limit", "ours, CPU", "TorchRec npy, pinned copies"]
    assert all(one["rows_per_s"] > 0 for one in results)


def test_training_in_several_ways(tmp_path: Path) -> None:
    """Tables of another type are another model."""
    file = tmp_path / "results"
    command = [sys.executable, "-m", "benchmarks.gpu.worker", "training", f"--results={file}"]
    command += ["--device=cpu", f"--data={tmp_path / 'data'}", "--rows=3000", "--seconds=0.05"]
    command += [
        "--max_table_rows=1000",
        "--batch_sizes=64",
        "--ways=bf16 plain,bf16,bf16 fp16 tables",
    ]
    command += ["--model=--embedding_dim=8 --dense_arch_layer_sizes=8 --over_arch_layer_sizes=8,1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in file.read_text().splitlines()]
    gib = {one["case"]: one["table_gib"] for one in results}
    assert gib["train bf16 plain B=64"] == gib["train bf16 B=64"]
    assert gib["train bf16 fp16 tables B=64"] < 0.8 * gib["train bf16 B=64"]
    assert all(one["rows_per_s"] > 0 for one in results)


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    command = [sys.executable, "-m", "benchmarks.gpu", "--only=copies"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_tables_are_assigned_evenly() -> None:
    assigned = assign(MLPERF_CARDINALITIES, 8, "tables")
    assert sorted(i for own in assigned for i in own) == list(range(26))
    assert {len(own) for own in assigned} == {3, 4}
    large = [i for i, rows in enumerate(MLPERF_CARDINALITIES) if rows == 40_000_000]
    assert all(len(set(own) & set(large)) <= 1 for own in assigned)
    heaviest = assign(MLPERF_CARDINALITIES, 2, "memory")
    sizes = [sum(MLPERF_CARDINALITIES[i] for i in own) for own in heaviest]
    assert max(sizes) - min(sizes) <= 40_000_000


def test_bytes_of_a_step() -> None:
    """Two ranks, two tables: each sends half its ids, and its table's rows for the other's."""
    paper = Paper(ranks=2, batch=100, dim=4, sizes=(7, 5), dense_parameters=10)
    assigned = assign(paper.sizes, 2, "tables")
    assert assigned == [[0], [1]]
    sent = messages(paper, assigned)
    assert sent["ids"] == 100 * 2 * 0.5 * 4
    assert sent["embeddings forward"] == sent["gradients backward"] == 100 * 4 * 4
    assert sent["dense gradients"] == 2 * 10 * 0.5 * 4


def test_one_rank_is_one_card() -> None:
    found = predict(Paper(ranks=1, samples_per_s=1e6, text_gb_s=3.0, disk_gb_s=2.0))
    assert found["samples_per_s"] == pytest.approx(
        {"no overlap": 1e6, "full overlap": 1e6, "one card": 1e6}
    )
    assert found["etl_text_gb_s"] == 2.0
    assert sum(found["gib_per_rank"]) == pytest.approx(97.4, abs=0.1)
