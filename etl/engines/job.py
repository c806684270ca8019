"""What engines work for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from nvt_torchrec.formats.spec.feature_spec import FeatureSpec

#: Is called with the number of rows done since the last call.
Report: TypeAlias = Callable[[float], object]


@dataclasses.dataclass(frozen=True)
class Job:
    """What an engine works for: a run, or the extension by a day.

    Attributes:
        spec: The columns.
        work: The directory of its state, for counts, parts and records; all workers see it.
        reject: Whether malformed rows are left out, or how many of a block at most.
        workers: The number of threads, for the engine that uses threads.
        strict_gpu: Whether it is an error that a card does not do what the host does.
    """

    spec: FeatureSpec
    work: Path
    reject: bool | int = False
    workers: int = 1
    strict_gpu: bool = False
