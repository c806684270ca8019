"""Show the contents of a saved workflow, or compile it again."""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # first, so that Ctrl-C gives one line during the other imports

# isort: split
import sys

from nvt_torchrec.base.errors import run_command
from nvt_torchrec.base.subcommands import run_subcommand

#: Subcommand → its module and its help.
COMMANDS = {
    "inspect": (
        "nvt_torchrec.workflows.inspection",
        "show vocabularies, statistics, lineage, sizes on disk and table sizes",
    ),
    "compile": (
        "nvt_torchrec.workflows.compiled.compiler",
        "rebuild the hash tables beside a workflow",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    prog = "python -m workflows"
    return run_command(lambda: run_subcommand(prog, __doc__, COMMANDS, argv))


if __name__ == "__main__":
    sys.exit(main())
