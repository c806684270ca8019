"""Run the steps one after the other, and keep what each found in ``build/bench/gpu.jsonl``.

Each step adds one line when it ends, however it ends, and the line is on the disk before the next
step begins. What a step printed is in ``build/bench/gpu/``. The data are made by a process beside
the first steps, which need none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import Step, part_command
from benchmarks.gpu.worker import GpuSettings
from benchmarks.harness import ROOT
from benchmarks.process import run
from benchmarks.venvs import BUILD

log = logging.getLogger("benchmarks")

RECORDS = BUILD / "gpu.jsonl"
OUTPUTS = BUILD / "gpu"
OK, FAILED, SKIPPED = "ok", "failed", "skipped"


@dataclasses.dataclass(frozen=True)
class Record:
    """What became of a step.

    Attributes:
        step: Its name.
        status: :data:`OK`, :data:`FAILED` or :data:`SKIPPED`.
        command: Its arguments: a figure of another size is another figure.
        date: When it ended, ISO 8601.
        wall_s: Seconds that it took.
        error: Why it failed or was skipped.
        results: What it measured, until it ended or failed.
        versions: The card and the versions that matter.
    """

    step: str
    status: str
    command: list[str]
    date: str
    wall_s: float
    error: str
    results: list[dict[str, Any]]
    versions: dict[str, Any]


def read_records(path: Path = RECORDS) -> dict[str, Record]:
    """Return the last record of each step; a line that was cut by a crash is left out."""
    records = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            log.warning("%s: a line is not whole, and is left out: %.60s", path, line)
            continue
        records[record.step] = record
    return records


def run_steps(
    steps: list[Step], settings: GpuSettings, *, resume: bool, path: Path = RECORDS
) -> list[Record]:
    """Run steps and return their records.

    Args:
        steps: The steps.
        settings: Their settings.
        resume: Whether to leave out steps that have succeeded with the same arguments.
        path: The file of the records.
    """
    OUTPUTS.mkdir(parents=True, exist_ok=True)
    earlier = read_records(path) if resume else {}

    def is_done(step: Step) -> bool:
        record = earlier.get(step.name)
        return bool(record) and (record.status, record.command) == (OK, list(step.command))

    records = []
    needs_data = any(step.data for step in steps if not is_done(step))
    with _making_data(settings) if needs_data else contextlib.nullcontext() as making:
        for number, step in enumerate(steps, 1):
            title = f"step {number} of {len(steps)}, {step.name}"
            if is_done(step):
                log.info("%s: done on %s", title, earlier[step.name].date)
                records.append(earlier[step.name])
                continue
            if step.data and making.wait():
                log.warning("the data could not be made: see %s", OUTPUTS / "data.log")
            log.info("%s (at most %.0f s)", title, step.seconds)
            record = _run(step, settings)
            with open(path, "a") as file:
                file.write(json.dumps(dataclasses.asdict(record)) + "\n")
                file.flush()
                os.fsync(file.fileno())
            log.info("%s: %s, %.1f s %s", title, record.status, record.wall_s, record.error)
            records.append(record)
    return records


@contextlib.contextmanager
def _making_data(settings: GpuSettings) -> Iterator[subprocess.Popen]:
    """Make the data in a process beside the steps, which ends with them."""
    on_host = dataclasses.replace(settings, device="cpu")
    with open(OUTPUTS / "data.log", "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *part_command("data:make_all", on_host)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _run(step: Step, settings: GpuSettings) -> Record:
    results: list[dict[str, Any]] = []
    if step.rapids and (settings.device == "cpu" or find_spec("cudf") is None):
        status, wall_s, error, versions = SKIPPED, 0.0, "needs a GPU with RAPIDS", {}
    else:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "results")
            done = run(
                [sys.executable, "-m", *step.command, *([f"--results={file}"] * step.part)],
                cwd=ROOT,
                timeout=step.seconds,
                result=None if step.part else dict,  # other programs print no results
                output=OUTPUTS / step.name.replace("/", "-").replace(" ", "-"),
            )
            if file.exists():
                results = [json.loads(line) for line in file.read_text().splitlines()]
        status, wall_s, error = FAILED if done.error else OK, done.wall_s, done.error
        versions = done.output.get("versions", {})
    return Record(
        step.name,
        status,
        list(step.command),
        datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        round(wall_s, 2),
        error,
        results,
        versions,
    )
