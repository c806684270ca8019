"""What a generation added to an earlier one of its line of descent, for ``workflows diff``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import first_difference, inspect
from nvt_torchrec.workflows.report import days_text, table
from nvt_torchrec.workflows.vocabulary import read_vocabulary, take, unequal

_COPY_AGAIN = "copy the whole workflow directory again"


def difference(before: Path, after: Path, examples: int) -> str:
    """Return as text what extending added to a workflow.

    Args:
        before: The directory of a workflow.
        after: The directory of one of its descendants.
        examples: How many values to show of each vocabulary.

    Raises:
        BadInputError: A workflow is damaged.
        SchemaError: ``after`` does not descend from ``before``; the message names what differs.
        SettingsError: It is the other way round.
    """
    old, new = inspect(before), inspect(after)
    since = _check_descent(before, old, after, new)
    sections = [_head(before, old, after, new)]
    if old.digest == new.digest:
        return "\n".join([*sections, "both encode every row equally"])
    vocabularies = _vocabularies(before, old, after, new, since, examples)
    sections.append("vocabularies\n" + table(vocabularies))
    sections.append("statistics of dense columns\n" + _statistics(old, new))
    return "\n\n".join(sections)


def _check_descent(
    before: Path, old: WorkflowDescription, after: Path, new: WorkflowDescription
) -> int:
    """Return the number of the generation of ``after``'s line of descent that ``before`` is.

    Raises:
        SchemaError: It is none of them; the message names what differs.
        SettingsError: ``before`` descends from ``after``.
    """
    ancestor = new.ancestor(old.digest)
    if ancestor is not None:
        return ancestor.number
    if old.digest == new.digest:
        return 0
    if old.ancestor(new.digest) is not None:
        raise SettingsError(f"{before} descends from {after}", "give them in the other order")
    raise SchemaError(
        f"{after} does not descend from {before}: {_what_differs(before, old, after, new)}",
        "only a workflow and its descendants can be compared: give two generations of one output "
        "directory",
    )


def _what_differs(
    before: Path, old: WorkflowDescription, after: Path, new: WorkflowDescription
) -> str:
    """Return, in words, the first thing that two workflows do not have in common."""
    specs = [json.loads(json.dumps(w.spec.to_dict() | {"input": None})) for w in (old, new)]
    if text := first_difference(*specs, "spec"):
        return text
    common = [a for a, b in zip(old.lineage, new.lineage, strict=False) if a == b]
    if common:
        days = [
            days_text([day for after in lineage[len(common) :] for day in after.days]) or "none"
            for lineage in (old.lineage, new.lineage)
        ]
        return (
            f"they parted after generation {common[-1].number} ({common[-1].digest[:12]}…), since "
            f"when one counted day {days[0]} and the other day {days[1]}"
        )
    for path, workflow in ((before, old), (after, new)):
        if not workflow.lineage:
            return f"{path} has no line of descent: it was imported, or made before there was one"
    if old.lineage[0].days != new.lineage[0].days:
        first, second = (days_text(workflow.lineage[0].days) for workflow in (old, new))
        return f"they were fitted on different days, {first} and {second}"
    return f"they were fitted with other counts ({old.digest[:12]}… and {new.digest[:12]}…)"


def _vocabularies(
    before: Path,
    old: WorkflowDescription,
    after: Path,
    new: WorkflowDescription,
    since: int,
    examples: int,
) -> list[list[str]]:
    """Return a row on what was added to each vocabulary; hashed columns have none.

    Raises:
        BadInputError: A vocabulary is damaged, or an id has another value although the line of
            descent does not say so.
    """
    rows = [["vocabulary", "values", "added", "ids reused", "table size", "for example"]]
    reused = new.reused_ids(since)
    for name, columns in new.spec.vocabularies.items():
        column = columns[0]
        if column.hash_buckets:
            continue
        first, second = (read_vocabulary(workflow, column).values for workflow in (old, new))
        size, reserved = len(first), column.reserved_ids
        # ids that were new after the older one, and reused later, are not its own
        places = reused.get(name, np.empty(0, np.int64)) - reserved
        places = places[places < size]
        unknown = np.setdiff1d(np.flatnonzero(unequal(first, second[:size])), places)
        if len(unknown):
            raise BadInputError(
                f"{after}: id {reserved + int(unknown[0])} of vocabulary {name} has "
                f"another value than in {before}, from which it descends",
                _COPY_AGAIN,
            )
        text = RAW_TYPES[column.raw].log_text
        added = second[size : size + examples].tolist()
        shown = [f"{reserved + size + i} = {text(value)}" for i, value in enumerate(added)]
        given = places[: examples - len(added)]
        lost, gained = take(first, given).tolist(), take(second, given).tolist()
        shown += [
            f"{reserved + place} = {text(now)}, was {text(then)}"
            for place, then, now in zip(given.tolist(), lost, gained, strict=True)
        ]
        numbers = (size, len(second) - size, len(places), reserved + len(second))
        rows.append([name, *map(str, numbers), "; ".join(shown)])
    return rows


def _head(before: Path, old: WorkflowDescription, after: Path, new: WorkflowDescription) -> str:
    lines = []
    for path, workflow in ((before, old), (after, new)):
        days = days_text([day for generation in workflow.lineage for day in generation.days])
        lines.append(
            f"{path}: generation {workflow.generation} ({workflow.digest[:12]}…), days {days}"
        )
    return "\n".join(lines)


def _statistics(old: WorkflowDescription, new: WorkflowDescription) -> str:
    rows = [["column", "mean before", "mean", "std before", "std"]]
    for name, values in new.statistics.items():
        before = old.statistics[name]
        if before != values:
            numbers = (before["mean"], values["mean"], before["std"], values["std"])
            rows.append([name, *(f"{number:.6g}" for number in numbers)])
    return table(rows) if len(rows) > 1 else "  unchanged"


@dataclasses.dataclass(frozen=True)
class DiffSettings(Settings):
    """The two workflows to compare."""

    before: Path = flag("directory of a workflow", metavar="A", positional=True)
    after: Path = flag(
        "directory of a workflow that was made by extending A", metavar="B", positional=True
    )
    examples: int = flag("values to show of each vocabulary", 3, least=0)
    skip_digests: bool = flag("do not verify the digests of the files first", False)


SETTINGS = (DiffSettings,)


def run(settings: DiffSettings) -> None:
    """Print the values added, the ids reused and the statistics changed."""
    if not settings.skip_digests:
        for path in (settings.before, settings.after):
            inspect(path).verify()
    print(difference(settings.before, settings.after, settings.examples))
