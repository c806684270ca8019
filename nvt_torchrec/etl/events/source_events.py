"""Read the files of sources of events, and write their events alongside those of the log.

A piece of a file becomes a block of events, with the same files as a block of the log
(:class:`.event_files.EventFiles`), except those that only rows need: order, labels and histories.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nvt_torchrec.base.arrays import to_arrow
from nvt_torchrec.base.errors import SettingsError
from nvt_torchrec.base.files.atomic import read_json, together, write_json
from nvt_torchrec.base.files.mapping import map_array, write_array
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.base.threads import MapTasks, map_in_order
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.log_format import UnparsedRows, get_format
from nvt_torchrec.etl.events.event_blocks import EventLog
from nvt_torchrec.etl.events.event_files import EventFiles
from nvt_torchrec.etl.events.extract import code_keys, flag_type, is_sorted
from nvt_torchrec.etl.state.output import EVENTS
from nvt_torchrec.etl.tables.keyed_rows import format_rejected
from nvt_torchrec.etl.tables.prepare_tables import copy_rejected
from nvt_torchrec.etl.tables.table_sources import TableSources
from nvt_torchrec.etl.tables.table_spec import guess_format
from nvt_torchrec.formats.feature_spec import CategoricalColumn, DenseColumn, FeatureSpec
from nvt_torchrec.formats.feature_spec.event_keys import list_amounts
from nvt_torchrec.formats.feature_spec.events import EventKey, Events
from nvt_torchrec.formats.feature_spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.feature_spec.read_plan import Reading
from nvt_torchrec.formats.feature_spec.source_rules import SourceRule
from nvt_torchrec.formats.feature_spec.spec_variants import bound_times
from nvt_torchrec.formats.rows import RawRows
from nvt_torchrec.workflows.event_groups import EVENT, find_cuts

log = logging.getLogger(__name__)

#: Bytes of a file that are parsed at once, and whose events are a block.
_BLOCK_BYTES = 16 << 20
#: A spec must name a label, and events have none; no column has this name.
_NO_LABEL = "(an event has no label)"


def make_source_spec(rule: SourceRule, spec: FeatureSpec, path: str) -> FeatureSpec:
    """Return the spec of a file of a source, whose rows are events.

    Keys are read like the log's columns. So are columns whose distinct values are counted, if the
    log has a feature of the same name. Amounts are read as floats.

    Args:
        rule: The source.
        spec: The columns of the log.
        path: The file; its suffix gives the format unless the rule does.
    """
    assert spec.events is not None
    aggregates: list[DenseColumn] = []
    log_names: dict[
        str, str
    ] = {}  # by column of the source, the name of the same column of the log
    for column in spec.aggregates:
        aggregate = column.aggregate
        if aggregate is None or aggregate.source != rule.name:
            continue
        file_key = rule.to_source_names(aggregate.key)
        own_aggregate = dataclasses.replace(aggregate, key=file_key, source="")
        aggregates.append(dataclasses.replace(column, aggregate=own_aggregate))
        log_names |= zip(file_key, aggregate.key, strict=True)
        if aggregate.column and not aggregate.kind.takes_numbers:
            log_names.setdefault(aggregate.column, aggregate.column)
    amounts = []
    for name in list_amounts(spec.aggregate_rules, rule.name):
        reading = Reading((name,), nulls=rule.nulls, trim=True)
        amounts.append(DenseColumn(f"amount {name}", raw="float", reading=reading))
    keys = []
    for own_name, log_name in log_names.items():
        read = spec.make_key_read(log_name)
        nulls = tuple(dict.fromkeys([*read.nulls, *rule.nulls]))
        reading = Reading((own_name,), nulls=nulls, trim=read.trim, lenient=read.lenient)
        keys.append(CategoricalColumn(f"key {own_name}", raw=read.raw, reading=reading))
    return FeatureSpec(
        label=_NO_LABEL,
        dense=(*aggregates, *amounts),
        categorical=tuple(keys),
        input=rule.input or guess_format(path, spec),
        events=Events(rule.time, rule.time_format, rule.known, cut=spec.events.cut),
        is_source=True,
    )


def store_sources(
    spec: FeatureSpec,
    sources: TableSources,
    work: Path,
    *,
    newest: int | None = None,
    threads: int = 1,
    reject: bool = False,
    report: Callable[[float], object] = lambda rows: None,
) -> None:
    """Write the events of all sources of a spec, except sources that were written before.

    Args:
        spec: The columns.
        sources: The files of the sources; for an extension, the files of the day.
        work: The directory of the run's state.
        newest: For an extension, the time of the newest row of the earlier days. An event that a
            row of these days would have counted is malformed.
        threads: Number of pieces of a file that are parsed at once.
        reject: Whether malformed rows are left out.
        report: Called with the number of rows read since the last call.

    Raises:
        BadRowError: A row is malformed.
        BadInputError: A file cannot be read.
        OutputError: The directory cannot be written.
    """
    directory = work / EVENTS
    for rule in spec.event_sources:
        if _list_file(directory, rule).exists():
            continue
        directory.mkdir(parents=True, exist_ok=True)
        names: list[str] = []
        rejected: list[bytes] = []
        num_events = 0
        for number, file in enumerate(sources.get(rule.name, [])):
            source_spec = make_source_spec(rule, spec, file.path)
            if newest is not None:
                first = int(find_cuts(spec, np.array([newest]))[0]) - rule.delay
                source_spec = bound_times(source_spec, (first, int(RAW_TYPES["time"].maximum) + 1))
            reader = _SourceReader(
                rule, spec, source_spec, EventFiles(directory), file, str(number), reject
            )
            pieces = enumerate(get_format(source_spec).stream(file.path, _BLOCK_BYTES))
            for name, rows, bad in map_in_order(reader.read, pieces, threads, "events"):
                names.append(name)
                rejected += bad
                num_events += rows
                report(rows)
        _rejected_file(directory, rule).write_bytes(b"".join(rejected))
        write_json(_list_file(directory, rule), names)  # the last file: it marks completion
        log.info("source %s: %d events", rule.name, num_events)


def _list_file(directory: Path, rule: SourceRule) -> Path:
    return directory / f"source.{rule.name}.json"


def _rejected_file(directory: Path, rule: SourceRule) -> Path:
    return directory / f"source.{rule.name}.rejected.tsv"


def keep_rejected_events(spec: FeatureSpec, work: Path, directory: Path) -> None:
    """Copy the rejected rows of sources to the directory of all rejected rows."""
    for rule in spec.event_sources:
        file = _rejected_file(work / EVENTS, rule)
        copy_rejected(file, directory / f"{rule.role}.{rule.name}.tsv")


def list_blocks(spec: FeatureSpec, work: Path) -> dict[str, list[str]]:
    """Return the names of the blocks of each source, which :func:`store_sources` wrote."""
    blocks = {}
    for rule in spec.event_sources:
        file = _list_file(work / EVENTS, rule)
        blocks[rule.name] = parse(list[str], read_json(file, "the names of blocks"), file)
    return blocks


@dataclasses.dataclass(frozen=True)
class _SourceReader:
    """Reads a file of a source, and writes its events.

    Attributes:
        rule: The source.
        spec: The columns of the log.
        source_spec: The spec by which the file is read.
        files: The files that are written.
        file: The file of the source.
        name: The name of the file within the names of its blocks.
        reject: Whether malformed rows are left out.
    """

    rule: SourceRule
    spec: FeatureSpec
    source_spec: FeatureSpec
    files: EventFiles
    file: DayFile
    name: str
    reject: bool

    def read(self, numbered: tuple[int, UnparsedRows]) -> tuple[str, int, list[bytes]]:
        """Write the events of a piece.

        Returns:
            The name of its block; its number of events; lines that describe malformed rows.
        """
        number, unparsed = numbered
        rows = unparsed.drop_label().parse(reject=self.reject)
        name = f"source.{self.rule.name}.{self.name}.{number}"
        self._write(name, rows)
        described = [(bad.line, bad.reason, bad.text) for bad in rows.bad]
        return name, len(rows), format_rejected(self.file.source, unparsed.first_line, described)

    def _write(self, name: str, rows: RawRows) -> None:
        assert rows.times is not None
        assert rows.groups is not None
        spec = self.spec
        rule = self.rule
        files = self.files
        times = rows.times if rule.delay else rows.times[:1]
        order: slice | np.ndarray = slice(None)
        if not is_sorted(times[-1]):
            order = np.argsort(times[-1], kind="stable")
        flags = np.full(len(rows), 1 << EVENT, flag_type(spec))
        with together():
            for index, key in enumerate(spec.event_keys):
                if key.source != rule.name:
                    continue
                file_key = EventKey(rule.to_source_names(key.columns))
                hashes = rows.groups[self.source_spec.event_keys.index(file_key)]
                distinct, codes = code_keys([to_arrow(hashes).dictionary_encode()])
                write_array(files.block_keys(name, index), distinct)
                write_array(files.codes(name, index), codes[order])
            if rows.amounts is not None and len(rows.amounts):
                write_array(files.amounts(name), rows.amounts[:, order])
            write_array(files.flags(name), flags)
            write_array(files.times(name), times[:, order])


def check_keys(log: EventLog, map_tasks: MapTasks) -> None:
    """Check that rows of the log have some of the keys of each source.

    Args:
        log: The events; their keys must have been numbered.
        map_tasks: Runs tasks.

    Raises:
        SettingsError: No row has one: the spec names the wrong column, or the log and the source
            write keys differently.
    """
    for number, group in enumerate(log.spec.groups):
        if not group.source or not group.columns:
            continue
        count = functools.partial(_count_found, files=log.files, number=number)
        counts = list(map_tasks(count, log.sources[group.source]))
        num_keys = sum(keys for keys, _ in counts)
        num_found = sum(found for _, found in counts)
        if num_keys and not num_found:
            kinds = [f"{name} as {log.spec.make_key_read(name).raw}" for name in group.columns]
            raise SettingsError(
                f"source {group.source}: no row of the log has a key of its events by "
                f"{', '.join(group.columns)}",
                "correct the key of the source in the spec; log and source are read alike: "
                f"{', '.join(kinds)}",
            )


def _count_found(name: str, files: EventFiles, number: int) -> tuple[int, int]:
    """Return the number of keys of a source's block, and the number of those that rows have.

    Args:
        name: The name of the block.
        files: The events; their keys must have been numbered.
        number: The number of the key.
    """
    row_keys = map_array(files.row_keys(number))
    keys = map_array(files.block_keys(name, number))
    keys = keys[keys != 0]  # 0 stands for a missing key
    index = np.searchsorted(row_keys, keys)
    inside = index < len(row_keys)
    return len(keys), int((row_keys[index[inside]] == keys[inside]).sum())
