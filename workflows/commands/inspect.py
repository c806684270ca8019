"""``python -m workflows inspect``: describe a saved workflow."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag


@dataclasses.dataclass(frozen=True)
class SavedWorkflow(Settings):
    """The workflow to look into."""

    workflow: Path = flag("directory of the workflow", metavar="OUT/workflow", positional=True)
    skip_digests: bool = flag("do not verify the digests of the files first", False)

    def verify(self) -> None:
        """Compare all files with their digests, unless ``skip_digests`` is set."""
        if not self.skip_digests:
            from nvt_torchrec.workflows.description import inspect

            inspect(self.workflow).verify()


SETTINGS = (SavedWorkflow,)


def run(saved: SavedWorkflow) -> None:
    """Print operators, vocabularies, statistics and sizes."""
    from nvt_torchrec.workflows.report import report

    saved.verify()
    print(report(saved.workflow))
