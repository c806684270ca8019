"""Load test of `python -m inference serve`, over loopback, by `hey` (Debian: apt install hey).

For each number of rows in a request: 1 and 32 clients that each wait for the answer, then twice the
rate of the 32 clients, from 512 connections, as overload. Latencies (ms) are those of scored
requests (200); 503 means shed load; any other answer is an error and makes the exit status 1. hey
runs on the same cores as the server, which would answer more without it.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import contextlib
import csv
import dataclasses
import io
import itertools
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.harness import ROOT, describe_machine, machine, run_benchmark
from benchmarks.serve.bodies import bodies
from benchmarks.serve.clients import serving
from benchmarks.venvs import BUILD
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import write_json

log = logging.getLogger("benchmarks")

CLIENTS, OVERLOAD_CONNECTIONS, PROCESSES = 32, 512, 8


@dataclasses.dataclass(frozen=True)
class Load:
    """The result of one load.

    Attributes:
        rows: Number of rows in a request.
        case: Name of the load.
        offered_per_s: Requests sent per second.
        scored_per_s: Requests answered with scores per second.
        shed_per_s: Requests answered with 503 per second.
        p50_ms: Median latency of scored requests; None if there were none.
        p99_ms: Likewise the 99th percentile.
        errors: Number of requests with another answer or none.
    """

    rows: int
    case: str
    offered_per_s: float
    scored_per_s: float
    shed_per_s: float
    p50_ms: float | None
    p99_ms: float | None
    errors: int


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    bundle: Path = flag("the bundle to serve")
    input: str = flag("raw rows to send, in the training log's format", metavar="FILE")
    rows: tuple[int, ...] = flag("rows of a request", (1, 64), least=1)
    seconds: float = flag("seconds of each run", 10.0, above=0)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a request failed."""
    return run_benchmark("serve", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    if shutil.which("hey") is None:
        raise SettingsError(
            "hey is not installed", "apt install hey, or go install github.com/rakyll/hey"
        )
    loads = []
    with serving(ROOT, settings.bundle) as target, tempfile.TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{target.port}"
        for rows, content in bodies(settings.bundle, settings.input, settings.rows).items():
            body = Path(folder) / f"{rows}.json"
            body.write_bytes(content)
            loads += measure(url, rows, body, settings.seconds)
    print(f"inference serve over loopback, {settings.seconds:g} s each; {describe_machine()}\n")
    print(table(loads))
    write_json(
        BUILD / "serve.json",
        {"machine": machine(), "results": [dataclasses.asdict(load) for load in loads]},
    )
    return int(any(load.errors for load in loads))


def measure(url: str, rows: int, body: Path, seconds: float) -> list[Load]:
    """Measure one client, several clients, and twice the rate of the several clients."""
    hey = Hey(url, body)
    hey.run(min(seconds, 2), CLIENTS)
    loads = []
    for case, clients in (("1 client", 1), (f"{CLIENTS} clients", CLIENTS)):
        log.info("%d rows a request, %s", rows, case)
        loads.append(summarize([hey.run(seconds, clients)], rows, case))
    log.info("%d rows a request, overload", rows)
    answers, sent = hey.run_at_rate(seconds, 2 * loads[-1].scored_per_s)
    return [*loads, summarize(answers, rows, "2x overload", sent)]


@dataclasses.dataclass(frozen=True)
class Hey:
    """The load generator, for one address and body. It returns CSV with a line for each answer."""

    url: str
    body: Path

    def run(self, seconds: float, clients: int) -> str:
        """Run clients that each send the next request when the last one is answered."""
        with self._start("-c", clients, "-z", f"{seconds}s") as process:
            return process.communicate()[0]

    def run_at_rate(self, seconds: float, rate: float) -> tuple[list[str], int]:
        """Send ``rate`` requests per second, whatever is answered. Also return their number.

        The workers of one hey send at the same moment, so several are started at intervals.
        """
        workers = OVERLOAD_CONNECTIONS // PROCESSES
        period = OVERLOAD_CONNECTIONS / rate  # of each worker
        each = max(1, round(seconds / period)) * workers
        with contextlib.ExitStack() as stack:
            running = []
            for _ in range(PROCESSES):
                options = ("-c", workers, "-n", each, "-q", 1 / period)
                running.append(stack.enter_context(self._start(*options)))
                time.sleep(period / PROCESSES)
            with ThreadPoolExecutor(PROCESSES) as pool:
                answers = list(pool.map(lambda process: process.communicate()[0], running))
        return answers, each * PROCESSES

    def _start(self, *options: object) -> subprocess.Popen:
        request = ("-m", "POST", "-T", "application/json", "-D", self.body)
        command = ["hey", "-o", "csv", *options, *request, f"{self.url}/predict"]
        return subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)


def summarize(texts: list[str], rows: int, case: str, sent: int | None = None) -> Load:
    """Summarize hey's CSV.

    Args:
        texts: CSV of each hey, with a line for each answer.
        rows: Number of rows in a request.
        case: Name of the load.
        sent: Number of requests sent; None for the number of answers.
    """
    answers = [line for text in texts for line in csv.DictReader(io.StringIO(text))]
    if not answers:
        raise SettingsError("hey received no answer", "see the server's log")
    status = np.array([int(line["status-code"]) for line in answers])
    took = np.array([float(line["response-time"]) for line in answers])
    begun = np.array([float(line["offset"]) for line in answers])
    lasted = float((begun + took).max())
    scored, shed = status == 200, status == 503
    p50, p99 = None, None
    if scored.any():
        p50, p99 = np.quantile(took[scored] * 1e3, (0.5, 0.99)).tolist()
    return Load(
        rows=rows,
        case=case,
        offered_per_s=(sent or len(answers)) / lasted,
        scored_per_s=int(scored.sum()) / lasted,
        shed_per_s=int(shed.sum()) / lasted,
        p50_ms=p50,
        p99_ms=p99,
        errors=int((~scored & ~shed).sum()) + max(0, (sent or 0) - len(answers)),
    )


def table(loads: list[Load]) -> str:
    """Format the loads as a table."""
    heading = f"{'rows':>5}  {'load':14}{'offered/s':>10}{'scored/s':>10}{'rows/s':>10}"
    lines = [f"{heading}{'503/s':>8}{'p50 ms':>8}{'p99 ms':>8}{'errors':>8}"]
    for rows, group in itertools.groupby(loads, lambda load: load.rows):
        for load in group:
            p50, p99 = ("-" if ms is None else f"{ms:.1f}" for ms in (load.p50_ms, load.p99_ms))
            lines.append(
                f"{rows:>5}  {load.case:14}{load.offered_per_s:>10,.0f}{load.scored_per_s:>10,.0f}"
                f"{load.scored_per_s * rows:>10,.0f}{load.shed_per_s:>8,.0f}{p50:>8}"
                f"{p99:>8}{load.errors:>8}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
