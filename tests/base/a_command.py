"""A command for the tests."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.command_line import Settings, flag


@dataclasses.dataclass(frozen=True)
class CommandSettings(Settings):
    """What the command is told."""

    times: int = flag("the exit status", 0)


DESCRIPTION = __doc__
SETTINGS = (CommandSettings,)


def run(settings: CommandSettings) -> int:
    """Return what was asked for."""
    return settings.times
