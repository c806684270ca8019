"""Raw rows, a saved workflow and a checkpoint → click probabilities."""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import sys

from clicklog.command_line import run_subcommand
from clicklog.errors import run_command

#: Subcommand → its module and its help.
COMMANDS = {
    "predict": (
        "inference.commands.predict",
        "raw rows → parquet of click probabilities, in the order of the rows",
    ),
    "bundle": (
        "inference.commands.bundle",
        "workflow and checkpoint → one directory that can be moved",
    ),
    "publish": (
        "inference.commands.publish",
        "put a bundle in the place of the one that is served, or go back to the one before",
    ),
    "lineage": (
        "inference.commands.lineage",
        "where a bundle comes from: checkpoint, workflow generation, days, settings, versions",
    ),
    "serve": ("inference.commands.serve", "answer requests over HTTP: JSON in, JSON out"),
    "export": ("inference.commands.export", "a bundle for other programs"),
    "benchmark": (
        "inference.commands.benchmark",
        "latency and rows/s by batch size, beside Workflow.transform",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    return run_command(lambda: run_subcommand("python -m inference", __doc__, COMMANDS, argv))


if __name__ == "__main__":
    sys.exit(main())
