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

    Tables are mapped into memory, not read: opening takes milliseconds regardless of their size,
    processes share them, and the first lookups load the pages they touch.

    Args:
        path: The workflow's directory.
        verify: Read the arrays and compare their checksums. Without it, damaged arrays give wrong
            ids, but all ids are within their column's embedding table, and nothing is read outside
            of the arrays.
        events: Open the event state of a spec with events; False while the ETL makes that state.
        vectors: Open the vectors of a spec with vectors; False for a model that takes none.

    Raises:
        BadInputError: The path has no saved workflow, it is not compiled, or a file is missing or
            damaged.
        SchemaError: It was compiled from another workflow, or by another version of this program.
    """
    path = Path(path)
    description = inspect(path)
    plan = _read_plan(path, description)
    mapped = tuple(_open(path, name, plan.arrays, verify) for name in compiler.ARRAYS)
    words, text, text_begins = (array.values for array in mapped)
    try:
        regions = _locate_tables(description, plan.tables, len(words), len(text_begins))
        dense = DensePlan(description.spec, description.statistics)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise _make_damaged_error(
            path, path / compiler.DIRECTORY / compiler.PLAN_FILE, error
        ) from error
    state = None
    if events and description.spec.events:
        state = EventState.load(description, verify=verify)
    return CompiledWorkflow(
        spec=description.spec,
        schema=description.table_schema,
        digest=description.digest,
        path=path.resolve(),
        events=state,
        _dense=dense,
        _words=words,
        _text=text,
        _text_begins=text_begins,
        _regions=regions,
        _mapped=mapped,
        row_spec=description.spec,
        tables=StoredTables.open(description, verify=verify),
        vectors=open_vectors(description, verify=verify) if vectors else None,
    )


def _read_plan(path: Path, description: WorkflowDescription) -> compiler.CompiledPlan:
    file = path / compiler.DIRECTORY / compiler.PLAN_FILE
    if not file.exists():
        raise BadInputError(f"{path}: the workflow is not compiled", _AGAIN.format(path))
    plan = compiler.FORMAT.read(compiler.CompiledPlan, file, _AGAIN.format(path))
    if plan.workflow_digest != description.digest:
        raise SchemaError(
            f"{file}: compiled from another workflow: its digest is {plan.workflow_digest[:12]}…, "
            f"not {description.digest[:12]}…",
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
            raise ValueError(f"expected {arrays[name].length} values, found {len(array.values)}")
        if verify and zlib.crc32(array.values.data) != arrays[name].crc32:
            raise ValueError("its checksum differs from that of the file that was written")
    except (OSError, ValueError, KeyError) as error:
        raise _make_damaged_error(path, file, error) from error
    return array


def _make_damaged_error(path: Path, file: Path, error: object) -> BadInputError:
    return BadInputError(f"{file}: missing or damaged: {error}", _AGAIN.format(path))


def _locate_tables(
    description: WorkflowDescription,
    plan: dict[str, compiler.TableRegion],
    words: int,
    text_begins: int,
) -> np.ndarray:
    """Return the region of each column's table, int64 [columns, fields].

    Kernels read only within these regions, so they are checked here.

    Raises:
        ValueError: A region is not within the arrays.
    """
    columns = description.spec.categorical
    regions = np.zeros((len(columns), tables.REGION_FIELDS), np.int64)
    for j, column in enumerate(columns):
        region = plan[column.vocabulary_name]
        values = description.vocabularies[column.name].values
        end = region.begin + tables.count_words(region.slots, wide=region.wide)
        is_valid = 0 <= region.begin < end <= words and region.slots < 2**32
        is_valid &= (region.values, region.slots) == (values, tables.count_slots(values))
        if RAW_TYPES[column.raw].is_text:
            is_valid &= region.wide and 0 <= region.text <= text_begins - 1 - region.values
        elif RAW_TYPES[column.raw].dtype == "uint32":
            is_valid &= not region.wide
        if not is_valid:
            raise ValueError(f"the table of column {column.name} is not in the files")
        regions[j, tables.REGION_BEGIN] = region.begin
        regions[j, tables.REGION_SLOTS] = region.slots
        regions[j, tables.REGION_WIDE] = region.wide
        regions[j, tables.REGION_OOV_IDS] = column.oov_ids
        regions[j, tables.REGION_FIRST_ID] = column.reserved_ids
        regions[j, tables.REGION_VALUES] = values
        regions[j, tables.REGION_TEXT] = region.text
    return regions
