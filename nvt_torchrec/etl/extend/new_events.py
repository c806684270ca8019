"""Which files of sources of events are new: the events of a file count once."""

from __future__ import annotations

import logging
from typing import Any, TypeAlias

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.validation import parse
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.etl.state.run_record import content_digest, fingerprint
from nvt_torchrec.etl.tables.table_sources import DIGEST, TABLES, TableSources
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.source_rules import SourceRule
from nvt_torchrec.formats.manifest import Manifest

log = logging.getLogger(__name__)

#: By the name of a table or a source, by the path of a file: what identifies its content.
_FileRecords: TypeAlias = dict[str, dict[str, dict[str, Any]]]


def drop_taken(files: TableSources, spec: FeatureSpec, manifest: Manifest) -> TableSources:
    """Return the files of tables, and those files of sources that no day before has taken.

    A path may name the files of all days, as that in a spec does. A file is known by its path, size
    and time of change; else by its content, so that one that was moved is not taken twice.

    Args:
        files: The files.
        spec: The columns.
        manifest: Of the days before.

    Raises:
        BadInputError: A file has been taken, and has other content now.
    """
    records_of_days: list[_FileRecords] = []
    for settings in [manifest.settings, *(day.settings for day in manifest.extensions)]:
        records_of_days.append(parse(_FileRecords, settings.get(TABLES, {}), "manifest.json"))
    kept = dict(files)
    for rule in spec.event_sources:
        taken: dict[str, dict[str, Any]] = {}
        for records in records_of_days:
            taken |= records.get(rule.name, {})
        given = files.get(rule.name, [])
        new = [file for file in given if not _is_taken(rule, file, taken)]
        if len(new) < len(given):
            num_taken = len(given) - len(new)
            log.info("source %s: %d files were taken before", rule.name, num_taken)
        kept[rule.name] = new
    return kept


def _is_taken(rule: SourceRule, file: DayFile, taken: dict[str, dict[str, Any]]) -> bool:
    """Return whether a file is one that was taken, by its path or its content."""
    record = taken.get(file.path)
    if record is not None:
        identity = {key: value for key, value in record.items() if key != DIGEST}
        if identity == fingerprint(file):
            return True
    if content_digest(file) in {other.get(DIGEST) for other in taken.values()}:
        return True
    if record is not None:
        raise BadInputError(
            f"source {rule.name}: {file.source}: has been taken with a day before, and was changed "
            "since",
            f"pass the new events alone, in a file of another name, with --table {rule.name}=PATH",
        )
    return False
