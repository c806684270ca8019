"""From a raw click log to a saved NVTabular Workflow and parquet for training."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from clicklog.errors import run_command


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m etl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_synthesize(commands)
    _add_run(commands)
    _add_inspect(commands)
    _add_check(commands)
    _add_import(commands)
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
    from etl import run_command

    parser = commands.add_parser(
        "run",
        help="days of a raw log → saved NVTabular Workflow + parquet for training",
        description=run_command.DESCRIPTION,
    )
    run_command.add_arguments(parser)
    parser.set_defaults(function=run_command.run)


def _add_check(commands) -> None:
    from etl import check

    parser = commands.add_parser(
        "check",
        help="verify an output: files, values, checksums, overlap of the splits",
        description=check.DESCRIPTION,
    )
    check.add_arguments(parser)
    parser.set_defaults(function=check.run)


def _add_import(commands) -> None:
    from etl import import_data

    parser = commands.add_parser(
        "import",
        help="take over what TorchRec, NVIDIA or NVTabular preprocessed",
        description=import_data.DESCRIPTION,
    )
    import_data.add_arguments(parser)
    parser.set_defaults(function=import_data.run)


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
