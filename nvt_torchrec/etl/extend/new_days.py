"""Find the days to add to an output, and check that they are new, not copies, and of usual size."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.clicklog.readers.days import DayFile, find_days
from nvt_torchrec.etl.settings import ExtendSettings
from nvt_torchrec.etl.state.run_record import content_digest, fingerprint
from nvt_torchrec.formats import day_names
from nvt_torchrec.formats.manifest import InputFile, Manifest


def find_new_days(
    settings: ExtendSettings, manifest: Manifest, *, without: Collection[str] = ()
) -> list[DayFile]:
    """Find the days to add; skip days that were added already from the same file.

    Args:
        settings: The settings of the extension.
        manifest: The manifest of the earlier days.
        without: Paths of files that are not days.

    Raises:
        BadInputError: A file is missing, or a day cannot be added.
    """
    inputs = {file["day"]: file for file in manifest["inputs"]}
    newest = max(inputs)
    after = newest if settings.days is None else None
    files = find_days(settings.input_path, settings.days, after=after, without=without)
    days = []
    for day in files:
        if day.day in inputs:
            check_same_file(day, manifest, settings.output_path)
        elif day.day < newest:
            title = day_names.format_day_title(inputs[newest]["path"]) or newest
            raise BadInputError(
                f"{day.path}: {day.name} is older than the newest day of "
                f"{settings.output_path}, {title}",
                "days can only be added in order; to include it, run the ETL again",
            )
        else:
            days.append(day)
    return days


def check_same_file(day: DayFile, manifest: Manifest, output: Path) -> None:
    """Raise :class:`BadInputError` if a day that was added before now has another file."""
    inputs = {file.day: file for file in manifest.inputs}
    file = inputs[day.day]
    if fingerprint(day) == file.fingerprint or content_digest(day) == file.digest:
        return
    problem = f"{output} has {day.name} already, from another file, {file.path}"
    later = f"if this is a later day, call it {_name_next_day(inputs)}"
    undo = "take that one back with `python -m etl extend --undo` first"
    may_undo = day.day == max(inputs)
    if day_names.parse_day_name(day.path) is None:
        # The user did not choose the number of the day, so suggest a later day before replacing.
        problem = f"no number or date in its name, so it is {day.name}; {problem}"
        replace = undo if may_undo else "run the ETL again"
        remedy = f"{later}; if it replaces {file.path}, {replace}"
    elif may_undo:
        remedy = f"{undo}; or, {later}; or run the ETL again"
    else:
        remedy = f"{later}; or run the ETL again"
    raise BadInputError(f"{day.path}: {problem}", remedy)


def check_not_repeated(day: DayFile, manifest: Manifest) -> None:
    """Raise :class:`BadInputError` if a day is a copy of an earlier day's file."""
    digest = content_digest(day)
    for file in manifest.inputs:
        if file.digest == digest:
            raise BadInputError(
                f"{day.path}: the same content as {file.path}, which was added before",
                f"fetch {day.name} again; or, if it is right, add it with --allow_repeated_day",
            )


def check_row_count(day: DayFile, rows: int, manifest: Manifest, factor: float) -> None:
    """Check that a day does not have far more, or far fewer, rows than all earlier days.

    After only one earlier day nothing is checked: it shows no spread, and may hold many days.

    Args:
        day: The day.
        rows: The estimated number of rows of the day.
        manifest: The manifest of the earlier days.
        factor: The day may have up to ``factor`` times the rows of the largest earlier day, and
            down to 1 / ``factor`` of the smallest.

    Raises:
        BadInputError: The number of rows is out of this range.
    """
    before = [counts["rows"] for counts in manifest.by_day.values()]
    if len(before) > 1 and not min(before) / factor <= rows <= max(before) * factor:
        raise BadInputError(
            f"{day.source}: about {rows:,} rows, but earlier days have {min(before):,} to "
            f"{max(before):,}",
            f"fetch {day.name} again; or, if it is right, add it with a larger --max_rows_factor",
        )


def _name_next_day(inputs: dict[int, InputFile]) -> str:
    """Return the name of the next day's file, without its ending."""
    newest = max(inputs)
    name = day_names.parse_day_name(inputs[newest]["path"])
    return name.format_name(newest + 1) if name else f"day_{newest + 1}"
