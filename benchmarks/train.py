"""Compare training with dlrm_main.py and a bare loop: the same small DLRM, rows and plain SGD.

"dlrm_main" is the program of facebookresearch/dlrm, run unmodified from the checkout that --dlrm
names (git clone https://github.com/facebookresearch/dlrm), in this project's environment. It reads
NumPy arrays into memory; our trainer decodes parquet. "bare loop" is forward, backward and
optimizer of our model over one batch in memory.
Rates are over --steps steps after --warm_up. On a busy machine compare samples per CPU second. With
--max_table_rows, model and tables are MLPerf's (97 GiB in float32 if no table is cut). On a GPU,
the initial embeddings are drawn there. --plain measures only the bare loop, and again without each
of the named optimizations for GPUs. Everything after -- goes to the trainers.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # first: makes Ctrl-C print one line, no traceback

# isort: split
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.data import NPY_KINDS, TABLE_SIZES, make_criteo_schema, make_once, write_rows
from benchmarks.harness import Metric, System, Table, run_benchmark, split_flags
from benchmarks.process import BUILD
from benchmarks.train_worker import BARE, DLRM_MAIN, OURS, PLAIN_FORMS
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.clicklog.synthetic.click_model import MLPERF_CARDINALITIES
from nvt_torchrec.formats.splits import SPLITS

METRICS = (
    Metric("samples_per_s", "samples/s", ratio=True),
    Metric("samples_per_cpu_s", "samples/CPU s", ratio=True),
    Metric("step_ms", "step ms", ".1f"),
    Metric("peak_rss_mb", "peak MB"),
)
#: The flags of a small model, whose time is mostly overhead instead of arithmetic.
_SMALL = [
    *("--embedding_dim", "16"),
    *("--dense_arch_layer_sizes", "64,16"),
    *("--over_arch_layer_sizes", "128,64,1"),
]
#: The flags of MLPerf's model.
_MLPERF = [
    *("--embedding_dim", "128"),
    *("--dense_arch_layer_sizes", "512,256,128"),
    *("--over_arch_layer_sizes", "1024,1024,512,256,1"),
]
#: The rows of valid and of test; evaluations are not measured.
_HELD_OUT_ROWS = 20_000


@dataclasses.dataclass(frozen=True)
class BenchmarkSettings(Settings):
    """The settings of the benchmark."""

    dlrm: Path | None = flag(
        "checkout of facebookresearch/dlrm; without one, dlrm_main is left out", None
    )
    batch_sizes: tuple[int, ...] = flag("batch sizes", (2048,), minimum=1)
    steps: int = flag("number of measured steps", 100, minimum=1)
    warm_up: int = flag("number of steps before the measured ones", 20, minimum=0)
    repeats: int = flag("runs of each system", 3, minimum=1)
    max_table_rows: int | None = flag(
        "train MLPerf's model, with at most this many rows in a table", None, minimum=1
    )
    plain: tuple[str, ...] = flag(
        "measure only the bare loop, and also without each of these optimizations for GPUs",
        (),
        choices=(*PLAIN_FORMS,),
    )

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """The rows of each embedding table."""
        if self.max_table_rows is None:
            return TABLE_SIZES
        return tuple(min(size, self.max_table_rows) for size in MLPERF_CARDINALITIES)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; return exit status 1 if a system failed."""
    arguments, flags = split_flags(sys.argv[1:] if argv is None else argv)
    return run_benchmark(
        "train", __doc__, BenchmarkSettings, lambda settings: _run(settings, flags), arguments
    )


def _run(settings: BenchmarkSettings, flags: list[str]) -> int:
    if settings.dlrm:
        script = settings.dlrm / "torchrec_dlrm" / "dlrm_main.py"
        if not script.is_file():
            raise SettingsError(
                f"{script} does not exist", "pass a checkout of facebookresearch/dlrm"
            )
    data = BUILD / "train-data"
    rows = max(settings.batch_sizes) * (settings.warm_up + settings.steps + 2)
    make_data(data, rows, settings.table_sizes)
    systems: list[System] = []
    for size in settings.batch_sizes:
        systems += _list_systems(settings, data, size, flags)
    model = "a small DLRM" if settings.max_table_rows is None else "MLPerf's DLRM"
    table = Table("train", f"Training {model} in one process", METRICS, base=BARE)
    table.measure(systems, repeats=settings.repeats)
    return table.finish()


def make_data(root: Path, rows: int, table_sizes: Sequence[int] = TABLE_SIZES) -> None:
    """Write the same rows as ``root/split`` and as the arrays that dlrm_main reads, once."""

    def make() -> None:
        schema = make_criteo_schema(table_sizes)
        for seed, split in enumerate(SPLITS):
            count = rows if split == "train" else _HELD_OUT_ROWS
            npy = root / "npy" if split == "train" else None
            directory = root / "split" / split
            write_rows(directory, schema, count, seed=seed, npy=npy, file_rows=count)
        schema.write(root / "split")
        for kind in NPY_KINDS:
            (root / "npy" / f"0_{kind}.npy").rename(root / "npy" / f"train_{kind}.npy")

    make_once(root, f"{rows} rows of tables of at most {max(table_sizes)}", make)


def _list_systems(
    settings: BenchmarkSettings, data: Path, size: int, flags: Sequence[str]
) -> list[System]:
    """Return the systems for one batch size."""
    model = [*(_SMALL if settings.max_table_rows is None else _MLPERF)]
    model += ["--num_embeddings_per_feature", ",".join(map(str, settings.table_sizes))]
    names = [(BARE, "")]
    if settings.plain:
        names += [(BARE, form) for form in settings.plain]
    else:
        names.append((OURS, ""))
        if settings.dlrm:
            names.append((DLRM_MAIN, ""))
    systems = []
    for name, form in names:
        command: list[object] = [sys.executable, "-m", "benchmarks.train_worker", name]
        command += ["--data", data, "--batch_size", size]
        command += ["--warm_up", settings.warm_up, "--steps", settings.steps]
        if settings.dlrm and name == DLRM_MAIN:
            command += ["--checkout", settings.dlrm.absolute()]
        case = f"B={size}"
        if form:
            command += ["--plain", form]
            case += f", plain {form}"
        command += [*model, *flags]
        systems.append(System(name, case, list(map(str, command))))
    return systems


if __name__ == "__main__":
    sys.exit(main())
