"""Show the contents of a saved workflow."""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import argparse
import sys
from pathlib import Path

from clicklog.errors import run_command


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    return run_command(lambda: _run(argv))


def _run(argv: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m workflows", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect", help="show operators, vocabularies, statistics, sizes on disk and table sizes"
    )
    inspect.add_argument("workflow", type=Path, metavar="OUT/workflow")
    inspect.set_defaults(function=_inspect)
    lookup = commands.add_parser(
        "lookup", help="show what an id of a column stands for, or which id a value has"
    )
    lookup.add_argument("workflow", type=Path, metavar="OUT/workflow")
    lookup.add_argument("column", metavar="COLUMN", help="name of a categorical column")
    query = lookup.add_mutually_exclusive_group(required=True)
    query.add_argument("id", type=int, nargs="?", metavar="ID")
    query.add_argument(
        "--value",
        metavar="VALUE",
        help='a value as in the raw log, e.g. 0a1b2c3d; "" is a missing value',
    )
    lookup.set_defaults(function=_lookup)
    for command in (inspect, lookup):
        command.add_argument(
            "--skip_digests",
            action="store_true",
            help="do not compare the files with their digests first, which reads all of them",
        )
    args = parser.parse_args(argv)
    args.function(args)


def _verify(args: argparse.Namespace) -> None:
    if not args.skip_digests:
        from workflows.description import inspect, verify

        verify(args.workflow, inspect(args.workflow))


def _inspect(args: argparse.Namespace) -> None:
    from workflows.report import report

    _verify(args)
    print(report(args.workflow))


def _lookup(args: argparse.Namespace) -> None:
    from workflows.lookup import id_of, meaning_of
    from workflows.report import describe_meaning

    _verify(args)
    meaning = (
        meaning_of(args.workflow, args.column, args.id)
        if args.value is None
        else id_of(args.workflow, args.column, args.value)
    )
    print(describe_meaning(args.workflow, args.column, meaning))


if __name__ == "__main__":
    sys.exit(main())
