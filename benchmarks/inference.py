"""The HTTP server under load over loopback, beside the same bundle's Predictor in one thread.

Clients each send the next request when the last one is answered: one, several, and so many that the
server refuses some (503). Latencies (ms) are those of scored requests. Clients run on the same
cores as the server, which would answer more without them. `python -m inference benchmark` compares
the Predictor with NVTabular and TorchRec, stage by stage.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import contextlib
import dataclasses
import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import ROOT, Metric, Table, run_benchmark
from benchmarks.process import Run
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError

METRICS = (
    Metric("rows_per_s", "rows/s", ratio=True),
    Metric("requests_per_s", "scored/s"),
    Metric("refused_per_s", "503/s"),
    Metric("p50_ms", "p50 ms", ".1f"),
    Metric("p99_ms", "p99 ms", ".1f"),
)
PREDICTOR = "predictor"
_PATIENCE_S = 60


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    bundle: Path = flag("the bundle to serve")
    input: str = flag("raw rows to send, in the training log's format", metavar="FILE")
    rows: tuple[int, ...] = flag("rows of a request", (1, 64), least=1)
    clients: tuple[int, ...] = flag("numbers of clients", (1, 32, 256), least=1)
    seconds: float = flag("seconds of each run", 5.0, above=0)
    repeats: int = flag("runs of each load", 3, least=1)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a request failed."""
    return run_benchmark("inference", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    from nvt_torchrec.inference import Predictor

    predictor = Predictor.load(settings.bundle)
    rows = _read_rows(predictor.spec, settings.input, max(settings.rows))
    table = Table("inference", "Scoring rows of JSON", METRICS, base=PREDICTOR)
    with _serving(settings.bundle) as port:
        for _ in range(settings.repeats):
            for count in settings.rows:
                case, sample = f"{count} rows", rows[:count]
                runs = {
                    PREDICTOR: _load(
                        lambda s=sample: predictor.predict(s) is not None and 200,
                        1,
                        settings,
                        count,
                    )
                }
                for clients in settings.clients:
                    send = _sender(port, json.dumps({"rows": sample}))
                    runs[f"server, {clients} clients"] = _load(send, clients, settings, count)
                for system, run in runs.items():
                    table.runs.setdefault((system, case), []).append(run)
    table.print()
    print(f"written to {table.write()}")
    return 1 if table.failed else 0


def _read_rows(spec: Any, path: str, count: int) -> list[dict[str, Any]]:
    """Return the first rows of a file as dicts, repeated if they are too few."""
    from nvt_torchrec.clicklog.readers.stream import stream_unparsed
    from nvt_torchrec.inference.benchmark import rows_as_dicts

    rows: list[dict[str, Any]] = []
    for block in stream_unparsed(path, spec, block_bytes=1 << 20):
        rows += rows_as_dicts(block, count - len(rows))
        if len(rows) >= count:
            break
    if not rows:
        raise SettingsError(f"{path}: no well-formed row", "there is nothing to send")
    return (rows * -(-count // len(rows)))[:count]


@contextlib.contextmanager
def _serving(bundle: Path) -> Iterator[int]:
    """Yield the port of a server of the bundle."""
    command = [sys.executable, "-m", "inference", "serve", "--bundle", bundle.resolve()]
    process = subprocess.Popen(
        [*map(str, command), "--port", "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise SettingsError("the server did not start", "its message is above")
        yield int(url.rpartition(":")[2])
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def _sender(port: int, body: str) -> Callable[[], int]:
    """Return a function that sends a request, on a connection of each thread's own."""
    thread = threading.local()

    def send() -> int:
        if not hasattr(thread, "connection"):
            thread.connection = http.client.HTTPConnection("127.0.0.1", port, _PATIENCE_S)
        headers = {"Content-Type": "application/json"}
        thread.connection.request("POST", "/predict", body, headers)
        answer = thread.connection.getresponse()
        answer.read()
        return answer.status

    return send


def _load(send: Callable[[], int], clients: int, settings: BenchmarkSettings, rows: int) -> Run:
    """Call ``send`` in so many threads, again and again; return rates and latencies."""

    def client() -> list[tuple[int, float]]:
        answers = []
        while (begin := time.perf_counter()) < end:
            answers.append((send(), time.perf_counter() - begin))
        return answers

    begin = time.perf_counter()
    end = begin + settings.seconds
    with ThreadPoolExecutor(clients) as pool:
        try:
            running = [pool.submit(client) for _ in range(clients)]
            answers = [answer for future in running for answer in future.result()]
        except (OSError, http.client.HTTPException) as error:
            return Run(0.0, 0.0, 0.0, {}, f"a request was not answered: {error!r}")
    seconds = time.perf_counter() - begin
    scored = [1e3 * took for status, took in answers if status == 200]
    refused = sum(status == 503 for status, _ in answers)
    if len(scored) + refused < len(answers) or not scored:
        statuses = sorted({status for status, _ in answers})
        return Run(seconds, 0.0, 0.0, {}, f"answers with status {statuses}")
    p50, p99 = np.quantile(scored, (0.5, 0.99)).tolist()
    figures = {
        "rows_per_s": rows * len(scored) / seconds,
        "requests_per_s": len(scored) / seconds,
        "refused_per_s": refused / seconds,
        "p50_ms": p50,
        "p99_ms": p99,
    }
    return Run(seconds, 0.0, 0.0, figures)


if __name__ == "__main__":
    sys.exit(main())
