"""Score raw rows with a saved workflow and a checkpoint."""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import sys

from nvt_torchrec.base.errors import run_command
from nvt_torchrec.base.subcommands import run_subcommand

#: Subcommand → its module and its help.
COMMANDS = {
    "predict": ("nvt_torchrec.inference.commands.predict", "score raw rows; writes parquet"),
    "bundle": (
        "nvt_torchrec.inference.commands.bundle",
        "make one directory of a workflow and a checkpoint, for deployment",
    ),
    "publish": (
        "nvt_torchrec.inference.commands.publish",
        "replace the bundle that is served, or roll back to the one before",
    ),
    "lineage": (
        "nvt_torchrec.inference.commands.lineage",
        "show where a bundle comes from: checkpoint, workflow generation, days, settings",
    ),
    "serve": ("nvt_torchrec.inference.commands.serve", "score rows over HTTP, in JSON"),
    "export": ("nvt_torchrec.inference.commands.export", "export a bundle as ONNX, or for Triton"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    return run_command(lambda: run_subcommand("python -m inference", __doc__, COMMANDS, argv))


if __name__ == "__main__":
    sys.exit(main())
