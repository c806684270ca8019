"""Find what an id of a saved workflow stands for, without NVTabular."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID, PADDING_ID
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.workflows.description import inspect


def meaning_of(path: Path | str, column: str, number: int) -> str:
    """Return what an id of a column stands for: a value as in a raw log, or what it says in words.

    Raises:
        BadInputError: There is no saved workflow, or it is damaged.
        SettingsError: There is no such column, or its table has no such id.
    """
    description = inspect(path)
    spec = next((c for c in description.spec.categorical if c.name == column), None)
    if spec is None:
        raise SettingsError(
            f"the workflow has no categorical column {column!r}",
            f"one of {', '.join(description.spec.categorical_names)}",
        )
    size = description.vocabularies[column].table_size
    if not 0 <= number < size:
        raise SettingsError(f"column {column} has no id {number}", f"its ids are 0 to {size - 1}")
    if number == PADDING_ID:
        return "padding, which no value has"
    if number == NULL_ID:
        return "missing"
    if number < spec.reserved_ids:
        buckets = spec.hash_buckets or spec.num_buckets
        hashed = f"hash bucket {number - FIRST_OOV_ID} of {buckets}" if buckets else ""
        return ", ".join(filter(None, ["" if spec.hash_buckets else "out of vocabulary", hashed]))
    values, _ = description.read_values(spec)
    return RAW_TYPES[spec.raw].log_text(values[number - spec.reserved_ids].as_py())


@dataclasses.dataclass(frozen=True)
class SavedWorkflow(Settings):
    """The workflow to look into."""

    workflow: Path = flag("directory of the workflow", metavar="OUT/workflow", positional=True)


@dataclasses.dataclass(frozen=True)
class LookupSettings(Settings):
    """What to look up."""

    column: str = flag("name of a categorical column", metavar="COLUMN", positional=True)
    id: int = flag("print the value that this id has", metavar="ID", positional=True)


SETTINGS = (SavedWorkflow, LookupSettings)


def run(saved: SavedWorkflow, settings: LookupSettings) -> None:
    """Print what an id stands for."""
    inspect(saved.workflow).verify()
    meaning = meaning_of(saved.workflow, settings.column, settings.id)
    print(f"{settings.column} {settings.id}: {meaning}")
