"""Find the files of a spec's labels, and the files of the log that have waiting rows."""

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
    """Return the files of each label that comes from files other than the log.

    Args:
        spec: The columns.
        input_path: The log; paths in the spec are relative to its directory.
        paths: By name of a label, the path that replaces the path in the spec.

    Raises:
        SettingsError: ``paths`` has a label that does not come from other files.
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
    """Return the files of the log that have waiting rows, and check that they are unchanged.

    Args:
        manifest: The manifest of the output that is extended.
        paths: The files.

    Raises:
        BadInputError: A file is missing, or its content has changed.
    """
    found = []
    inputs = {file.path: file for file in manifest.inputs}
    for path in paths:
        before = inputs[path]
        remedy = "put the file back until its rows are written, or run the ETL again"
        try:
            (file,) = find_days(path, split=ANY_FILES)
        except BadInputError as error:
            what = f"{error.what}; some of its rows wait for their clicks"
            raise BadInputError(what, remedy) from None
        if fingerprint(file) != before.fingerprint and content_digest(file) != before.digest:
            raise BadInputError(
                f"{path}: was changed; some of its rows are written, others wait for their clicks",
                remedy,
            )
        found.append(dataclasses.replace(file, day=before.day))
    return found
