"""From a raw click log to a saved NVTabular Workflow and parquet for training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clicklog.errors import run_command
from clicklog.spec import DENSE_TRANSFORMS, load_spec


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m etl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_synthesize(commands)
    _add_run(commands)
    _add_inspect(commands)
    args = parser.parse_args(argv)
    return run_command(lambda: args.function(args))


def _add_synthesize(commands) -> None:
    from etl import synthesize

    parser = commands.add_parser(
        "synthesize",
        help="make a Criteo-format log with a planted click model",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    synthesize.add_arguments(parser)
    parser.set_defaults(function=synthesize.run)


def _add_run(commands) -> None:
    parser = commands.add_parser(
        "run",
        help="days of a raw log → saved NVTabular Workflow + parquet for training",
        description="Fits a Workflow on all days but the last, saves it to OUT/workflow, and "
        "writes OUT/criteo_binary/split/{train,valid,test}. The last day is halved into valid and "
        "test; a log of one day is cut 80/10/10.",
    )
    add = parser.add_argument
    add("--input_path", required=True, metavar="RAW", help="directory of day_0, day_1 …")
    add("--output_path", required=True, type=Path, metavar="OUT", help="absent or empty directory")
    add("--spec", metavar="TOML", help="feature spec (default: the Criteo log's)")
    cap = parser.add_mutually_exclusive_group()
    cap.add_argument(
        "--freq_threshold", type=int, metavar="T", help="values rarer than T are out of vocabulary"
    )
    cap.add_argument(
        "--max_table_size",
        type=int,
        metavar="M",
        help="rows of a table at most, the 3 reserved ids included: the most frequent values stay",
    )
    add("--dense", choices=DENSE_TRANSFORMS, help="transform of the dense columns")
    add("--days", metavar="LIST", help="use these days only, for example 0-3,7")
    add("--limit_rows", type=int, metavar="N", help="use the first N rows of each day only")
    add(
        "--bad_rows",
        choices=("stop", "reject"),
        default="stop",
        help="stop at the first malformed row (default), or leave such rows out and list them in "
        "OUT/rejected.tsv",
    )
    add("--block_mb", type=int, default=64, metavar="MB", help="text per unit of work (64)")
    add("--workers", type=int, metavar="N", help="processes (default: one per GPU, or per core)")
    add("--scheduler", metavar="ADDRESS", help="use a Dask cluster that runs already")
    add("--dry_run", action="store_true", help="say what would be done and what it needs")
    parser.set_defaults(function=_run)


def _run(args: argparse.Namespace) -> None:
    import dataclasses

    from clicklog.raw import parse_days
    from etl.run import EtlSettings, run

    spec = load_spec(args.spec)
    if args.freq_threshold is not None:
        spec = spec.with_policy(freq_threshold=args.freq_threshold, max_table_size=0)
    if args.max_table_size is not None:
        spec = spec.with_policy(max_table_size=args.max_table_size, freq_threshold=0)
    if args.dense:
        spec = dataclasses.replace(spec, dense_transform=args.dense)
    settings = EtlSettings(
        input_path=args.input_path,
        output_path=args.output_path,
        spec=spec,
        days=frozenset(parse_days(args.days)) if args.days is not None else None,
        limit_rows=args.limit_rows,
        block_mb=args.block_mb,
        workers=args.workers,
        scheduler=args.scheduler,
        reject=args.bad_rows == "reject",
    )
    if args.dry_run:
        from etl.dry_run import dry_run

        print(dry_run(settings))
        return
    manifest = run(settings)
    rows = manifest["rows"]
    print(f"{rows['in']} rows in, {rows['out']} out, {rows['rejected']} rejected")
    print(f"{manifest['rows_per_s']} rows/s to fit and transform")
    print(f"--num_embeddings_per_feature {manifest['num_embeddings_per_feature']}")


def _add_inspect(commands) -> None:
    parser = commands.add_parser("inspect", help="show what a saved workflow holds")
    parser.add_argument("workflow", type=Path, metavar="OUT/workflow")
    parser.set_defaults(function=_inspect)


def _inspect(args: argparse.Namespace) -> None:
    from workflows import inspect

    description = inspect(args.workflow)
    print(f"digest {description.digest}")
    for name, version in description.versions.items():
        print(f"{name} {version}")
    print(f"\n{'column':10} {'mean':>14} {'std':>14}")
    for name in description.spec.dense_names:
        values = description.statistics.get(name)
        shown = [f"{values[key]:14.6g}" for key in ("mean", "std")] if values else ["-".rjust(14)]
        print(f"{name:10} {' '.join(shown)}")
    print(f"\n{'column':10} {'values':>12} {'table size':>12} {'null rows':>12} {'oov rows':>12}")
    for name, one in description.vocabularies.items():
        print(
            f"{name:10} {one.values:12} {one.table_size:12} "
            f"{one.observed['null']:12} {one.observed['oov']:12}"
        )


if __name__ == "__main__":
    sys.exit(main())
