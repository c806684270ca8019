"""Score raw rows with a saved workflow and a checkpoint."""

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
        "score raw rows; writes parquet",
    ),
    "bundle": (
        "inference.commands.bundle",
        "make one directory of a workflow and a checkpoint, for deployment",
    ),
    "publish": (
        "inference.commands.publish",
        "replace the bundle that is served, or roll back to the one before",
    ),
    "lineage": (
        "inference.commands.lineage",
        "show where a bundle comes from: checkpoint, workflow generation, days, settings",
    ),
    "serve": ("inference.commands.serve", "score rows over HTTP, in JSON"),
    "export": ("inference.commands.export", "export a bundle for PyTorch, Triton or NVIDIA's DLRM"),
    "benchmark": (
        "inference.commands.benchmark",
        "measure latency and rows/s by batch size",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    return run_command(lambda: run_subcommand("python -m inference", __doc__, COMMANDS, argv))


if __name__ == "__main__":
    sys.exit(main())
