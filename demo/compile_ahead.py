"""Compile the loops of the ETL, the loader and the server ahead of their first use.

``make env`` runs this at its end, and so does an image of the server while it is built. Loops are
compiled once for the processor and cached (see :mod:`base.kernels`). Several processes compile at
once, while a first run would compile one loop after the other. Some import the modules; those for
the ETL run it with a few rows.
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

from nvt_torchrec.base.errors import ClickLogError, run_command
from nvt_torchrec.etl.settings import cores

log = logging.getLogger("demo")

#: Modules that compile on import, the slowest first; a group is imported by one process.
IMPORTS = (
    ("nvt_torchrec.workflows.drift",),  # imports those of compiled workflows
    ("nvt_torchrec.nvt_loader.parquet.page_values", "nvt_torchrec.nvt_loader.parquet.pages"),
    ("nvt_torchrec.nvt_loader.parquet.kernels",),
)
#: The spec of a TSV log with numbers, and that of a CSV log with strings and lists.
SPECS = ("criteo_1tb", "retail")

_COMMANDS = """
import json, sys
from nvt_torchrec.etl.__main__ import main
for arguments in json.loads(sys.argv[1]):
    if main(arguments) > 1:  # 1: a check with findings
        sys.exit(1)
"""


class CompileError(ClickLogError):
    """A process failed to compile. This may be ignored: the first use compiles again."""


def main() -> int:
    """Compile everything; return the exit status."""
    return run_command(_run)


def _run() -> None:
    begin = time.perf_counter()
    log.info("compiling loops for this processor, %d at a time", cores())
    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(cores()) as pool:
        list(pool.map(_run_python, _programs(Path(directory))))
    log.info("compiled in %.1f s", time.perf_counter() - begin)


def _programs(directory: Path) -> Iterator[list[str]]:
    """Yield the arguments of Python for each process."""
    for modules in IMPORTS:
        yield ["-c", f"import {', '.join(modules)}"]
    for spec in SPECS:
        raw, out = directory / spec, str(directory / f"{spec}.out")
        small = ["--days", "3", "--rows_per_day", "40"]
        commands = [
            ["synthesize", "--output_path", str(raw), *small],
            ["run", "--input_path", str(raw), "--output_path", out, "--spec", spec]
            + ["--engine", "cpu", "--shuffle", "full"],
            ["check", out],
        ]
        if spec == "retail":
            write_shop_log(raw)
            del commands[0]
        yield ["-c", _COMMANDS, json.dumps(commands)]


def write_shop_log(directory: Path) -> None:
    """Write three small days in the format of the spec ``retail``, with missing values."""
    names = "clicked,visits_today,seconds_on_page,price,country,device,category,brand,product"
    directory.mkdir()
    for day in range(3):
        lines = [f"{names},recent_products,user"]
        for i in range(day, day + 40):
            row = f"{i % 2},{i},{2 * i},{i / 7:.2f},DE,phone,shoes,{i % 9},p{i},p{i}|p{i + 1},{i}"
            lines.append(row if i % 5 else f"{i % 2},,,,,,,,,,")
        (directory / f"day_{day}.csv").write_text("\n".join(lines))


def _run_python(arguments: list[str]) -> None:
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(
            f"{' '.join(arguments)}: {done.stderr.strip()[-500:]}",
            "python -m etl doctor says what is wrong with this environment",
        )


if __name__ == "__main__":
    sys.exit(main())
