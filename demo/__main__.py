"""Synthetic click log → ETL → training on 2 ranks → evaluation → scoring of raw rows.

Runs the commands of README.md one after the other, each in its own process, and finally writes
``summary.json`` and prints a table.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before slow imports: Ctrl-C prints one line

# isort: split
import dataclasses
import logging
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from nvt_torchrec.base.command_line import Parser, Settings, flag, parse
from nvt_torchrec.base.errors import ClickLogError, OutputError, run_command
from nvt_torchrec.base.files.atomic import write_json, write_text
from nvt_torchrec.formats.etl_output import EtlOutput

log = logging.getLogger("demo")

#: The file that marks a directory of the demo, which the demo may empty.
MARKER = ".demo"
LAST_DAY = 23
#: The largest allowed difference of two scores of the same row.
TOLERANCE = 1e-5
#: The largest usual distance of the model's AUROC from the oracle's.
MAX_GAP = 0.02


class StageFailedError(ClickLogError):
    """A command of the demo failed; the command's own message names the error."""


@dataclasses.dataclass(frozen=True)
class DemoSettings(Settings):
    """The settings of the demo."""

    output: Path = flag("directory to write to", Path("build/demo"), metavar="DIR")
    rows_per_day: int = flag("rows of each of the 24 days", 50_000, minimum=1)
    seed: int = flag("seed of the synthetic log", 1, minimum=0)
    ranks: int | None = flag(
        "number of training processes (default: 2, or 1 on a machine with one GPU)", None, minimum=1
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo, and return the exit status."""

    def run() -> None:
        settings = parse(Parser(prog="python -m demo", description=__doc__), argv, DemoSettings)[0]
        _run(dataclasses.replace(settings, ranks=settings.ranks or _count_ranks()))

    return run_command(run)


def _run(settings: DemoSettings) -> None:
    """Run the commands, and compare their results.

    Raises:
        StageFailedError: A command failed, or scores differ.
        OutputError: The output directory holds other files.
    """
    from demo.summary import make_summary, print_table

    output = _make_directory(settings.output)
    etl = EtlOutput(output / "out")
    paths = {
        "raw": output / "raw",
        "etl": output / "out",
        "workflow": etl.workflow,
        "parquet": etl.splits,
        "report": etl.report,
        "checkpoint": output / "checkpoint",
        "training_log": output / "training_log",
        "predictions": output / "predictions.parquet",
        "summary": output / "summary.json",
    }
    seconds: dict[str, float] = {}
    for name, command in _list_commands(settings, paths).items():
        seconds[name] = _run_stage(name, command)
    begin = time.perf_counter()
    summary = make_summary(paths)
    seconds["check"] = round(time.perf_counter() - begin, 1)
    summary["seconds"] = {**seconds, "total": round(sum(seconds.values()), 1)}
    summary["paths"] = {name: str(path) for name, path in paths.items()}
    write_json(paths["summary"], summary)
    print_table(summary)
    if max(summary["predict_max_abs_diff"], summary["predict_log_loss_diff"]) > TOLERANCE:
        raise StageFailedError(
            "the scores of raw rows differ from those of the training's evaluation",
            "this is a defect; please report it",
        )
    gap = summary["oracle_auroc_test"] - summary["auroc_test"]
    if gap > MAX_GAP:
        log.warning("the model is %.3f AUROC below the oracle; more rows bring it closer", gap)


def _count_ranks() -> int:
    """Return 2, or 1 on a machine with one GPU, because each rank needs its own GPU."""
    from torch import cuda

    return min(2, cuda.device_count() or 2)


def _make_directory(output: Path) -> Path:
    """Make the output directory empty; only a directory of an earlier demo is emptied.

    Raises:
        OutputError: It holds other files.
    """
    if output.exists() and any(output.iterdir()):
        if not (output / MARKER).exists():
            raise OutputError(
                f"{output}: not empty, and not made by the demo", "choose another --output"
            )
        shutil.rmtree(output)
    output.mkdir(parents=True, exist_ok=True)
    write_text(output / MARKER, "made by `make demo`, which empties it when it runs again\n")
    return output


def _list_commands(settings: DemoSettings, paths: dict[str, Path]) -> dict[str, list[str]]:
    """Return the commands of the demo by stage."""
    return {
        "synthesize": _python(
            f"-m etl synthesize --output_path {paths['raw']} --days {LAST_DAY + 1} "
            f"--rows_per_day {settings.rows_per_day} --seed {settings.seed}"
        ),
        "etl": _python(f"-m etl run --input_path {paths['raw']} --output_path {paths['etl']}"),
        "train": _torchx(
            f"run -s local_cwd dist.ddp -j 1x{settings.ranks} --script train_torchrec.py -- "
            f"--binary_path {paths['parquet']}/ "
            f"--save_checkpoint_path {paths['checkpoint']} --log_path {paths['training_log']}"
        ),
        "predict": _python(
            f"-m inference predict --workflow {paths['workflow']} "
            f"--checkpoint {paths['checkpoint']} --input {paths['raw']}/day_{LAST_DAY} "
            f"--output {paths['predictions']}"
        ),
    }


def _python(arguments: str) -> list[str]:
    return [sys.executable, *shlex.split(arguments)]


def _torchx(arguments: str) -> list[str]:
    return [str(Path(sys.executable).with_name("torchx")), *shlex.split(arguments)]


def _run_stage(name: str, command: list[str]) -> float:
    """Run a command, and return its time in seconds; raise StageFailedError if it fails."""
    log.info("\n== %s: %s", name, shlex.join([Path(command[0]).name, *command[1:]]))
    begin = time.perf_counter()
    # torchx starts torchrun by name, so their directory must be in PATH.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    status = subprocess.run(command, check=False, env={**os.environ, "PATH": path}).returncode
    seconds = round(time.perf_counter() - begin, 1)
    if status:
        raise StageFailedError(
            f"{name}: exit status {status} after {seconds} s", "see the message above"
        )
    return seconds


if __name__ == "__main__":
    sys.exit(main())
