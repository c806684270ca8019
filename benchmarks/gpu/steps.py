"""The steps of the benchmark, most valuable first: what each runs, needs, and may take."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Iterator, Sequence

from benchmarks.gpu.worker import GpuSettings
from benchmarks.harness import ROOT
from nvt_torchrec.base.command_line import as_text
from nvt_torchrec.base.errors import SettingsError


@dataclasses.dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        name: Unique; its file of output is named after it.
        command: The arguments of ``python -m``.
        seconds: The limit.
        rapids: Whether it cannot run without cuDF.
        part: Whether it is a part of :mod:`benchmarks.gpu.worker`, which prints results.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    rapids: bool = False
    part: bool = False


def all_steps(settings: GpuSettings) -> list[Step]:
    """Return the steps, in their order."""
    small, large = min(settings.batch_sizes), max(settings.batch_sizes)

    def part(name: str, function: str, seconds: float, **needs: bool) -> Step:
        return Step(name, part_command(function, settings), seconds, part=True, **needs)

    def training(way: str, size: int, seconds: float = 120) -> Step:
        command = part_command("training:training", settings, way=way, batch_sizes=(size,))
        return Step(f"training/{way}/B={size}", command, seconds, part=True)

    def engine(name: str) -> Step:
        command = part_command("etl:engine_run", settings, way=name)
        return Step(f"engine/{name}", command, 240, part=True)

    return [
        Step("doctor", ("etl", "doctor"), 90),
        *_tests(),
        part("copies", "etl:copies", 60),
        part("data", "data:make_all", 600),
        part("stages", "etl:stages", 90, rapids=True),
        training("bf16", large),
        training("bf16", small),
        training("bf16 compiled", small, 240),
        training("tf32", large),
        training("fp32", large),
        part("loader", "training:loaders", 120),
        training("bf16 fp16 tables", large),
        engine("cpu"),
        engine("dask"),
    ]


def part_command(function: str, settings: GpuSettings, **changes: object) -> tuple[str, ...]:
    """Return the arguments of ``python -m`` that run a part with the settings."""
    fields = dataclasses.fields(GpuSettings)
    values = {field.name: getattr(settings, field.name) for field in fields}
    values |= {"model": " ".join(settings.model), **changes}
    given = [
        f"--{key}={as_text(value)}" for key, value in values.items() if value not in (None, (), "")
    ]
    return ("benchmarks.gpu.worker", function, *given)


def _tests() -> Iterator[Step]:
    """Yield a process for each file with tests for a GPU: what they find wrong comes first."""
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
        SettingsError: The patterns name no step.
    """
    matching = [step for step in steps if any(fnmatch.fnmatch(step.name, p) for p in patterns)]
    if patterns and not matching:
        names = ", ".join(step.name for step in steps)
        raise SettingsError(f"--only {','.join(patterns)}: no such step", f"one of {names}")
    return matching if patterns else list(steps)
