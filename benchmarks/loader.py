"""Compare loaders from parquet to DLRM batches: ours, Merlin's and TorchRec's.

Every run is a separate process that iterates for a few seconds. Its start is not counted, and rates
exclude the first batch. "limit: decode" only decodes, with one thread (page checksums verified, no
batches). "x merlin stock" compares within a case. "later ms" and "CPU ms" are the times to the
first batch of a later epoch. "x decode" is the ratio of the loader's rate to that of one decoding
thread, by wall-clock time (with two processors the loader has two threads) and by CPU time; both
are measured alternately in the same process. The cost of loading in a training step is measured by
`python -m benchmarks.train`. With --device cuda, files are decoded by cudf.read_parquet.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # first: makes Ctrl-C print one line, no traceback

# isort: split
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.data import make_criteo_schema, make_once, write_rows
from benchmarks.harness import Metric, System, Table, run_benchmark
from benchmarks.loader_worker import CPU_DECODING, DECODE, NPY, OURS, STOCK
from benchmarks.process import BUILD
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.formats.histories import StoredHistory
from nvt_torchrec.formats.vectors import StoredVectors

METRICS = (
    Metric("samples_per_s", "M samples/s", ".2f", ratio=True, scale=1e-6),
    Metric("samples_per_cpu_s", "M samples/CPU s", ".2f", ratio=True, scale=1e-6),
    Metric("ids_per_s", "M ids/s", ".1f", scale=1e-6),
    Metric("first_batch_ms", "first ms"),
    Metric("next_epoch_ms", "later ms"),
    Metric("next_epoch_cpu_ms", "CPU ms"),
    Metric("decode_share", "x decode", ".2f"),
    Metric("decode_share_cpu", "by CPU", ".2f"),
    Metric("loading_mb", "peak MB"),
)
BATCH_SIZES = (256, 2048, 16384, 65536)
MULTI_HOT = ("cat_0", "cat_4", "cat_9", "cat_19")
HISTORY = StoredHistory("recent", ("cat_0", "cat_4"))
#: A vector of the data, as wide as the embeddings of small language models.
TEXT = StoredVectors("text", 384)


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    rows: int = flag("rows of the data to generate", 4_000_000, minimum=200_000)
    repeats: int = flag(
        "runs of our loader and of Merlin's; the other systems run once", 2, minimum=1
    )
    cases: str = flag(
        "measure only the systems and cases that contain this text, for example 'ours B=2048'", ""
    )
    device: str = flag(
        "device of the batches; Merlin's loader runs only on cpu", "cpu", choices=("cpu", "cuda")
    )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a system failed."""
    return run_benchmark("loader", __doc__, BenchmarkSettings, _run, argv)


def _run(settings: BenchmarkSettings) -> int:
    data = BUILD / "loader-data"
    contents = f"{settings.rows} rows, with histories and vectors"
    make_once(data, contents, lambda: make_data(data, settings.rows))
    chosen = []
    for system in _list_systems(data, settings):
        if settings.cases in f"{system.name} {system.case}":
            chosen.append(system)
    title = f"Loading {settings.rows:,} Criteo-shaped rows"
    table = Table("loader", title, METRICS, base=STOCK)
    table.measure(chosen, repeats=settings.repeats)
    return table.finish()


def make_data(root: Path, rows: int) -> None:
    """Write the data of all cases, and the plain rows as TorchRec's arrays too."""
    write_rows(root / "int32" / "train", make_criteo_schema(), rows, npy=root / "npy")
    write_rows(root / "lists" / "train", make_criteo_schema(multi_hot=MULTI_HOT), rows // 2)
    write_rows(root / "histories" / "train", make_criteo_schema(histories=[HISTORY]), rows // 2)
    write_rows(root / "vectors" / "train", make_criteo_schema(vectors=[TEXT]), rows // 2)


def _list_systems(data: Path, settings: BenchmarkSettings) -> Iterator[System]:
    """Yield all systems and cases."""

    def make(name: str, case: str, *options: object) -> System:
        command = [sys.executable, "-m", "benchmarks.loader_worker", name, "--data", data]
        command += ["--device", settings.device, *options]
        repeats = None if name in (OURS, STOCK) else 1
        return System(name, case, list(map(str, command)), timeout=600, repeats=repeats)

    names = (OURS, STOCK, NPY) if settings.device == "cpu" else (OURS, CPU_DECODING, NPY)
    yield make(DECODE, "all rows")
    for size in BATCH_SIZES:
        for name in names:
            yield make(name, f"B={size}", "--batch_size", size)
    for name in names:
        yield make(name, "shuffled B=2048", "--shuffle")
    for name in names[:2]:
        yield make(name, "multi-hot B=2048", "--form", "lists")
    yield make(OURS, "shuffled histories of 2 columns", "--form", "histories", "--shuffle")
    yield make(OURS, "shuffled vectors of 384 numbers", "--form", "vectors", "--shuffle")


if __name__ == "__main__":
    sys.exit(main())
