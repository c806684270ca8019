"""Score raw rows with a saved workflow and a checkpoint."""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # first: makes Ctrl-C print one line, no traceback

# isort: split
import sys

from nvt_torchrec.base.errors import run_command
from nvt_torchrec.base.subcommands import run_subcommand

#: Subcommand → (module, help text).
COMMANDS = {
    "predict": (
        "nvt_torchrec.inference.commands.predict",
        "score raw rows and write the probabilities as parquet",
    ),
    "bundle": (
        "nvt_torchrec.inference.commands.bundle",
        "pack a workflow and a checkpoint into one directory for deployment",
    ),
    "publish": (
        "nvt_torchrec.inference.commands.publish",
        "replace the served bundle, or roll back to the previous one",
    ),
    "lineage": (
        "nvt_torchrec.inference.commands.lineage",
        "show where a bundle comes from: checkpoint, workflow generation, days, settings",
    ),
    "serve": ("nvt_torchrec.inference.commands.serve", "score rows over HTTP, in JSON"),
    "export": (
        "nvt_torchrec.inference.commands.export",
        "export a bundle as an ONNX file or as a model repository for Triton",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    return run_command(lambda: run_subcommand("python -m inference", __doc__, COMMANDS, argv))


if __name__ == "__main__":
    sys.exit(main())
