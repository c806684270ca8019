"""``python -m inference lineage``: show where a bundle comes from."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.inference.commands.model import prepare

DESCRIPTION = (
    "Verifies the files of a bundle, and prints where it comes from: checkpoint, generation of the "
    "workflow, days. The settings of the training run and the versions of packages are in its "
    "bundle.json."
)


@dataclasses.dataclass(frozen=True)
class LineageSettings(Settings):
    """The bundle."""

    bundle: Path = flag(
        "directory made by `python -m inference bundle`", metavar="BUNDLE", positional=True
    )


SETTINGS = (LineageSettings,)


def run(settings: LineageSettings) -> None:
    """Print the lineage."""
    prepare()
    print(read_lineage(settings.bundle))


def read_lineage(bundle: Path) -> str:
    """Verify the files of a bundle; describe where it comes from.

    Raises:
        BadInputError: The bundle is missing, or a file is missing or damaged.
        SchemaError: The bundle has an unsupported version.
    """
    from nvt_torchrec.formats.day_names import format_days
    from nvt_torchrec.inference.model.bundle import (
        WORKFLOW,
        compute_bundle_digest,
        make_bundle_name,
        read_description,
    )
    from nvt_torchrec.workflows.description import inspect
    from nvt_torchrec.workflows.inspection import format_generations

    description = read_description(bundle, check=True)
    workflow = inspect(bundle / WORKFLOW)
    record = description.origin.checkpoint
    size = sum(file.bytes for file in description.files.values())
    checkpoint = (
        f"{record.digest[:12]}, {record.steps} steps, {record.samples} samples, "
        f"generation {record.generation}, days {format_days(record.days or ())}"
    )
    if record.continued_from:
        checkpoint += f", continued from {record.continued_from[:12]}"
    name = make_bundle_name(compute_bundle_digest(bundle))
    return (
        f"bundle      {bundle}: {name}, {description.tables}, "
        f"{size / 2**20:.1f} MiB, predicts {', '.join(description.model.labels)}\n"
        f"checkpoint  {checkpoint}\n"
        f"workflow    {workflow.digest[:12]}, generation {workflow.generation}\n"
        f"{format_generations(workflow)}"
    )
