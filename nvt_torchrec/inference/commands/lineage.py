"""``python -m inference lineage``: where a bundle comes from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SchemaError
from nvt_torchrec.inference.commands.model import prepare

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
        "the workflow it was made from, which may have been extended since", None,
        metavar="OUT/workflow"
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
    from nvt_torchrec.inference.lineage import read_lineage, text_of

    lineage = read_lineage(settings.bundle, settings.checkpoint, settings.workflow)
    text = json.dumps(dataclasses.asdict(lineage), indent=2) if settings.json else text_of(lineage)
    print(text)
    if lineage.wrong:
        raise SchemaError(
            f"{settings.bundle} does not come from what it claims, or was damaged:\n  "
            + "\n  ".join(lineage.wrong),
            "pass the checkpoint and workflow that it was made from, or copy the damaged files "
            "again",
        )
