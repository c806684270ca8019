"""Turn a raw click log into a saved NVTabular Workflow and parquet for training."""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # first: Ctrl-C ends slow imports with one line

# isort: split
import gc
import os

from nvt_torchrec.base.errors import end_process, run_command
from nvt_torchrec.base.subcommands import run_subcommand

#: Subcommand → its module and its one-line help.
COMMANDS = {
    "synthesize": (
        "nvt_torchrec.etl.commands.synthesize",
        "make a synthetic click log with a known best AUROC",
    ),
    "guess": ("nvt_torchrec.etl.commands.guess", "write a first feature spec for a file"),
    "run": (
        "nvt_torchrec.etl.commands.run",
        "fit a Workflow on the days of a raw log and write parquet",
    ),
    "extend": (
        "nvt_torchrec.etl.commands.extend",
        "add new days to a finished output; existing ids stay the same",
    ),
    "check": (
        "nvt_torchrec.etl.commands.check",
        "verify an output: files, values, checksums, digests",
    ),
    "export": (
        "nvt_torchrec.etl.commands.export",
        "write rows with their histories as lists, for other programs",
    ),
    "doctor": ("nvt_torchrec.etl.commands.doctor", "check this machine: driver, packages, GPUs"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return the exit status."""
    # Set before Arrow is loaded: its own allocator keeps tens of MB of freed memory per thread.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # Imports create many objects and no garbage; with the default threshold, looking for garbage
    # takes 0.1 s.
    gc.set_threshold(100_000)
    return run_command(lambda: run_subcommand("python -m etl", __doc__, COMMANDS, argv))


def command() -> None:
    """Run a subcommand, and end the process."""
    end_process(main())


if __name__ == "__main__":
    command()
