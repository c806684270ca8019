"""The stages of the benchmark: each command is measured, recorded, and not repeated."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.harness import ROOT
from benchmarks.process import run
from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.base.files.journal import Journal

log = logging.getLogger("benchmarks")


class StageFailedError(ClickLogError):
    """A command of the benchmark failed; its own message names the error."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a command took.

    Attributes:
        wall_s: Seconds from its start to its end.
        cpu_s: CPU seconds of all its processes.
        peak_rss_mb: The most memory that they held at one moment, MB.
    """

    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_rss_mb: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.wall_s + other.wall_s,
            self.cpu_s + other.cpu_s,
            max(self.peak_rss_mb, other.peak_rss_mb),
        )


class Stages:
    """Runs commands and functions once; a benchmark that was interrupted goes on after the last.

    Attributes:
        continued: Whether an interrupted benchmark is being continued.
    """

    def __init__(self, journal: Journal, bar: tqdm) -> None:
        self._journal, self._bar = journal, bar
        self._finished = journal.finished(dict[str, Any])
        self.continued = bool(self._finished)

    def command(
        self,
        name: str,
        command: Sequence[str | os.PathLike | int],
        *,
        before: Callable[[], object] = lambda: None,
    ) -> Cost:
        """Run a Python program, unless it is recorded as finished; return what it took.

        Args:
            name: The name of the stage, for example ``refit/day 14/train``.
            command: A script, or ``-m`` and a module; then the arguments.
            before: Is called before it: deletes what an interrupted run of it left.

        Raises:
            StageFailedError: It ended with another exit status than 0.
        """
        if name in self._finished:
            self._bar.update()
            return Cost(**self._finished[name])
        self._bar.set_description(name)
        before()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        program = [sys.executable, *map(str, command)]
        done = run(program, env={"PATH": path}, cwd=ROOT, result=dict)
        if done.error:
            raise StageFailedError(
                f"{name}: {done.error}", f"see: python {' '.join(map(str, command))}"
            )
        cost = Cost(round(done.wall_s, 3), round(done.cpu_s, 3), round(done.peak_rss_mb, 1))
        log.info("%-24s %6.1f s  %6.1f CPU s", name, cost.wall_s, cost.cpu_s)
        self._record(name, dataclasses.asdict(cost))
        return cost

    def call(self, name: str, function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of a function, JSON-ready; call it unless its result is recorded."""
        if name not in self._finished:
            self._bar.set_description(name)
            self._record(name, function())
            return self._finished[name]
        self._bar.update()
        return self._finished[name]

    def _record(self, name: str, record: dict[str, Any]) -> None:
        self._journal.add({name: record})
        self._finished[name] = record
        self._bar.update()
