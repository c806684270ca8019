"""Find the files of a spec's tables and sources of events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from nvt_torchrec.base.errors import BadInputError, SettingsError
from nvt_torchrec.clicklog.readers.days import DayFile, find_directory, find_table
from nvt_torchrec.etl.state.run_record import content_digest, fingerprint
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.field_checks import did_you_mean
from nvt_torchrec.formats.feature_spec.source_rules import SourceRule
from nvt_torchrec.formats.feature_spec.table_rules import TableRule

#: The files of each table, source or label, by its name.
TableSources: TypeAlias = dict[str, list[DayFile]]
#: The key of all files in the record of a run.
TABLES = "tables"
#: The key of a content's digest in the description of a file.
DIGEST = "digest"


def parse_paths(given: Iterable[str], flag: str = "--table") -> dict[str, str]:
    """Parse ``--table NAME=PATH,…``, or another such flag; return the paths by name.

    Raises:
        SettingsError: A name or a path is missing.
    """
    paths = {}
    for pair in given:
        name, _, path = pair.partition("=")
        if not (name and path):
            raise SettingsError(f"{flag} {pair}", f"write it as {flag} NAME=PATH")
        paths[name] = path
    return paths


def find_tables(
    spec: FeatureSpec, input_path: str, paths: Mapping[str, str], *, needed: bool = True
) -> TableSources:
    """Return the files of all tables that are read, and of all sources of events.

    Args:
        spec: The columns.
        input_path: The log; paths in the spec are relative to its directory.
        paths: By name of a table or source, the path that replaces the path in the spec.
        needed: Whether all files must exist. An extension may lack them, unless they are in
            ``paths``; a table without files does not change.

    Raises:
        SettingsError: ``paths`` has a name that the spec does not have.
        BadInputError: A file is missing or empty.
    """
    rules: list[TableRule | SourceRule] = [*spec.read_tables, *spec.event_sources]
    names = [rule.name for rule in rules]
    check_names(paths, names, "--table", "table or source")
    found: TableSources = {}
    for rule in rules:
        path = paths.get(rule.name) or f"{find_directory(input_path)}/{rule.path}"
        try:
            found[rule.name] = find_table(path)
        except BadInputError as error:
            if needed or rule.name in paths:
                raise BadInputError(
                    f"{rule.role} {rule.name}: {error.what}",
                    f"pass it with --table {rule.name}=PATH, or correct its path in the spec",
                ) from None
    return found


def check_names(paths: Mapping[str, str], names: Sequence[str], flag: str, role: str) -> None:
    """Check that the names in a flag are names of the spec. Raises :class:`SettingsError`.

    Args:
        paths: The paths, by name.
        names: The names of the spec.
        flag: The flag.
        role: What the names stand for in errors, such as "table or source".
    """
    for name in paths:
        if name not in names:
            remedy = did_you_mean(name, names) if names else f"leave {flag} out"
            raise SettingsError(f"{flag} {name}: the spec has no {role} {name!r}", remedy)


def find_recorded_files(recorded: Mapping[str, Mapping[str, Any]]) -> TableSources:
    """Find the files of an interrupted extension again.

    Args:
        recorded: The files of each table or source, as described by :func:`describe_sources`.

    Raises:
        BadInputError: A file does not exist any more.
    """
    found: TableSources = {}
    for name, paths in recorded.items():
        found[name] = []
        for path in paths:
            found[name] += find_table(path)
    return found


def list_paths(sources: TableSources) -> set[str]:
    """Return the paths of all files."""
    paths = set()
    for files in sources.values():
        paths |= {file.path for file in files}
    return paths


def describe_files(sources: TableSources, what: str) -> dict[str, Any]:
    """Describe files for the record of a run, so that changed content is noticed; {} for no files.

    Args:
        sources: The files.
        what: The key of the files in the record.
    """
    if not sources:
        return {}
    described = {}
    for name, files in sources.items():
        described[name] = {file.path: fingerprint(file) for file in files}
    return {what: described}


def describe_sources(sources: TableSources, spec: FeatureSpec) -> dict[str, Any]:
    """Describe the files of tables and sources, see :func:`describe_files`.

    Files of sources also have a digest, because an extension must not take the same file twice.
    """
    described = describe_files(sources, TABLES)
    for rule in spec.event_sources:
        for file in sources.get(rule.name, []):
            described[TABLES][rule.name][file.path][DIGEST] = content_digest(file)
    return described
