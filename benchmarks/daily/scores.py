"""The AUROC of what is served, on the raw rows of the day that it serves."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from nvt_torchrec.base.files.atomic import read_json


def score(bundle: Path, day: Path) -> dict[str, Any]:
    """Score the rows of a day as ``inference predict`` does; return the metrics.

    Args:
        bundle: The bundle that is served.
        day: The raw log of the day, with labels.

    Raises:
        ClickLogError: Bundle or log is missing or damaged.
    """
    from nvt_torchrec.dlrm.launch.startup import prepare_torch

    prepare_torch()
    from nvt_torchrec.inference.bulk import evaluate_file, predict_file
    from nvt_torchrec.inference.predictor import Predictor

    predictor = Predictor.load(bundle, check=True)
    with tempfile.TemporaryDirectory() as directory:
        scores = Path(directory) / "scores.parquet"
        predict_file(predictor, str(day), scores, need_label=True)
        return evaluate_file(scores).to_dict()


def oracle(raw: Path, day: int) -> dict[str, Any]:
    """Return the metrics of the probabilities from which the clicks of a day were drawn."""
    files = read_json(raw / "synthetic.json", "the synthetic log's description")["files"]
    return next(file for file in files if file["file"] == f"day_{day}")
