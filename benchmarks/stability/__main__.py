"""Train with several seeds and print mean, spread and the worst AUROC of the test set.

Everything after -- goes to train_torchrec.py; without --binary_path there, a synthetic log is made
and run through the ETL first, whose oracle is printed too. The seed is that of the initial weights
and of the order of the rows.

    python -m benchmarks.stability --seeds 16 -- --binary_path OUT/criteo_binary/split --adagrad
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import functools
import logging
import shutil
import statistics
import sys
from typing import Any

from benchmarks.harness import Table, run_benchmark
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

log = logging.getLogger("benchmarks")

#: Used unless train_torchrec.py's flags are given: the demo's model.
_FLAGS = [
    *("--batch_size", "1024", "--adagrad", *SMALL_MODEL, "--shuffle_training_set"),
]
_CASE = ""


@dataclasses.dataclass(frozen=True)
class StabilitySettings(Settings):
    """The settings of the benchmark."""

    seeds: int = flag("number of seeds, from 0 on; a spread needs two or more", 16, least=2)
    ranks: int = flag("processes of each run", 1, least=1)
    rows_per_day: int = flag("rows of each of the 5 days of the synthetic log", 40_000, least=1)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; exit status 1 if a run failed."""
    own, flags = split_flags(sys.argv[1:] if argv is None else argv)
    work = functools.partial(_run, flags=flags)
    return run_benchmark("stability", __doc__, StabilitySettings, work, own)


def _run(settings: StabilitySettings, flags: list[str]) -> int:
    refuse(flags, ("--seed", "--log_path"))
    if not any(flag.split("=")[0] == "--binary_path" for flag in flags):
        flags = [*(flags or _FLAGS), "--binary_path", str(make_data(settings.rows_per_day))]
    logs = BUILD / "stability"
    shutil.rmtree(logs, ignore_errors=True)
    table = Table("stability", "Test AUROC by seed", METRICS, base="")
    runs = [
        training_run(
            _name(seed), _CASE, [*flags, "--seed", str(seed)], logs / str(seed), settings.ranks
        )
        for seed in range(settings.seeds)
    ]
    table.measure(runs, repeats=1)
    found = [
        value
        for seed in range(settings.seeds)
        for value in table.values(_name(seed), _CASE, "auroc")
    ]
    summary: dict[str, Any] = {}
    if len(found) > 1:
        summary = {
            "seeds": len(found),
            "mean": statistics.mean(found),
            "standard_deviation": statistics.stdev(found),
            "worst": min(found),
            "best": max(found),
            "oracle": oracle_auroc(logs / "0"),
        }
        table.notes += ["", _text(summary)]
    table.print()
    print(f"written to {table.write(summary=summary, flags=flags)}")
    return 1 if table.failed else 0


def _text(summary: dict[str, Any]) -> str:
    text = (
        f"test AUROC over {summary['seeds']} seeds: mean {summary['mean']:.5f}, standard deviation "
        f"{summary['standard_deviation']:.5f}, worst {summary['worst']:.5f}, best "
        f"{summary['best']:.5f}"
    )
    return text + (f"; oracle {summary['oracle']:.5f}" if summary["oracle"] else "")


def _name(seed: int) -> str:
    return f"seed {seed}"


if __name__ == "__main__":
    sys.exit(main())
