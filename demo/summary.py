"""What the demo did, in numbers, read from what its commands wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from clicklog.files import read_json


def make_summary(paths: dict[str, Path]) -> dict[str, Any]:
    """Rows, speeds, AUROCs beside the oracle's, and how far two ways of scoring are apart."""
    manifest = read_json(paths["etl"] / "manifest.json", "the ETL's manifest")
    planted = read_json(paths["raw"] / "synthetic.json", "the synthetic log's description")
    events = read_training_log(paths["training_log"])
    last = {event["split"]: event for event in events if event["event"] == "evaluation"}
    end = next(event for event in events if event["event"] == "end")
    oracle = planted["oracle"]
    return {
        "rows_in": manifest["rows"]["in"],
        "rows_out": manifest["rows"]["out"],
        "rows_rejected": manifest["rows"]["rejected"],
        "etl_rows_per_s": manifest["rows_per_s"],
        "train_samples_per_s": round(end["samples_per_s"]),
        "auroc_valid": last["valid"]["auroc"],
        "auroc_test": last["test"]["auroc"],
        "oracle_auroc_valid": oracle["valid"]["auroc"],
        "oracle_auroc_test": oracle["test"]["auroc"],
        "predict_max_abs_diff": _compare_scores(paths),
    }


def read_training_log(directory: Path) -> list[dict[str, Any]]:
    """The events of ``metrics.jsonl``."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _compare_scores(paths: dict[str, Path]) -> float:
    """The largest difference between the predictions and the trainer's way of scoring.

    The trainer's way: the valid and test parquet of the ETL, through the loader, into the model of
    the checkpoint. The predictions: raw rows of the last day, through the saved workflow.
    """
    from dlrm.startup import prepare_torch

    prepare_torch()
    from dlrm.checkpoint import load_model
    from dlrm.evaluate import score
    from nvt_loader import KJTLoader

    model, _ = load_model(paths["checkpoint"])
    logits = []
    for split in ("valid", "test"):
        in_file_order = KJTLoader(paths["parquet"] / split, 8192, device="cpu", virtual_shards=1)
        logits.append(score(model, in_file_order)[0])
    trainers = 1 / (1 + np.exp(-np.concatenate(logits).astype(np.float64)))
    predictions = pq.read_table(paths["predictions"])["probability"].to_numpy()
    return float(np.abs(trainers - predictions).max())


def print_table(summary: dict[str, Any]) -> None:
    """The summary for people."""
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

raw rows scored with the saved workflow differ from the trainer's scores by at most {
        s["predict_max_abs_diff"]:.1e}
""")
    for name, seconds in s["seconds"].items():
        print(f"{name:18} {seconds:8.1f} s")
    print()
    for name, path in s["paths"].items():
        print(f"{name:18} {path}")
