"""Print the share of days without a shift that `python -m etl drift` flags.

    python -m benchmarks.drift --draws 1000

Prints, for several sizes of the new day, the share of days in which at least one measure is flagged
with the default thresholds; without thresholds, so that only the limits of chance hold; and if
thresholds alone decided, as in most tools. The first two must be below the stated rate.
"""

from __future__ import annotations

import nvt_torchrec.base.interrupts  # noqa: F401  # before all that takes time: Ctrl-C is one line now

# isort: split
import dataclasses
import sys

from benchmarks.drift.simulation import CHANCE_ALONE, Draw, draws
from nvt_torchrec.base.command_line import Parser, Settings, flag, parse
from nvt_torchrec.base.errors import run_command
from nvt_torchrec.etl.drift.artifact import Drift, ShareDrift
from nvt_torchrec.etl.drift.compare import count_tests
from nvt_torchrec.etl.drift.thresholds import Thresholds


@dataclasses.dataclass(frozen=True)
class SimulationSettings(Settings):
    """The settings of the simulation."""

    draws: int = flag("number of days of each size", 1000, least=1)
    rows: tuple[int, ...] = flag("rows of the new day", (200, 2000, 20_000, 200_000), least=1)
    train_rows: int = flag("training rows", 200_000, least=1000)
    seed: int = flag("seed of the draws", 0, least=0)


def main(argv: list[str] | None = None) -> int:
    """Print the table; exit status 1 if a share is above the stated rate."""
    return run_command(lambda: _run(*parse(Parser(description=__doc__), argv, SimulationSettings)))


def _run(settings: SimulationSettings) -> int:
    stated = Thresholds().false_alarm_rate
    print(f"{settings.draws} days without a shift, {settings.train_rows:,} training rows")
    print(f"{'rows':>9} {'measures':>9} {'flagged':>9} {'chance limit alone':>19} {'naive':>9}")
    worst = 0.0
    for rows in settings.rows:
        found = [0, 0, 0]
        tests = 0
        for draw in draws(settings.draws, settings.train_rows, rows, settings.seed):
            tests = count_tests(draw.baseline.description.spec)
            for i, flagged in enumerate(_outcomes(draw)):
                found[i] += flagged
        shares = [count / settings.draws for count in found]
        worst = max(worst, *shares[:2])
        print(f"{rows:>9,} {tests:>9} {shares[0]:>9.2%} {shares[1]:>19.2%} {shares[2]:>9.2%}")
    print(f"stated rate: {stated:.2%}")
    return int(worst > stated)


def _outcomes(draw: Draw) -> tuple[bool, bool, bool]:
    with_thresholds = draw.drift(Thresholds())
    by_chance = draw.drift(CHANCE_ALONE)
    return bool(with_thresholds.flags), bool(by_chance.flags), exceeds_a_threshold(with_thresholds)


def exceeds_a_threshold(drift: Drift) -> bool:
    """Return whether a day would be flagged if thresholds alone decided."""
    shares = [drift.label_rate, drift.malformed]
    for column in drift.columns:
        if column.psi.psi > column.psi.threshold:
            return True
        shares += [column.missing, column.unseen]
    return any(_exceeds(share) for share in shares if share is not None)


def _exceeds(share: ShareDrift) -> bool:
    return share.change is not None and abs(share.change) > share.threshold


if __name__ == "__main__":
    sys.exit(main())
