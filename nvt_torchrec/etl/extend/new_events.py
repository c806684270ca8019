"""Find the new files of event sources, so that the events of a file count only once."""

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

#: Name of a table or source → path of a file → its fingerprint and content digest.
_FileRecords: TypeAlias = dict[str, dict[str, dict[str, Any]]]


def drop_known_files(files: TableSources, spec: FeatureSpec, manifest: Manifest) -> TableSources:
    """Return all files of tables, and the files of event sources that no earlier day has read.

    The path of a source usually names the files of all days. A file is recognized by its path, size
    and modification time, or else by its content, so that a moved file is not read twice.

    Args:
        files: The files of tables and sources.
        spec: The feature spec.
        manifest: The manifest of the earlier days.

    Raises:
        BadInputError: A file was read with an earlier day, and was changed since.
    """
    records_of_days: list[_FileRecords] = []
    for settings in [manifest.settings, *(day.settings for day in manifest.extensions)]:
        records_of_days.append(parse(_FileRecords, settings.get(TABLES, {}), "manifest.json"))
    kept = dict(files)
    for rule in spec.event_sources:
        known: dict[str, dict[str, Any]] = {}
        for records in records_of_days:
            known |= records.get(rule.name, {})
        given = files.get(rule.name, [])
        new = [file for file in given if not _is_known(rule, file, known)]
        if len(new) < len(given):
            num_known = len(given) - len(new)
            log.info("source %s: %d files were read with earlier days", rule.name, num_known)
        kept[rule.name] = new
    return kept


def _is_known(rule: SourceRule, file: DayFile, known: dict[str, dict[str, Any]]) -> bool:
    """Return True if a file was read with an earlier day, judging by its path or its content."""
    record = known.get(file.path)
    if record is not None:
        identity = {key: value for key, value in record.items() if key != DIGEST}
        if identity == fingerprint(file):
            return True
    if content_digest(file) in {other.get(DIGEST) for other in known.values()}:
        return True
    if record is not None:
        raise BadInputError(
            f"source {rule.name}: {file.source}: was read with an earlier day, and has changed "
            "since",
            f"pass only the new events, in a file of another name, with --table {rule.name}=PATH",
        )
    return False
