"""Train one epoch at the default learning rates and print how far the AUROC is below the oracle's.

Every optimizer, at every global batch, with every model, on one synthetic log whose oracle (the
click model it was drawn from) gives the best AUROC there is. Everything after -- goes to
train_torchrec.py.

    python -m benchmarks.convergence --optimizers rowwise_adagrad --global_batches 2048,16384
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import functools
import itertools
import shutil
import sys

from benchmarks.harness import Metric, Table, run_benchmark
from benchmarks.training_runs import (
    METRICS,
    SMALL_MODEL,
    make_data,
    oracle_auroc,
    refuse,
    split_flags,
    training_run,
)
from benchmarks.venvs import BUILD
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError

#: What none of the runs should be below the oracle by.
TARGET = 0.02
OPTIMIZERS = ("rowwise_adagrad", "adagrad", "adam", "sgd")
#: The demo's model, one in between, and train_torchrec.py's default.
MODELS = {
    "small": SMALL_MODEL,
    "medium": (
        *("--embedding_dim", "32", "--dense_arch_layer_sizes", "256,32"),
        *("--over_arch_layer_sizes", "256,128,1"),
    ),
    "default": (),
}


@dataclasses.dataclass(frozen=True)
class ConvergenceSettings(Settings):
    """The settings of the benchmark."""

    optimizers: tuple[str, ...] = flag("optimizers", OPTIMIZERS, choices=OPTIMIZERS)
    global_batches: tuple[int, ...] = flag("global batches", (256, 2048, 16384, 65536), least=1)
    models: tuple[str, ...] = flag("models", tuple(MODELS), choices=tuple(MODELS))
    ranks: int = flag("processes of each run", 1, least=1)
    rows_per_day: int = flag("rows per day; 4 days are trained", 1_000_000, least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for size in self.global_batches:
            if size % self.ranks:
                raise SettingsError(
                    f"--global_batches {size} with --ranks {self.ranks}",
                    "give multiples of the ranks",
                )


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a run failed."""
    own, flags = split_flags(sys.argv[1:] if argv is None else argv)
    work = functools.partial(_run, flags=flags)
    return run_benchmark("convergence", __doc__, ConvergenceSettings, work, own)


def _run(settings: ConvergenceSettings, flags: list[str]) -> int:
    refuse(flags, ("--binary_path", "--optimizer", "--adagrad", "--batch_size", "--log_path"))
    split = make_data(settings.rows_per_day)
    logs = BUILD / "convergence"
    shutil.rmtree(logs, ignore_errors=True)
    metrics = (METRICS[0], Metric("gap", "below oracle", ".5f"), *METRICS[1:])
    title = (
        f"Test AUROC after one epoch of {4 * settings.rows_per_day:,} rows, {settings.ranks} ranks"
    )
    table = Table("convergence", title, metrics, base="")
    systems, oracle = [], None
    for model, batch, optimizer in itertools.product(
        settings.models, settings.global_batches, settings.optimizers
    ):
        case = f"{model}, B={batch}"
        own = [
            *("--binary_path", str(split), "--optimizer", optimizer),
            *("--batch_size", str(batch // settings.ranks), *MODELS[model], *flags),
        ]
        directory = logs / f"{model}-{batch}-{optimizer}"
        systems.append((training_run(optimizer, case, own, directory, settings.ranks), directory))
    table.measure([system for system, _ in systems], repeats=1)
    for system, directory in systems:
        for one in table.outputs(system.name, system.case):
            oracle = oracle_auroc(directory)
            if oracle is not None:
                one["gap"] = oracle - one["auroc"]
    behind = {
        key: table.median(*key, "gap")
        for key in table.runs
        if (table.median(*key, "gap") or 0) > TARGET
    }
    table.notes += ["", *_notes(oracle, behind)]
    table.print()
    print(f"written to {table.write(oracle=oracle, target=TARGET, flags=flags)}")
    return 1 if table.failed else 0


def _notes(oracle: float | None, behind: dict[tuple[str, str], float]) -> list[str]:
    if oracle is None:
        return []
    found = [f"{' '.join(key)}: {gap:.4f} below" for key, gap in behind.items()]
    return [f"oracle {oracle:.5f}; more than {TARGET} below it: {'; '.join(found) or 'none'}"]


if __name__ == "__main__":
    sys.exit(main())
