"""Open a compiled workflow."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

from nvt_torchrec.base.errors import BadInputError, SchemaError
from nvt_torchrec.base.files.mapping import MappedArray
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.compiled import compiler, tables
from nvt_torchrec.workflows.compiled.compiled_workflow import CompiledWorkflow
from nvt_torchrec.workflows.compiled.dense import DensePlan
from nvt_torchrec.workflows.description import inspect
from nvt_torchrec.workflows.event_state import EventState
from nvt_torchrec.workflows.stored_tables import StoredTables
from nvt_torchrec.workflows.vector_stores import open_vectors

_AGAIN = "make it again with `python -m workflows compile {}`"


def load(
    path: Path | str, *, verify: bool = False, events: bool = True, vectors: bool = True
) -> CompiledWorkflow:
    """Open the compiled form of the workflow saved at ``path``.

    Tables are mapped, not read: opening takes milliseconds whatever their size, processes share
    them, and the first lookups bring in the pages they touch.

    Args:
        path: The workflow's directory.
        verify: Read the arrays, and compare their checksums with those they were built with.
            Without it, damaged arrays give wrong ids, but all of them are inside their column's
            table, and nothing is read outside of the arrays.
        events: Open what happened before, too; not while the ETL makes it.
        vectors: Open the vectors of a spec that has some, too; not for a model that takes none.

    Raises:
        BadInputError: There is no saved workflow, it is not compiled, or a file is missing or
            damaged.
        SchemaError: It was compiled from another workflow, or by another version of this program.
    """
    path = Path(path)
    description = inspect(path)
    plan = _read_plan(path, description)
    mapped = tuple(_open(path, name, plan.arrays, verify) for name in compiler.ARRAYS)
    words, text, text_begins = (array.values for array in mapped)
    try:
        places = _places(description, plan.tables, len(words), len(text_begins))
        dense = DensePlan(description.spec, description.statistics)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _damaged(path, path / compiler.DIRECTORY / compiler.PLAN_FILE, error) from error
    return CompiledWorkflow(
        spec=description.spec,
        schema=description.table_schema,
        digest=description.digest,
        path=path.resolve(),
        events=EventState.load(description, verify=verify)
        if events and description.spec.events
        else None,
        _dense=dense,
        _words=words,
        _text=text,
        _text_begins=text_begins,
        _places=places,
        _mapped=mapped,
        row_spec=description.spec,
        tables=StoredTables.open_beside(description, verify=verify),
        vectors=open_vectors(description, verify=verify) if vectors else None,
    )


def _read_plan(path: Path, description: WorkflowDescription) -> compiler.CompiledPlan:
    file = path / compiler.DIRECTORY / compiler.PLAN_FILE
    if not file.exists():
        raise BadInputError(f"{path}: the workflow is not compiled", _AGAIN.format(path))
    plan = compiler.FORMAT.read(compiler.CompiledPlan, file, _AGAIN.format(path))
    if plan.workflow_digest != description.digest:
        raise SchemaError(
            f"{file}: compiled from another workflow ({plan.workflow_digest[:12]}…) than the one "
            f"it lies beside ({description.digest[:12]}…)",
            _AGAIN.format(path),
        )
    return plan


def _open(
    path: Path, name: str, arrays: dict[str, compiler.ArrayEntry], verify: bool
) -> MappedArray:
    file = path / compiler.DIRECTORY / name
    try:
        array = MappedArray(file, compiler.ARRAYS[name], 1)
        if len(array.values) != arrays[name].length:
            raise ValueError(f"{len(array.values)} values instead of {arrays[name].length}")
        if verify and zlib.crc32(array.values.data) != arrays[name].crc32:
            raise ValueError("its checksum differs from that of the file that was written")
    except (OSError, ValueError, KeyError) as error:
        raise _damaged(path, file, error) from error
    return array


def _damaged(path: Path, file: Path, error: object) -> BadInputError:
    return BadInputError(f"{file}: missing or damaged: {error}", _AGAIN.format(path))


def _places(
    description: WorkflowDescription,
    plan: dict[str, compiler.TablePlace],
    words: int,
    text_begins: int,
) -> np.ndarray:
    """int64 [columns, fields], checked: kernels read only there. Raises ValueError."""
    columns = description.spec.categorical
    places = np.zeros((len(columns), tables.PLACE_FIELDS), np.int64)
    for j, column in enumerate(columns):
        place = plan[column.vocabulary_name]
        values = description.vocabularies[column.name].values
        end = place.begin + tables.words_for(place.slots, wide=place.wide)
        inside = 0 <= place.begin < end <= words and place.slots < 2**32
        inside &= (place.values, place.slots) == (values, tables.slots_for(values))
        if RAW_TYPES[column.raw].is_text:
            inside &= place.wide and 0 <= place.text <= text_begins - 1 - place.values
        elif RAW_TYPES[column.raw].dtype == "uint32":
            inside &= not place.wide
        if not inside:
            raise ValueError(f"the table of column {column.name} is not in the files")
        # in the order of the fields
        places[j] = (
            place.begin, place.slots, place.wide, column.oov_ids, column.reserved_ids, values,
            place.text,
        )  # fmt: skip
    return places
