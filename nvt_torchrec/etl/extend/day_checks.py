"""Which outputs can be extended, and by which days."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.clicklog.readers.days import DayFile, find_days
from nvt_torchrec.etl.extend.stage import split_and_number
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.etl.state.run_record import content_digest, fingerprint
from nvt_torchrec.formats import day_names
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.feature_spec import FeatureSpec
from nvt_torchrec.formats.feature_spec.split import Split
from nvt_torchrec.formats.manifest import InputFile, Manifest
from nvt_torchrec.workflows.description import inspect

_RESTORE = (
    "restore it from a copy (`python -m etl check` lists what is wrong), or run the ETL again"
)


def check_extendable(paths: EtlOutput, manifest: Manifest) -> FeatureSpec:
    """Check that the manifest, the workflow, its state and the parts are of one generation.

    Returns:
        The feature spec of the output.

    Raises:
        BadInputError: Something is missing or damaged.
        SchemaError: NVTabular's own operators made the output.
        SettingsError: Its rows are split in a way to which days cannot be added.
    """
    if manifest.settings.get("engine") == "nvtabular":
        raise SchemaError(
            f"{paths.manifest}: made with --engine nvtabular, which keeps no counts to go on from",
            "fit the log again with `python -m etl run --engine cpu` or `--engine dask`",
        )
    description = inspect(paths.workflow)
    _check_split(paths, description.spec.split, manifest.split or {})
    if description.digest != manifest["workflow_digest"]:
        raise BadInputError(
            f"{paths.workflow}: digest {description.digest[:12]}…, the data were made with "
            f"{manifest['workflow_digest'][:12]}…",
            _RESTORE,
        )
    for file in manifest.files:
        split_and_number(file.file)  # a name that leads elsewhere is refused
        if difference := paths.part_difference(file):
            raise BadInputError(difference, _RESTORE)
    paths.check_described(manifest, _RESTORE)
    return description.spec


def _check_split(paths: EtlOutput, split: Split, rule: dict[str, Any]) -> None:
    """Check that the split says where the rows of a new day go, and that of no row changes."""
    if split.by == "files":
        raise SettingsError(
            f"{paths.root}: its rows are split by files, which have no order that a new file could "
            "follow in",
            "run the ETL again over all files, the new ones among those of the spec's [split]; or, "
            'to add days from now on, run it with by = "days", "share" or "column"',
        )
    if split.by == "time" and not split.valid_from:
        raise SettingsError(
            f"{paths.root}: its rows are split by time, by shares: with a new day the cuts would "
            "be others, and rows would change their split",
            "give the cuts themselves in the [split] of the spec, now "
            f'valid_from = "{rule.get("valid_from")}", test_from = "{rule.get("test_from")}", and '
            'run the ETL again; or, to add days from now on, run it with by = "days", "share" or '
            '"column"',
        )


def new_days(settings: ExtendSettings, manifest: Manifest) -> list[DayFile]:
    """Find the days to add; those that are there already, from the same file, are passed over.

    Raises:
        BadInputError: A file is missing, or a day cannot be added.
    """
    inputs = {file["day"]: file for file in manifest["inputs"]}
    newest = max(inputs)
    after = newest if settings.days is None else None
    files = find_days(settings.input_path, settings.days, after=after)
    days = []
    for day in files:
        if day.day in inputs:
            check_same_file(day, manifest, settings.output_path)
        elif day.day < newest:
            raise BadInputError(
                f"{day.path}: {day.name} is older than the newest day of "
                f"{settings.output_path}, {day_names.day_title(inputs[newest]['path']) or newest}",
                "days are added in the order of time; to include it, run the ETL again",
            )
        else:
            days.append(day)
    return days


def check_same_file(day: DayFile, manifest: Manifest, output: Path) -> None:
    """Refuse another file of a day that is there. Raises :class:`BadInputError`."""
    inputs = {file.day: file for file in manifest.inputs}
    file = inputs[day.day]
    if fingerprint(day) != file.fingerprint and content_digest(day) != file.digest:
        undo = "take that one back with `etl extend --undo` first; or, "
        raise BadInputError(
            f"{day.path}: {output} has {day.name} already, of another file, {file.path}",
            f"{undo * (day.day == max(inputs))}if this is a later day, call it "
            f"{_following(inputs)}; or run the ETL again",
        )


def check_not_repeated(day: DayFile, manifest: Manifest) -> None:
    """Refuse a copy of a day that is there, under another name. Raises :class:`BadInputError`."""
    digest = content_digest(day)
    for file in manifest.inputs:
        if file.digest == digest:
            raise BadInputError(
                f"{day.path}: the same content as {file.path}, which is there already",
                f"fetch {day.name} again; or, if it is right, add it with --allow_repeated_day",
            )


def check_row_count(day: DayFile, rows: int, manifest: Manifest, factor: float) -> None:
    """Refuse a day of far more, or far fewer, rows than all days before.

    Of a single day before nothing is known of how days differ; it may be a log of many days.

    Args:
        day: The day.
        rows: About how many rows it has.
        manifest: The manifest of the days before.
        factor: How many times more, or fewer, rows it may have.

    Raises:
        BadInputError: It has more or fewer.
    """
    before = [counts["rows"] for counts in manifest.by_day.values()]
    if len(before) > 1 and not min(before) / factor <= rows <= max(before) * factor:
        raise BadInputError(
            f"{day.source}: about {rows:,} rows; the days before have {min(before):,} to "
            f"{max(before):,}",
            f"fetch {day.name} again; or, if it is right, add it with a larger --max_rows_factor",
        )


def _following(inputs: dict[int, InputFile]) -> str:
    """Return how the file of the next day would be called, without its ending."""
    newest = max(inputs)
    name = day_names.name_of(inputs[newest]["path"])
    return name.other(newest + 1) if name else f"day_{newest + 1}"
