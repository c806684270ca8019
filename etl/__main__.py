"""From a raw click log to a saved NVTabular Workflow and parquet for training."""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import argparse
import importlib
import os
import sys

from clicklog.errors import run_command

#: Subcommand → its module in etl.commands (``add_arguments``, ``run``, perhaps ``DESCRIPTION``),
#: and its help.
COMMANDS = {
    "synthesize": ("synthesize", "make a click log with a planted click model"),
    "run": ("run", "days of a raw log → saved NVTabular Workflow + parquet"),
    "check": ("check", "verify an output: files, values, checksums, overlap of the splits"),
    "import": ("import_data", "take over what TorchRec, NVIDIA or NVTabular preprocessed"),
    "doctor": ("doctor", "whether this machine can do it: driver, CUDA, packages, links"),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    return run_command(lambda: _run(sys.argv[1:] if argv is None else argv))


def _run(argv: list[str]) -> int | None:
    # Before Arrow is loaded: its own allocator keeps what was freed, tens of MB for each thread.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    parser = argparse.ArgumentParser(prog="python -m etl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module_name, words) in COMMANDS.items():
        command = commands.add_parser(name, help=words)
        if name in argv[:1]:  # the others need not be imported
            module = importlib.import_module(f"etl.commands.{module_name}")
            command.description = getattr(module, "DESCRIPTION", module.__doc__)
            module.add_arguments(command)
            command.set_defaults(function=module.run)
    args = parser.parse_args(argv)
    return args.function(args)


if __name__ == "__main__":
    sys.exit(main())
