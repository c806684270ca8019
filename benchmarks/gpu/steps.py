"""The steps of the benchmark, most valuable first: what each runs, needs, and may take.

A card is often lent for minutes. So every step is a process of its own with a time limit of its
own, and what comes first tells most: a crash, or an error after which the process's CUDA context
is unusable, costs one step.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.base.errors import SettingsError

if TYPE_CHECKING:
    from benchmarks.gpu.worker import GpuSettings

ROOT = Path(__file__).parents[2]
#: What makes a training step faster, alone and left out; ``training.WAYS`` explains the names.
SINGLE = (
    *("bf16 plain + kernel", "bf16 plain + padding", "bf16 plain + bf16 lookups"),
    *("bf16 plain + int32 ids", "bf16 plain + no bounds check"),
    *("bf16 without kernel", "bf16 without padding", "bf16 without bf16 lookups"),
)
LOG, PARQUET = "log", "parquet"


@dataclasses.dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        name: Unique; its file of output is named after it.
        command: The arguments of ``python -m``.
        seconds: The limit.
        data: :data:`LOG` or :data:`PARQUET`, what it reads.
        rapids: Whether it cannot run without cuDF.
        part: Whether it is a part of :mod:`benchmarks.gpu.worker`, which writes results.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    data: str = ""
    rapids: bool = False
    part: bool = False


def all_steps(settings: GpuSettings) -> list[Step]:
    """Return the steps, in their order.

    The data of a step are made while those before it run; see :mod:`benchmarks.gpu.runner`.
    """
    small, large = min(settings.batch_sizes), max(settings.batch_sizes)
    return [
        Step("doctor", ("etl", "doctor"), 90),
        _part("smoke/dlpack", settings, 60, rapids=True),
        _part("smoke/card", settings, 120, rapids=True),
        _part("smoke/fbgemm", settings, 60),
        _part("smoke/interaction", settings, 60),
        _part("smoke/encode", settings, 90, rapids=True),
        _part("smoke/cluster", settings, 120),
        _part("copies", settings, 60),
        _part("block", settings, 90, LOG),
        _part("stages", settings, 90, LOG, rapids=True),
        _part("vocabulary", settings, 120),
        _training("bf16", large, settings),
        _training("bf16", small, settings),
        _training("bf16 graphs", small, settings),
        _training("bf16 compiled graphs", small, settings),
        _training("tf32", large, settings),
        _training("fp32", large, settings),
        _part("loader", settings, 120, PARQUET, batch_sizes=(large,)),
        _training("bf16 plain", large, settings),
        _training("bf16 fp16 tables", large, settings),
        _part("engine/cpu", settings, 240, LOG),
        _part("engine/dask", settings, 240, LOG),
        _part("scoring", settings, 120, LOG),
        *_tests(),
        *(_training(way, large, settings) for way in SINGLE),
        _part("profile", settings, 180, PARQUET, batch_sizes=(large,)),
    ]


def _part(
    name: str,
    settings: GpuSettings,
    seconds: float,
    data: str = "",
    *,
    part: str = "",
    rapids: bool = False,
    **changes: object,
) -> Step:
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    values |= {"model": " ".join(settings.model), **changes}
    given = [
        f"--{key}={as_text(value)}" for key, value in values.items() if value not in (None, ())
    ]
    command = ("benchmarks.gpu.worker", part or name, *given)
    return Step(name, command, seconds, data, rapids, part=True)


def _training(way: str, size: int, settings: GpuSettings) -> Step:
    seconds = 240 if "compiled" in way else 120
    changes = {"ways": way, "batch_sizes": (size,)}
    name = f"training/{way}/B={size}"
    return _part(name, settings, seconds, PARQUET, part="training", **changes)


def _tests() -> Iterator[Step]:
    """A process for each file with tests for a GPU."""
    files = [*(ROOT / "tests" / "gpu").glob("test_*.py"), ROOT / "tests/nvt_loader/test_gpu.py"]
    for file in sorted(files):
        path = str(file.relative_to(ROOT))
        yield Step(f"tests/{path}", ("pytest", "-q", "-m", "gpu", "-rs", path), 240)


def chosen(steps: Sequence[Step], patterns: Sequence[str]) -> list[Step]:
    """Return the steps that one of the patterns names, in their order.

    Args:
        steps: All steps.
        patterns: Shell patterns, for example ``training/*``; empty for all steps.

    Raises:
        SettingsError: A pattern names no step.
    """
    found: set[str] = set()
    names = [step.name for step in steps]
    for pattern in patterns:
        matching = set(fnmatch.filter(names, pattern))
        if not matching:
            raise SettingsError(f"--only {pattern}: no such step", f"one of {', '.join(names)}")
        found |= matching
    return [step for step in steps if not patterns or step.name in found]
