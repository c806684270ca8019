"""The flags that name a saved workflow, for all subcommands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from clicklog.command_line import flag


@dataclasses.dataclass(frozen=True)
class SavedWorkflow:
    """The workflow, and whether to verify it."""

    workflow: Path = flag("directory of the workflow", metavar="OUT/workflow", positional=True)
    skip_digests: bool = flag(
        "do not read all files first to compare them with their digests", False
    )

    def verify(self) -> None:
        """Compare all files with their digests, unless ``skip_digests`` is set.

        Raises:
            BadInputError: A file is missing or damaged.
        """
        if not self.skip_digests:
            from workflows.description import inspect, verify

            verify(self.workflow, inspect(self.workflow))
