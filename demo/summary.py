"""Summarize the results of the demo's commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from nvt_torchrec.base.files.atomic import read_json
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.training.reporting.metrics_log import METRICS_FILE
from nvt_torchrec.training.reporting.page import read_events


def make_summary(paths: dict[str, Path]) -> dict[str, Any]:
    """Collect rows, speeds, AUROCs, and the difference between two ways of scoring.

    Args:
        paths: The paths of the demo's files, by name.
    """
    etl = EtlOutput(paths["etl"])
    rows = Manifest.read(etl.manifest).rows
    timings = read_json(etl.timings, "the ETL's timings")
    synthetic = read_json(paths["raw"] / "synthetic.json", "the synthetic log's description")
    events = read_events(paths["training_log"] / METRICS_FILE)
    last = {event["split"]: event for event in events if event["event"] == "evaluation"}
    end = next(event for event in events if event["event"] == "end")
    oracle = synthetic["oracle"]
    score_diff, loss_diff = _check_scores(paths, last)
    return {
        "rows_in": rows["in"],
        "rows_out": rows["out"],
        "rows_rejected": rows["rejected"],
        "etl_rows_per_s": timings["rows_per_s"],
        "train_samples_per_s": round(end["samples_per_s"]),
        "auroc_valid": last["valid"]["auroc"],
        "auroc_test": last["test"]["auroc"],
        "oracle_auroc_valid": oracle["valid"]["auroc"],
        "oracle_auroc_test": oracle["test"]["auroc"],
        "predict_max_abs_diff": score_diff,
        "predict_log_loss_diff": loss_diff,
    }


def _check_scores(paths: dict[str, Path], evaluations: dict[str, dict]) -> tuple[float, float]:
    """Measure how far the scores of raw rows differ from those of training.

    The raw rows were scored through the saved workflow. Their scores are compared with scores of
    the checkpoint's model on the ETL's parquet, and their log loss with the log loss of the sharded
    model in the last evaluation of training.

    Returns:
        The largest difference of a row's scores, and of a split's log losses.
    """
    from nvt_torchrec.base.startup import prepare_torch

    prepare_torch()
    from nvt_torchrec.inference.scorer import Scorer
    from nvt_torchrec.nvt_loader import KJTLoader

    scorer = Scorer.load(paths["workflow"], paths["checkpoint"])
    predictions = pq.read_table(paths["predictions"])
    scores = predictions["probability"].to_numpy()
    labels = predictions["label"].to_numpy()
    score_diffs = []
    loss_diffs = []
    begin = 0
    for split in ("valid", "test"):
        # With one virtual shard the loader keeps the order of the files, which is the raw order.
        loader = KJTLoader(paths["parquet"] / split, 8192, device="cpu", virtual_shards=1)
        parts = [scorer.predict(batch.dense_features, batch.sparse_features) for batch in loader]
        expected = np.concatenate(parts)
        rows = slice(begin, begin + len(expected))
        begin += len(expected)
        score_diffs.append(np.abs(expected - scores[rows]).max())
        clicked = scores[rows].astype(np.float64)
        likelihoods = np.where(labels[rows] == 1, clicked, 1 - clicked)
        log_loss = -np.log(likelihoods).mean()
        loss_diffs.append(abs(log_loss - evaluations[split]["log_loss"]))
    return float(max(score_diffs)), float(max(loss_diffs))


def print_table(summary: dict[str, Any]) -> None:
    """Print the summary as a table."""
    s = summary
    print(f"""
rows                {s["rows_in"]:,} in, {s["rows_out"]:,} out, {s["rows_rejected"]:,} rejected
ETL                 {s["etl_rows_per_s"]:,} rows/s (fit and transform)
training            {s["train_samples_per_s"]:,} samples/s

AUROC               model   oracle      gap
  valid           {s["auroc_valid"]:7.4f}  {s["oracle_auroc_valid"]:7.4f}  {
        s["oracle_auroc_valid"] - s["auroc_valid"]:7.4f}
  test            {s["auroc_test"]:7.4f}  {s["oracle_auroc_test"]:7.4f}  {
        s["oracle_auroc_test"] - s["auroc_test"]:7.4f}

largest difference between raw rows scored with the saved workflow and the trainer:
  score           {s["predict_max_abs_diff"]:.1e}
  log loss        {s["predict_log_loss_diff"]:.1e}
""")
    for name, seconds in s["seconds"].items():
        print(f"{name:18} {seconds:8.1f} s")
    print()
    for name, path in s["paths"].items():
        print(f"{name:18} {path}")
