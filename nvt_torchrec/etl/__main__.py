"""From a raw click log to a saved NVTabular Workflow and parquet for training."""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import gc
import os

from nvt_torchrec.base.errors import end_process, run_command
from nvt_torchrec.base.subcommands import run_subcommand

#: Subcommand → its module and its help.
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
        "add new days to a finished output; no id changes",
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
    """Run a subcommand; returns the exit status."""
    # Before Arrow is loaded: its own allocator keeps what was freed, tens of MB for each thread.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    # Imports make many objects, of which none is garbage: looking for some takes 0.1 s.
    gc.set_threshold(100_000)
    return run_command(lambda: run_subcommand("python -m etl", __doc__, COMMANDS, argv))


def command() -> None:
    """Run a subcommand, and end the process."""
    end_process(main())


if __name__ == "__main__":
    command()
