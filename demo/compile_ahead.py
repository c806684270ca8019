"""Compile ahead what the ETL and the loader compile when they first need it.

``make env`` ends with this. Loops are compiled for the processor, once, and kept (see
:mod:`clicklog.kernels`); here by several processes at once, where a first run would do one after
the other: some by importing their modules, those of the ETL by doing all of it with a few rows.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from clicklog.errors import ClickLogError, run_command
from etl.engines.hardware import cores

log = logging.getLogger("demo")

#: Modules whose import compiles, those together that need each other; the slowest first.
IMPORTS = (
    ("workflows.compiled.text_tables", "workflows.compiled.dense"),
    ("nvt_loader.parquet.page_values", "nvt_loader.parquet.pages"),
    ("nvt_loader.kernels",),
)
#: Specs of a log of numbers in TSV, and of one in CSV with strings and lists.
SPECS = ("criteo_1tb", "retail")

_COMMANDS = """
import json, sys
from etl.__main__ import main
for arguments in json.loads(sys.argv[1]):
    if main(arguments) > 1:  # 1: a check that found something
        sys.exit(1)
"""


class CompileError(ClickLogError):
    """A process that was to compile failed; this may be ignored, the first use tries again."""


def main() -> int:
    """Compile everything; the exit status."""
    return run_command(_run)


def _run() -> None:
    begin = time.perf_counter()
    log.info("compiling loops for this processor, %d at a time", cores())
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(cores()) as pool:
        for _ in pool.map(_started, _programs(Path(directory))):
            pass
    log.info("compiled in %.1f s", time.perf_counter() - begin)


def _programs(directory: Path) -> Iterator[list[str]]:
    """Arguments of Python, for each process."""
    for modules in IMPORTS:
        yield ["-c", f"import {', '.join(modules)}"]
    for spec in SPECS:
        raw, out = str(directory / spec), str(directory / f"{spec}.out")
        small = ["--spec", spec, "--days", "3", "--rows_per_day", "40"]
        fit = ["--spec", spec, "--engine", "cpu", "--shuffle", "full"]
        commands = [
            ["synthesize", "--output_path", raw, *small],
            ["run", "--input_path", raw, "--output_path", out, *fit],
            ["check", out],
        ]
        yield ["-c", _COMMANDS, json.dumps(commands)]


def _started(arguments: list[str]) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(
            f"{' '.join(arguments)}: {done.stderr.strip()[-500:]}",
            "python -m etl doctor says what is wrong with this environment",
        )


if __name__ == "__main__":
    sys.exit(main())
