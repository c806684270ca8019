"""Find the files of clicks of a spec's labels, and the files of the log whose rows wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.days import DayFile, find_days, find_directory, find_table
from nvt_torchrec.etl.state.run_record import content_digest, fingerprint
from nvt_torchrec.etl.tables.table_sources import TableSources, check_names
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.split import ANY_FILES
from nvt_torchrec.formats.manifest import Manifest


def find_label_files(spec: FeatureSpec, input_path: str, paths: Mapping[str, str]) -> TableSources:
    """Return the files of each label that is from other files than the log.

    Args:
        spec: The columns.
        input_path: The log, in whose directory the paths of the spec are.
        paths: By the names of labels, the paths that take the place of those of the spec.

    Raises:
        SettingsError: ``paths`` has a label that is not from another file.
        BadInputError: A file is missing or empty.
    """
    names = [file.name for file in spec.label_files]
    check_names(paths, names, "--label_path", "label from a file named")
    found: TableSources = {}
    for file in spec.label_files:
        try:
            path = paths.get(file.name) or f"{find_directory(input_path)}/{file.path}"
            found[file.name] = find_table(path)
        except BadInputError as error:
            raise BadInputError(
                f"label {file.name}: {error.what}",
                f"pass the clicks with --label_path {file.name}=PATH, or correct from in the spec",
            ) from None
    return found


def find_waiting(manifest: Manifest, paths: Iterable[str]) -> list[DayFile]:
    """Return the files of the log that have rows that wait, as they were.

    Args:
        manifest: Of the output that is extended.
        paths: The files.

    Raises:
        BadInputError: One is not there any more, or is another one.
    """
    found = []
    inputs = {file.path: file for file in manifest.inputs}
    for path in paths:
        before = inputs[path]
        remedy = "put the file back until its rows are written, or run the ETL again"
        try:
            (file,) = find_days(path, split=ANY_FILES)
        except BadInputError as error:
            what = f"{error.what}; rows of it wait for their clicks"
            raise BadInputError(what, remedy) from None
        if fingerprint(file) != before.fingerprint and content_digest(file) != before.digest:
            raise BadInputError(
                f"{path}: was changed; rows of it wait for their clicks, and others are written",
                remedy,
            )
        found.append(dataclasses.replace(file, day=before.day))
    return found
