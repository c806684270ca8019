"""Find the files beside the log that a spec names: of its tables and of its sources of events."""

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

#: By the name of a table or a source, its files.
TableSources: TypeAlias = dict[str, list[DayFile]]
#: In the record of a run: all files; in what describes one of them: the digest of its content.
TABLES, DIGEST = "tables", "digest"


def parse_paths(given: Iterable[str], flag: str = "--table") -> dict[str, str]:
    """Return the paths that ``--table NAME=PATH,…``, or another flag, gives, by their names.

    Raises:
        SettingsError: There is no name or no path.
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
    """Return the files of all tables that are read, and of each source of events.

    Args:
        spec: The columns.
        input_path: The log, in whose directory the paths of the spec are.
        paths: By the names of tables, the paths that take the place of those of the spec.
        needed: Whether each of them must be there. Of an extension, one without files stays as it
            is; one of ``paths`` must be there.

    Raises:
        SettingsError: ``paths`` has one that the spec does not have.
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
    """Check that a flag gives paths of what the spec has. Raises :class:`SettingsError`.

    Args:
        paths: The paths, by name.
        names: The names of the spec.
        flag: The flag.
        role: What has these names.
    """
    for name in paths:
        if name not in names:
            remedy = did_you_mean(name, names) if names else f"leave {flag} out"
            raise SettingsError(f"{flag} {name}: the spec has no {role} {name!r}", remedy)


def find_again(recorded: Mapping[str, Mapping[str, Any]]) -> TableSources:
    """Return the files of an interrupted extension, as :func:`describe_sources` has them.

    Raises:
        BadInputError: A file is not there any more.
    """
    found: TableSources = {}
    for name, files in recorded.items():
        found[name] = [file for path in files for file in find_table(path)]
    return found


def all_paths(sources: TableSources) -> set[str]:
    """Return the paths of all files."""
    return {file.path for files in sources.values() for file in files}


def describe_files(sources: TableSources, what: str) -> dict[str, Any]:
    """Return what identifies the content of files, for the record of a run; {} without.

    Args:
        sources: The files.
        what: The name under which the record has them.
    """
    if not sources:
        return {}
    described = {
        name: {file.path: fingerprint(file) for file in files} for name, files in sources.items()
    }
    return {what: described}


def describe_sources(sources: TableSources, spec: FeatureSpec) -> dict[str, Any]:
    """Return what identifies the content of tables and events, see :func:`describe_files`.

    Files of events have a digest as well: an extension takes each of them once.
    """
    described = describe_files(sources, TABLES)
    for rule in spec.event_sources:
        for file in sources.get(rule.name, []):
            described[TABLES][rule.name][file.path][DIGEST] = content_digest(file)
    return described
