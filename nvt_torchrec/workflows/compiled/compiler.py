"""Build the compiled form of a saved workflow, in a directory inside it.

Layout, below the workflow's directory::

    compiled/compiled.json    where the table of each vocabulary is, length and CRC-32 of each
                              array, the digest of the workflow it was built from; written last
    compiled/tables.npy       uint64, all hash tables (see :mod:`workflows.compiled.tables`)
    compiled/text.npy         uint8, the concatenated strings of all vocabularies
    compiled/text_begins.npy  int64, where each string begins, and the end of the last one

The same workflow gives the same bytes. The checksum only has to detect damage, so CRC-32 suffices;
SHA-256 would double the time of building. Building needs memory for a few tables, see
:data:`_AHEAD`.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa

from nvt_torchrec.base.arrays import string_parts, to_numpy
from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.artifact import Format
from nvt_torchrec.base.files.atomic import atomic_path, output_errors, together
from nvt_torchrec.base.files.mapping import ArrayWriter
from nvt_torchrec.base.threads import map_in_order
from nvt_torchrec.formats.feature_spec import CategoricalColumn
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.vocabularies import COPY_AGAIN
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.compiled import tables, text_tables
from nvt_torchrec.workflows.description import inspect

FORMAT = Format("nvt-torchrec compiled workflow", 2, "a compiled workflow")
DIRECTORY = "compiled"
PLAN_FILE = "compiled.json"
ARRAYS = {"tables.npy": np.uint64, "text.npy": np.uint8, "text_begins.npy": np.int64}
#: All files, relative to the workflow's directory.
FILES = tuple(f"{DIRECTORY}/{name}" for name in (PLAN_FILE, *ARRAYS))

#: Finished tables that may wait in memory while an earlier, larger one is still being made.
_AHEAD = 8


@dataclasses.dataclass(frozen=True)
class TableRegion:
    """The location of a vocabulary's hash table.

    Attributes:
        begin: Index of its first word in ``tables.npy``.
        slots: Number of slots.
        wide: Whether a slot has two words.
        values: Number of values.
        text: Index of its first string in ``text_begins.npy``; -1 for numbers.
    """

    begin: int
    slots: int
    wide: bool
    values: int
    text: int


@dataclasses.dataclass(frozen=True)
class ArrayEntry:
    """Length and CRC-32 of an array."""

    length: int
    crc32: int


@dataclasses.dataclass(frozen=True)
class CompiledPlan:
    """The content of ``compiled.json``: tables by vocabulary, arrays by file."""

    workflow_digest: str
    tables: dict[str, TableRegion]
    arrays: dict[str, ArrayEntry]


def build(
    path: Path | str, description: WorkflowDescription | None = None, *, threads: int = 1
) -> None:
    """Compile the workflow saved at ``path`` into ``path/compiled``.

    Args:
        path: The directory of the workflow, which contains the vocabularies.
        description: The workflow's description; needed only if it has not been written yet.
        threads: Number of threads that make tables; the bytes do not depend on it.

    Raises:
        BadInputError: The path has no saved workflow, or a vocabulary is damaged or differs from
            the description.
        OutputError: The directory cannot be written.
    """
    path = Path(path)
    if description is None:
        description = inspect(path)
        description.verify()  # without it, a damaged value would silently be out of vocabulary
    directory = path / DIRECTORY
    with output_errors(directory, "choose a writable copy"):
        (directory / PLAN_FILE).unlink(missing_ok=True)
    with together(), ExitStack() as stack:
        writers = {}
        for name, dtype in ARRAYS.items():
            temporary = stack.enter_context(atomic_path(directory / name))
            writers[name] = ArrayWriter(stack.enter_context(open(temporary, "wb")), dtype)
        vocabularies = description.spec.vocabularies

        def make_table(columns: tuple[CategoricalColumn, ...]) -> _Table:
            return _make_table(columns[0], path, description)

        made = map_in_order(make_table, vocabularies.values(), threads, "compile", _AHEAD)
        regions = {}
        for name, table in zip(vocabularies, made, strict=True):
            regions[name] = _append(table, writers)
        writers["text_begins.npy"].append(np.array([writers["text.npy"].length], np.int64))
        for writer in writers.values():
            writer.finish()
    arrays = {}
    for name, writer in writers.items():
        arrays[name] = ArrayEntry(writer.length, writer.checksum)
    plan = CompiledPlan(description.digest, regions, arrays)
    FORMAT.write(directory / PLAN_FILE, dataclasses.asdict(plan))


@dataclasses.dataclass(frozen=True)
class _Table:
    """A hash table; for a vocabulary of strings also their bytes, and where each string begins."""

    words: np.ndarray
    wide: bool
    values: int
    text: np.ndarray | None = None
    text_begins: np.ndarray | None = None


def _make_table(column: CategoricalColumn, path: Path, description: WorkflowDescription) -> _Table:
    vocabulary = description.vocabularies[column.name]
    raw = RAW_TYPES[column.raw]
    kind = pa.string() if raw.is_text else pa.int64()
    (values,) = vocabulary.read(path, {vocabulary.name: kind})
    where = f"{path / vocabulary.file}: column {column.name}"
    slots = tables.count_slots(len(values))
    if raw.is_text:
        words = np.zeros(tables.count_words(slots, wide=True), np.uint64)
        offsets, data = string_parts(values)
        begins = offsets.astype(np.int64)
        text_tables.insert_text(words, slots, begins, data, column.reserved_ids)
        text = data[begins[0] : begins[-1]]
        return _Table(words, True, len(values), text, begins[:-1] - begins[0])
    numbers = to_numpy(values)
    wide = len(numbers) > 0 and (int(numbers.min()) < 0 or int(numbers.max()) >= 2**32)
    if wide and raw.dtype != "int64":
        raise BadInputError(f"{where}: the vocabulary has values of over 32 bits", COPY_AGAIN)
    words = np.zeros(tables.count_words(slots, wide=wide), np.uint64)
    insert = tables.insert_wide if wide else tables.insert_narrow
    twice = insert(words, slots, numbers, column.reserved_ids)
    if twice >= 0:
        value = numbers[twice]
        raise BadInputError(f"{where}: the vocabulary has value {value} twice", COPY_AGAIN)
    return _Table(words, wide, len(values))


def _append(table: _Table, writers: dict[str, ArrayWriter]) -> TableRegion:
    words, text, text_begins = (writers[name] for name in ARRAYS)
    region = TableRegion(
        begin=words.length,
        slots=tables.count_slots(table.values),
        wide=table.wide,
        values=table.values,
        text=-1 if table.text is None else text_begins.length,
    )
    words.append(table.words)
    if table.text is not None and table.text_begins is not None:
        text_begins.append(table.text_begins + text.length)
        text.append(table.text)
    return region


@dataclasses.dataclass(frozen=True)
class CompileSettings(Settings):
    """The workflow to compile again."""

    workflow: Path = flag("directory of the workflow", metavar="OUT/workflow", positional=True)


SETTINGS = (CompileSettings,)


def run(settings: CompileSettings) -> None:
    """Compile a workflow."""
    build(settings.workflow)
