"""``python -m workflows.compiled WORKFLOW``: compile a saved workflow (again)."""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import argparse
import logging
import sys
import time
from pathlib import Path

from clicklog.errors import run_command
from workflows.compiled.builder import ARRAYS, DIRECTORY, build

log = logging.getLogger("workflows.compiled")


def main(arguments: list[str] | None = None) -> None:
    """Compile the workflow in a directory."""
    parser = argparse.ArgumentParser("python -m workflows.compiled", description=__doc__)
    parser.add_argument("workflow", type=Path, help="directory of a saved workflow")
    path = parser.parse_args(arguments).workflow
    begin = time.monotonic()
    build(path)
    size = sum((path / DIRECTORY / name).stat().st_size for name in ARRAYS)
    log.info("%s: %.1f MiB in %.1f s", path / DIRECTORY, size / 2**20, time.monotonic() - begin)


if __name__ == "__main__":
    sys.exit(run_command(main))
