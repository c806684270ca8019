"""Which days can be added to an output: new ones, that are no copies, and of usual size."""

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
    """Find the days to add; those that are there already, from the same file, are passed over.

    Args:
        settings: The settings of the extension.
        manifest: The manifest of the days before.
        without: Paths of files that are no days.

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
                "days are added in the order of time; to include it, run the ETL again",
            )
        else:
            days.append(day)
    return days


def check_same_file(day: DayFile, manifest: Manifest, output: Path) -> None:
    """Refuse another file of a day that is there. Raises :class:`BadInputError`."""
    inputs = {file.day: file for file in manifest.inputs}
    file = inputs[day.day]
    if fingerprint(day) == file.fingerprint or content_digest(day) == file.digest:
        return
    problem = f"{output} has {day.name} already, of another file, {file.path}"
    later = f"if this is a later day, call it {_name_next_day(inputs)}"
    undo = "take that one back with `python -m etl extend --undo` first"
    may_undo = day.day == max(inputs)
    if day_names.parse_day_name(day.path) is None:
        # the day was not chosen, so its number comes first, and not what replaces a day
        problem = f"no number or date in its name, so it is {day.name}; {problem}"
        remedy = f"{later}; if it replaces {file.path}, "
        remedy += undo if may_undo else "run the ETL again"
    elif may_undo:
        remedy = f"{undo}; or, {later}; or run the ETL again"
    else:
        remedy = f"{later}; or run the ETL again"
    raise BadInputError(f"{day.path}: {problem}", remedy)


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

    A single earlier day shows no spread, and may be a log of many days.

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


def _name_next_day(inputs: dict[int, InputFile]) -> str:
    """Return how the file of the next day would be called, without its ending."""
    newest = max(inputs)
    name = day_names.parse_day_name(inputs[newest]["path"])
    return name.format_name(newest + 1) if name else f"day_{newest + 1}"
