"""Run the steps one after the other, and keep what each found in ``build/bench/gpu.jsonl``.

Each step adds one line when it ends, however it ends, and the line is on the disk before the next
step begins. What a step printed is in ``build/bench/gpu/``. The data are made by a process beside
the first steps, which need none.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu.steps import ROOT, Step
from benchmarks.gpu.worker import GpuSettings
from benchmarks.harness import machine
from benchmarks.process import run
from benchmarks.venvs import BUILD
from nvt_torchrec.base.errors import BadInputError

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
        machine: See :func:`benchmarks.harness.machine`.
    """

    step: str
    status: str
    command: list[str]
    date: str
    wall_s: float
    error: str
    results: list[dict[str, Any]]
    versions: dict[str, Any]
    machine: dict[str, Any]


def read_records(path: Path = RECORDS) -> dict[str, Record]:
    """Return the last record of each step; a line that was cut by a crash is left out.

    Raises:
        BadInputError: There is no such file.
    """
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise BadInputError(f"{path}: no such file", "run `make bench-gpu` first") from None
    found = {}
    for line in lines:
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            log.warning("%s: a line is not whole, and is left out: %.60s", path, line)
            continue
        found[record.step] = record
    return found


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
    path.parent.mkdir(parents=True, exist_ok=True)
    earlier = read_records(path) if resume and path.exists() else {}
    done = {
        step.name: earlier[step.name]
        for step in steps
        if step.name in earlier
        and earlier[step.name].status == OK
        and earlier[step.name].command == list(step.command)
    }
    records = []
    with _Data([step for step in steps if step.name not in done], settings) as data:
        for number, step in enumerate(steps, 1):
            title = f"step {number} of {len(steps)}, {step.name}"
            if step.name in done:
                log.info("%s: done on %s", title, done[step.name].date)
                records.append(done[step.name])
                continue
            if step.data:
                data.wait()
            log.info("%s (at most %.0f s)", title, step.seconds)
            record = _run(step, settings)
            _append(path, record)
            log.info("%s: %s, %.1f s %s", title, record.status, record.wall_s, record.error)
            records.append(record)
    return records


def _run(step: Step, settings: GpuSettings) -> Record:
    output = OUTPUTS / step.name.replace("/", "-").replace(" ", "-")
    results: list[dict[str, Any]] = []
    if step.rapids and (settings.device == "cpu" or find_spec("cudf") is None):
        return _record(step, SKIPPED, 0.0, "needs a GPU with RAPIDS", results, {})
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "results")
        command = [sys.executable, "-m", *step.command]
        command += [f"--results={file}"] if step.part else []
        done = run(
            command,
            cwd=ROOT,
            timeout=step.seconds,
            result=None if step.part else dict,  # other programs print no results
            output=output,
        )
        if file.exists():
            results = [json.loads(line) for line in file.read_text().splitlines()]
    status = FAILED if done.error else OK
    return _record(step, status, done.wall_s, done.error, results, done.output.get("versions", {}))


def _record(
    step: Step, status: str, wall_s: float, error: str, results: list, versions: dict
) -> Record:
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return Record(
        step.name,
        status,
        list(step.command),
        date,
        round(wall_s, 2),
        error,
        results,
        versions,
        machine(),
    )


def _append(path: Path, record: Record) -> None:
    with open(path, "a") as file:
        file.write(json.dumps(dataclasses.asdict(record)) + "\n")
        file.flush()
        os.fsync(file.fileno())


class _Data:
    """The process that makes the data of those steps that need any."""

    def __init__(self, steps: list[Step], settings: GpuSettings) -> None:
        self._process = None
        if any(step.data for step in steps):
            given = ("data", "rows", "log_rows", "max_table_rows")
            arguments = [f"--{name}={getattr(settings, name)}" for name in given]
            OUTPUTS.mkdir(parents=True, exist_ok=True)
            with open(OUTPUTS / "data.log", "wb") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gpu.worker", "data", "--device=cpu"]
                    + arguments,
                    cwd=ROOT,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
                )

    def __enter__(self) -> _Data:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        """Wait until the data are there; the step itself says what is wrong if they are not."""
        begin = time.perf_counter()
        if self._process and self._process.wait():
            log.warning("the data could not be made: see %s", OUTPUTS / "data.log")
        waited = time.perf_counter() - begin
        if waited > 1:
            log.info("waited %.0f s for the data", waited)
