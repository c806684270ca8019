"""Train one epoch in many ways and print how good the models are, beside the best there is.

Every optimizer, at every global batch, with every model, at the default learning rates, on one
synthetic log whose oracle (the click model it was drawn from) gives the best AUROC there is. With
--seeds 2 or more, each is trained with several seeds, of the initial weights and of the order of
the rows, and mean, spread and worst AUROC are printed. Everything after -- goes to
train_torchrec.py; with --binary_path there, the data are yours.

    python -m benchmarks.train quality --optimizers rowwise_adagrad --global_batches 2048,16384
    python -m benchmarks.train quality --seeds 16 --optimizers adagrad --global_batches 1024 \\
        --models default -- --binary_path OUT/criteo_binary/split
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.data import make_once
from benchmarks.harness import (
    ROOT,
    SMALL_MODEL,
    Metric,
    System,
    Table,
    run_benchmark,
    run_etl,
    split_flags,
)
from benchmarks.process import BUILD
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.dlrm.reporting.metrics_log import METRICS_FILE
from nvt_torchrec.dlrm.reporting.page import read_events

METRICS = (
    Metric("auroc", "AUROC", ".5f"),
    Metric("gap", "below oracle", ".5f"),
    Metric("log_loss", "log loss", ".5f"),
    Metric("valid_auroc", "valid", ".5f"),
    Metric("samples_per_s", "samples/s"),
    Metric("wall_s", "wall s", ".1f"),
)
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
class QualitySettings(Settings):
    """The settings of the benchmark."""

    optimizers: tuple[str, ...] = flag("optimizers", OPTIMIZERS, choices=OPTIMIZERS)
    global_batches: tuple[int, ...] = flag("global batches", (256, 2048, 16384, 65536), least=1)
    models: tuple[str, ...] = flag("models", tuple(MODELS), choices=tuple(MODELS))
    seeds: int = flag("number of seeds, from 0 on", 1, least=1)
    rows_per_day: int = flag("rows per day; 4 days are trained", 1_000_000, least=1)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return exit status 1 if a run failed."""
    arguments, flags = split_flags(argv)
    work = functools.partial(_run, flags=flags)
    return run_benchmark("train quality", __doc__, QualitySettings, work, arguments)


def _run(settings: QualitySettings, flags: list[str]) -> int:
    if not any(given.split("=")[0] == "--binary_path" for given in flags):
        flags = [*flags, "--binary_path", str(make_data(settings.rows_per_day))]
    if settings.seeds > 1:
        flags = [*flags, "--shuffle_training_set"]
    table = Table("quality", "Test AUROC after one epoch", METRICS, base="")
    groups: dict[str, list[System]] = {}
    for model, batch, optimizer, seed in itertools.product(
        settings.models, settings.global_batches, settings.optimizers, range(settings.seeds)
    ):
        case = f"{model}, B={batch}"
        given = ["--optimizer", optimizer, "--batch_size", str(batch)]
        given += [*MODELS[model], *flags, "--seed", str(seed)]
        group = groups.setdefault(f"{optimizer} {case}", [])
        case += f", seed {seed}" if settings.seeds > 1 else ""
        log_path = BUILD / "quality" / f"{optimizer} {case}"
        group.append(training_run(optimizer, case, given, log_path))
    table.measure(list(itertools.chain(*groups.values())), repeats=1)
    summary = {name: _summarize(table, systems) for name, systems in groups.items()}
    oracles = [output["oracle"] for key in table.runs for output in table.outputs(*key)]
    table.notes += ["", *_notes(summary, oracles[0] if oracles else None)]
    table.print()
    print(f"written to {table.write(summary=summary, target=TARGET, flags=flags)}")
    return 1 if table.failed else 0


def make_data(rows_per_day: int) -> Path:
    """Return the splits of a synthetic log of 5 days, which is made once per size."""
    root = BUILD / f"training-data-{rows_per_day}"
    raw, etl = root / "raw", root / "etl"

    def make() -> None:
        run_etl("synthesize", "--output_path", raw, "--days", 5, "--rows_per_day", rows_per_day)
        run_etl("run", "--input_path", raw, "--output_path", etl)

    make_once(root, f"a log of 5 x {rows_per_day} rows", make)
    return etl / "criteo_binary" / "split"


def training_run(
    optimizer: str, case: str, flags: Sequence[Any], log_path: Path, **more: float
) -> System:
    """Return a run of ``train_torchrec.py``, with the last metrics of its log, and ``more``."""
    return System(
        optimizer,
        case,
        [sys.executable, ROOT / "train_torchrec.py", *flags, "--log_path", log_path],
        before=lambda: shutil.rmtree(log_path, ignore_errors=True),
        result=lambda: {**_result(log_path), **more},
        timeout=24 * 3600,
    )


def _result(directory: Path) -> dict[str, Any]:
    events = read_events(directory / METRICS_FILE)
    last = {event["split"]: event for event in events if event["event"] == "evaluation"}
    end = next(event for event in events if event["event"] == "end")
    auroc = last["test"]["auroc"]
    oracle = ((events[0].get("oracle") or {}).get("test") or {}).get("auroc")
    return {
        **last["test"],
        "oracle": oracle,
        "gap": oracle - auroc if oracle else None,
        "valid_auroc": last["valid"]["auroc"],
        "samples_per_s": end["samples_per_s"],
    }


def _summarize(table: Table, systems: list[System]) -> dict[str, float]:
    """Return mean, spread, worst and best AUROC over the seeds; empty if all runs failed."""
    aurocs = [value for s in systems for value in table.values(s.name, s.case, "auroc")]
    if not aurocs:
        return {}
    return {
        "seeds": len(aurocs),
        "mean": statistics.mean(aurocs),
        "standard_deviation": statistics.stdev(aurocs) if len(aurocs) > 1 else 0.0,
        "worst": min(aurocs),
        "best": max(aurocs),
    }


def _notes(summary: dict[str, dict[str, float]], oracle: float | None) -> list[str]:
    notes, behind = [], []
    for name, values in summary.items():
        if values.get("seeds", 0) > 1:
            notes.append(
                f"{name}: test AUROC over {values['seeds']} seeds: mean {values['mean']:.5f}, "
                f"standard deviation {values['standard_deviation']:.5f}, worst "
                f"{values['worst']:.5f}, best {values['best']:.5f}"
            )
        if oracle and values and oracle - values["mean"] > TARGET:
            behind.append(f"{name}: {oracle - values['mean']:.4f} below")
    if oracle:
        notes.append(
            f"oracle {oracle:.5f}; more than {TARGET} below it: {'; '.join(behind) or 'none'}"
        )
    return notes
