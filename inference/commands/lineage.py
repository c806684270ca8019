"""``python -m inference lineage``: where a bundle comes from."""

from __future__ import annotations

import dataclasses
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

    found = read_lineage(
        settings.bundle, settings.checkpoint, settings.workflow, settings.output_path
    )
    if settings.json:
        print(json.dumps(dataclasses.asdict(found), indent=2))
    else:
        print(_text(found))
    if found.wrong:
        raise SchemaError(
            f"{settings.bundle} does not come from what it claims, or was damaged:\n  "
            + "\n  ".join(found.wrong),
            "pass the checkpoint, workflow and output that it was made from, or copy the damaged "
            "files again",
        )


def _text(found: Lineage) -> str:
    bundle, workflow = found.bundle, found.workflow
    size = f"{bundle['bytes'] / 2**20:.1f} MiB"
    lines = [
        f"bundle      {bundle['path']}: {bundle['digest'][:12]}, {bundle['tables']}, {size}",
        f"checkpoint  {_checkpoint(found.checkpoint)}",
        f"workflow    {workflow['digest'][:12]}, {_generation(workflow['generation'])}",
    ]
    before: dict[str, int] = {}
    for one in workflow["generations"]:
        new = sum(one["values"].values()) - sum(before.values())
        reused = sum(one["reused"].values())
        lines.append(
            f"  generation {one['number']:<4} {one['digest'][:12]}  days {_days(one['days'])}, "
            f"{new:,} new values" + (f", {reused:,} ids reused" if reused else "")
        )
        before = one["values"]
    lines.append("days" if found.days else "days        not recorded")
    lines += [line for day in found.days for line in _day(day)]
    if found.checkpoint is not None:
        own = found.checkpoint["checkpoint"]
        lines += _wrap("settings", _pairs(own["settings"]))
        lines += _wrap("versions", f"checkpoint: {_pairs(own['versions'])}")
        lines += _wrap("", f"bundle: {_pairs(found.checkpoint['versions'])}")
    lines += _wrap(
        "" if found.checkpoint else "versions", f"workflow: {_pairs(workflow['versions'])}"
    )
    for title, texts in (("verified", found.verified), ("not verified", found.unverified)):
        lines += [title, *(f"  {text}" for text in texts or ["nothing"])]
    return "\n".join(lines)


def _checkpoint(origin: dict[str, Any] | None) -> str:
    if origin is None:
        return "not recorded"
    own = origin["checkpoint"]
    days = "days not recorded" if own["days"] is None else f"days {_days(own['days'])}"
    steps, samples = (
        "unknown" if own[name] is None else f"{own[name]:,}" for name in ("steps", "samples")
    )
    before = own["continued_from"]
    return (
        f"{own['digest'][:12]}, {steps} steps, {samples} samples, "
        f"{_generation(own['generation'])}, {days}"
        + (f", continued from {before[:12]}" if before else "")
    )


def _day(day: dict[str, Any]) -> list[str]:
    trained = {None: "", True: ", trained on", False: ", not trained on"}[day["trained"]]
    number = day["generation"]
    generation = "not counted" if number is None else _generation(number)
    lines = [f"  day {day['day']:<4} {generation}{trained}"]
    for file in day["files"]:
        then = {**file["fingerprint"]}
        size, rows = then.pop("size", None), (file["rows"] or {}).get("in")
        marks = "".join(f", {name} {value}" for name, value in then.items())
        lines.append(f"    {file['path']}: {size} bytes, {rows} rows{marks}")
    return lines


def _generation(number: int | None) -> str:
    return "generation not recorded" if number is None else f"generation {number}"


def _days(days: list[int]) -> str:
    """``[0, 1, 2, 5]`` → ``"0-2,5"``, as flags take them."""
    parts: list[list[int]] = []
    for day in days:
        if parts and day == parts[-1][1] + 1:
            parts[-1][1] = day
        else:
            parts.append([day, day])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts) or "none"


def _pairs(values: dict[str, Any]) -> str:
    """Format names and values; leave out what was not set."""
    given = (f"{name} {_value(value)}" for name, value in values.items() if value is not None)
    return ", ".join(given) or "none"


def _value(value: Any) -> Any:
    """Shorten a list of equal items, as a setting of each column by default is."""
    if isinstance(value, list) and len(value) > 5 and len(set(map(str, value))) == 1:
        return f"{len(value)} times {value[0]}"
    return value


def _wrap(name: str, text: str) -> list[str]:
    indent = " " * 12
    return textwrap.wrap(text, 100, initial_indent=f"{name:12}", subsequent_indent=indent)
