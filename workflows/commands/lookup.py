"""``python -m workflows lookup``: translate between ids and values of a column."""

from __future__ import annotations

import dataclasses

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.workflows.commands.inspect import SavedWorkflow


@dataclasses.dataclass(frozen=True)
class LookupSettings(Settings):
    """What to look up.

    Raises:
        SettingsError: Neither an id nor a value is given, or both are.
    """

    column: str = flag("name of a categorical column", metavar="COLUMN", positional=True)
    id: int | None = flag("print the value that this id has", None, metavar="ID", positional=True)
    value: str | None = flag(
        'print the id that this value has; as in the raw log, e.g. 0a1b2c3d; "" is a missing value',
        None,
        metavar="VALUE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.id is None) == (self.value is None):
            raise SettingsError("neither ID nor --value, or both", "give one of them")


SETTINGS = (SavedWorkflow, LookupSettings)


def run(saved: SavedWorkflow, settings: LookupSettings) -> None:
    """Print what an id stands for, or which id a value has."""
    from nvt_torchrec.workflows.lookup import id_of, meaning_of
    from nvt_torchrec.workflows.report import describe_meaning

    saved.verify()
    meaning = (
        meaning_of(saved.workflow, settings.column, settings.id)
        if settings.id is not None
        else id_of(saved.workflow, settings.column, settings.value)
    )
    print(describe_meaning(saved.workflow, settings.column, meaning))
