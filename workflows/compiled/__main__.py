"""``python -m workflows.compiled WORKFLOW``: compile a saved workflow (again)."""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import logging
import sys
import time
from pathlib import Path

from nvt_torchrec.base.command_line import Parser, Settings, flag, parse
from nvt_torchrec.base.errors import run_command
from nvt_torchrec.workflows.compiled.builder import ARRAYS, DIRECTORY, build

log = logging.getLogger("nvt_torchrec.workflows.compiled")


@dataclasses.dataclass(frozen=True)
class CompileSettings(Settings):
    """The settings of ``python -m workflows.compiled``."""

    workflow: Path = flag("directory of a saved workflow", positional=True, metavar="WORKFLOW")


def main(argv: list[str] | None = None) -> None:
    """Compile the workflow in a directory."""
    parser = Parser(
        prog="python -m workflows.compiled", description="Compile a saved workflow (again)."
    )
    path = parse(parser, argv, CompileSettings)[0].workflow
    begin = time.monotonic()
    build(path)
    size = sum((path / DIRECTORY / name).stat().st_size for name in ARRAYS)
    log.info("%s: %.1f MiB in %.1f s", path / DIRECTORY, size / 2**20, time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(run_command(main))
