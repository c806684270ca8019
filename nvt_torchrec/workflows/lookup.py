"""Find what an id of a saved workflow stands for, and which id a value has; without NVTabular."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from nvt_torchrec.base.arrays import strings, to_arrow
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.feature_spec.columns import FIRST_OOV_ID, NULL_ID, PADDING_ID
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect


def meaning_of(path: Path | str, column: str, number: int) -> str:
    """Return what an id of a column stands for: a value as in a raw log, or what it says in words.

    Raises:
        BadInputError: There is no saved workflow, or it is damaged.
        SettingsError: There is no such column, or its table has no such id.
    """
    description, spec = _opened(path, column)
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


def id_of(path: Path | str, column: str, text: str) -> int:
    """Return the id of a value.

    Args:
        path: The workflow's directory.
        column: Name of a categorical column.
        text: The value as in a raw log; "" is a missing value.

    Raises:
        BadInputError: There is no saved workflow, or it is damaged.
        SettingsError: There is no such column, the text is not a value of it, or the value has no
            id because a missing list is an empty list.
    """
    description, spec = _opened(path, column)
    if not text:
        if spec.multi_hot:
            raise SettingsError(
                f"column {column} holds lists: a missing list is an empty list and has no id",
                "pass a value of a list",
            )
        return NULL_ID
    try:
        value = RAW_TYPES[spec.raw].from_log_text(text)
    except ValueError as error:
        raise SettingsError(f"column {column}: {text!r}: {error}") from None
    alone = strings([value]) if isinstance(value, str) else to_arrow(np.array([value]))
    if not spec.hash_buckets:
        row = pc.index(description.read_values(spec)[0], alone[0]).as_py()
        if row >= 0:
            return spec.reserved_ids + row
    from nvt_torchrec.base.hashing import murmur3_int, murmur3_string  # imports Numba

    hashed = murmur3_string(alone) if isinstance(value, str) else murmur3_int(np.array([value]))
    return FIRST_OOV_ID + int(hashed[0]) % spec.oov_ids


def _opened(path: Path | str, name: str) -> tuple[WorkflowDescription, CategoricalColumn]:
    description = inspect(path)
    for column in description.spec.categorical:
        if column.name == name:
            return description, column
    raise SettingsError(
        f"the workflow has no categorical column {name!r}",
        f"one of {', '.join(description.spec.categorical_names)}",
    )


@dataclasses.dataclass(frozen=True)
class SavedWorkflow(Settings):
    """The workflow to look into."""

    workflow: Path = flag("directory of the workflow", metavar="OUT/workflow", positional=True)


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
    inspect(saved.workflow).verify()
    number = settings.id
    if number is None:
        assert settings.value is not None
        number = id_of(saved.workflow, settings.column, settings.value)
    print(f"{settings.column} {number}: {meaning_of(saved.workflow, settings.column, number)}")
