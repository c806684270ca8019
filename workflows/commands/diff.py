"""``python -m workflows diff``: what a later generation added to a workflow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag


@dataclasses.dataclass(frozen=True)
class DiffSettings(Settings):
    """The two workflows to compare."""

    before: Path = flag("directory of a workflow", metavar="A", positional=True)
    after: Path = flag(
        "directory of a workflow that was made by extending A", metavar="B", positional=True
    )
    examples: int = flag("values to show of each vocabulary", 3, least=0)
    skip_digests: bool = flag("do not verify the digests of the files first", False)


SETTINGS = (DiffSettings,)


def run(settings: DiffSettings) -> None:
    """Print the values added, the ids reused and the statistics changed."""
    from nvt_torchrec.workflows.description import inspect
    from nvt_torchrec.workflows.difference import difference

    if not settings.skip_digests:
        for path in (settings.before, settings.after):
            inspect(path).verify()
    print(difference(settings.before, settings.after, settings.examples))
