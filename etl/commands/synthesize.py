"""``python -m etl synthesize``: a click log with a known best AUROC."""

from __future__ import annotations

import argparse
import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments; :func:`run` takes what they parse to."""
    from clicklog.synthetic.model import CALENDAR_DAYS, SMALL, SyntheticSettings

    default = SyntheticSettings()
    parser.add_argument(
        "--output_path",
        type=Path,
        required=True,
        help="directory for day_0 … and synthetic.json; new, empty, or left by an interrupted run",
    )
    parser.add_argument(
        "--spec",
        metavar="NAME|TOML",
        help="feature spec of the log: its columns, their types, the file format "
        "(default: Criteo's)",
    )
    parser.add_argument(
        "--days",
        type=int,
        default=default.days,
        help=f"1 to {CALENDAR_DAYS}; the last one becomes valid and test (default: %(default)s)",
    )
    parser.add_argument(
        "--rows_per_day",
        type=int,
        default=default.rows_per_day,
        help="a row takes about 240 bytes (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=default.seed,
        help="of the planted model and the rows (default: %(default)s)",
    )
    parser.add_argument(
        "--cardinality_scale",
        type=float,
        default=default.cardinality_scale,
        help=f"factor on MLPerf's cardinalities, columns of up to {SMALL} values aside; "
        "1 for the full ones (default: %(default)s)",
    )
    parser.add_argument(
        "--base_rate",
        type=float,
        default=default.base_rate,
        help="share of clicks; Criteo's Kaggle log has 0.256, its 1 TB log 0.034 "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads, without effect on what is written (default: the cores, here %(default)s)",
    )


def run(args: argparse.Namespace) -> None:
    """Write the log and say what a perfect model would reach on it.

    Raises:
        OutputError: the output directory is occupied or cannot be written.
        SettingsError: a value is out of its range, or there is no such spec.
    """
    from clicklog.spec.feature_spec import load_spec
    from clicklog.synthetic.log import SUMMARY_FILE, synthesize
    from clicklog.synthetic.model import SyntheticSettings

    settings = SyntheticSettings(
        days=args.days,
        rows_per_day=args.rows_per_day,
        seed=args.seed,
        cardinality_scale=args.cardinality_scale,
        base_rate=args.base_rate,
    )
    begin = time.monotonic()
    spec = load_spec(args.spec) if args.spec else None
    summary = synthesize(args.output_path, settings, spec=spec, workers=args.workers)
    seconds = time.monotonic() - begin
    logger.info(
        "%s: %d days, %d rows, %.1f %% clicks, %.1f s (%.0f rows/s)",
        args.output_path,
        settings.days,
        summary["rows"],
        100 * summary["positives"] / summary["rows"],
        seconds,
        summary["rows"] / seconds,
    )
    for split, score in summary["oracle"].items():
        auroc = "undefined" if score["auroc"] is None else f"{score['auroc']:.4f}"
        logger.info("oracle AUROC %-5s %s (%d rows)", split, auroc, score["rows"])
    logger.info("details: %s", args.output_path / SUMMARY_FILE)
