"""Raw rows, a saved workflow and a checkpoint → click probabilities."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clicklog.errors import run_command


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m inference", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    predict = commands.add_parser(
        "predict", help="raw rows → parquet of click probabilities, in the order of the rows"
    )
    add = predict.add_argument
    add("--workflow", required=True, type=Path, metavar="OUT/workflow", help="saved workflow")
    add("--checkpoint", required=True, type=Path, metavar="CKPT", help="training checkpoint")
    add("--input", required=True, metavar="TSV", help="raw rows, with or without a label column")
    add("--output", required=True, type=Path, metavar="PARQUET", help="file to write")
    add("--device", default="cpu", help="where the model runs: cpu (default), cuda, cuda:1 …")
    add(
        "--bad_rows",
        choices=("stop", "reject"),
        default="stop",
        help="stop at the first malformed row (default), or leave such rows out",
    )
    predict.set_defaults(function=_predict)
    args = parser.parse_args(argv)
    return run_command(lambda: args.function(args))


def _predict(args: argparse.Namespace) -> None:
    from dlrm.startup import prepare_torch

    prepare_torch()
    from inference.bulk import predict_file
    from inference.predictor import Predictor

    predictor = Predictor(args.workflow, args.checkpoint, args.device)
    rows = predict_file(predictor, args.input, args.output, reject=args.bad_rows == "reject")
    print(f"{rows} rows scored: {args.output}")


if __name__ == "__main__":
    sys.exit(main())
