"""Train one epoch at the default learning rates and print how far the AUROC is below the oracle's.

Every optimizer, at every global batch, with every model, on one synthetic log whose oracle (the
click model it was drawn from) gives the best AUROC there is. Everything after -- goes to
train_torchrec.py.

    python -m benchmarks.convergence --optimizers rowwise_adagrad --global_batches 2048,16384
"""

from __future__ import annotations

import clicklog.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import argparse
import itertools
import shutil
import sys

from benchmarks.harness import Metric, Table, start_logging
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
from clicklog.errors import SettingsError, run_command

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


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a run failed."""
    own, flags = split_flags(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--optimizers", default=",".join(OPTIMIZERS), help="comma separated (default: all)")
    add("--global_batches", default="256,2048,16384,65536", help="(default: %(default)s)")
    add("--models", default=",".join(MODELS), help="comma separated (default: all)")
    add("--ranks", type=int, default=1, help="processes of each run (default: 1)")
    add("--rows_per_day", type=int, default=1_000_000, help="4 days are trained (default: 1 M)")
    args = parser.parse_args(own)
    start_logging()
    return run_command(lambda: _run(args, flags))


def _run(args: argparse.Namespace, flags: list[str]) -> int:
    optimizers = _names("--optimizers", args.optimizers, OPTIMIZERS)
    models = _names("--models", args.models, tuple(MODELS))
    refuse(flags, ("--binary_path", "--optimizer", "--adagrad", "--batch_size", "--log_path"))
    split = make_data(args.rows_per_day)
    logs = BUILD / "convergence"
    shutil.rmtree(logs, ignore_errors=True)
    metrics = (METRICS[0], Metric("gap", "below oracle", ".5f"), *METRICS[1:])
    title = f"Test AUROC after one epoch of {4 * args.rows_per_day:,} rows, {args.ranks} ranks"
    table = Table("convergence", title, metrics, base="")
    systems, oracle = [], None
    for model, batch, optimizer in itertools.product(models, _batches(args), optimizers):
        case = f"{model}, B={batch}"
        own = [
            *("--binary_path", str(split), "--optimizer", optimizer),
            *("--batch_size", str(batch // args.ranks), *MODELS[model], *flags),
        ]
        directory = logs / f"{model}-{batch}-{optimizer}"
        systems.append((training_run(optimizer, case, own, directory, args.ranks), directory))
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


def _names(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise SettingsError(f"{flag} {name}", f"one of {', '.join(known)}")
    return names


def _batches(args: argparse.Namespace) -> list[int]:
    try:
        sizes = [int(part) for part in args.global_batches.split(",")]
    except ValueError:
        raise SettingsError(
            f"--global_batches {args.global_batches}", "numbers, by commas"
        ) from None
    for size in sizes:
        if size < 1 or size % args.ranks:
            raise SettingsError(
                f"--global_batches {size} with --ranks {args.ranks}", "give multiples of the ranks"
            )
    return sizes


if __name__ == "__main__":
    sys.exit(main())
