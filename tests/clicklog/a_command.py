"""A command for the tests."""

from __future__ import annotations

import dataclasses

from clicklog.command_line import flag


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command is told."""

    times: int = flag("the exit status", 0)


SETTINGS = (Settings,)


def run(settings: Settings) -> int:
    """Return what was asked for."""
    return settings.times
