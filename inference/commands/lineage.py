"""``python -m inference lineage``: where a bundle comes from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.inference.commands.model import prepare

if TYPE_CHECKING:
    from nvt_torchrec.inference.lineage import Lineage

DESCRIPTION = (
    "Prints where a bundle comes from: checkpoint, generation of the workflow, days, settings and "
    "versions. What the flags name is verified; the rest is listed as not verified."
)


@dataclasses.dataclass(frozen=True)
class LineageSettings(Settings):
    """The bundle, and what to compare it with."""

    # fmt: off
    bundle: Path = flag(
        "directory made by `python -m inference bundle`", metavar="BUNDLE", positional=True
    )
    checkpoint: Path | None = flag("the checkpoint it was made from", None, metavar="CKPT")
    workflow: Path | None = flag(
        "the workflow it was made from, which may have been extended since (default: that of "
        "--output_path)", None, metavar="OUT/workflow"
    )
    output_path: Path | None = flag(
        "output of `python -m etl`, whose manifest lists the raw files of each day (default: the "
        "one that --workflow lies in)", None, metavar="OUT"
    )
    json: bool = flag("print JSON", False)
    # fmt: on


SETTINGS = (LineageSettings,)


def run(settings: LineageSettings) -> None:
    """Print the lineage.

    Raises:
        SchemaError: Something was compared and differs.
    """
    prepare()
    from nvt_torchrec.inference.lineage import read_lineage

    lineage = read_lineage(
        settings.bundle, settings.checkpoint, settings.workflow, settings.output_path
    )
    print(json.dumps(dataclasses.asdict(lineage), indent=2) if settings.json else _text(lineage))
    if lineage.wrong:
        raise SchemaError(
            f"{settings.bundle} does not come from what it claims, or was damaged:\n  "
            + "\n  ".join(lineage.wrong),
            "pass the checkpoint, workflow and output that it was made from, or copy the damaged "
            "files again",
        )


def _text(lineage: Lineage) -> str:
    bundle, workflow = lineage.bundle, lineage.workflow
    size = f"{bundle['bytes'] / 2**20:.1f} MiB"
    lines = [
        f"bundle      {bundle['path']}: {bundle['digest'][:12]}, {bundle['tables']}, {size}",
        f"checkpoint  {_checkpoint(lineage.checkpoint)}",
        f"workflow    {workflow['digest'][:12]}, {_generation(workflow['generation'])}",
    ]
    before = 0
    for generation in workflow["generations"]:
        values, reused = sum(generation["values"].values()), sum(generation["reused"].values())
        lines.append(
            f"  generation {generation['number']:<4} {generation['digest'][:12]}  "
            f"days {_days(generation['days'])}, {values - before:,} new values"
            + (f", {reused:,} ids reused" if reused else "")
        )
        before = values
    lines.append("days" if lineage.days else "days        not recorded")
    for day in lineage.days:
        trained = {None: "", True: ", trained on", False: ", not trained on"}[day["trained"]]
        lines.append(f"  day {day['day']:<4} {_generation(day['generation'])}{trained}")
        for file in day["files"]:
            then = {"rows": (file["rows"] or {}).get("in"), **file["fingerprint"]}
            lines.append(f"    {file['path']}: {_pairs(then)}")
    versions = {"workflow": workflow["versions"]}
    if lineage.checkpoint is not None:
        checkpoint = lineage.checkpoint["checkpoint"]
        lines += _wrap("settings", _pairs(checkpoint["settings"]))
        versions |= {"checkpoint": checkpoint["versions"], "bundle": lineage.checkpoint["versions"]}
    for index, (name, packages) in enumerate(versions.items()):
        lines += _wrap("" if index else "versions", f"{name}: {_pairs(packages)}")
    for title, texts in (("verified", lineage.verified), ("not verified", lineage.unverified)):
        lines += [title, *(f"  {text}" for text in texts or ["nothing"])]
    return "\n".join(lines)


def _checkpoint(origin: dict[str, Any] | None) -> str:
    if origin is None:
        return "not recorded"
    record = origin["checkpoint"]
    days = "days not recorded" if record["days"] is None else f"days {_days(record['days'])}"
    steps, samples = (
        "unknown" if record[name] is None else f"{record[name]:,}" for name in ("steps", "samples")
    )
    before = record["continued_from"]
    return (
        f"{record['digest'][:12]}, {steps} steps, {samples} samples, "
        f"{_generation(record['generation'])}, {days}"
        + (f", continued from {before[:12]}" if before else "")
    )


def _generation(number: int | None) -> str:
    return "no generation" if number is None else f"generation {number}"


def _days(days: list[int]) -> str:
    """``[0, 1, 2, 5]`` → ``"0-2,5"``, as flags take them."""
    runs = itertools.groupby(enumerate(days), lambda pair: pair[1] - pair[0])
    ends = ([day for _, day in run] for _, run in runs)
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in ends)


def _pairs(values: dict[str, Any]) -> str:
    """Format names and values; leave out what was not set."""
    given = (f"{name} {value}" for name, value in values.items() if value is not None)
    return ", ".join(given) or "none"


def _wrap(name: str, text: str) -> list[str]:
    return textwrap.wrap(text, 100, initial_indent=f"{name:12}", subsequent_indent=" " * 12)
