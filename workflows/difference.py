"""What a generation added to an earlier one of its line of descent, for ``workflows diff``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from nvt_torchrec.base.command_line import Settings, flag
from nvt_torchrec.base.errors import BadInputError, SchemaError, SettingsError
from nvt_torchrec.formats.spec.feature_spec import CategoricalColumn, FeatureSpec
from nvt_torchrec.formats.spec.raw_types import RAW_TYPES
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import first_difference, inspect
from nvt_torchrec.workflows.report import days_text, table
from nvt_torchrec.workflows.vocabulary import Values, is_text, read_vocabulary, take

_COPY_AGAIN = "copy the whole workflow directory again"


@dataclasses.dataclass(frozen=True)
class VocabularyDifference:
    """What was added to a vocabulary.

    Attributes:
        name: Of the vocabulary.
        before: How many values it had.
        added: The values with new ids, in the order of these.
        first_id: The id of the first of them.
        reused: Its ids that were given to other values.
        lost: The values that had these ids.
        gained: The values that have them now; where an id was given back, the same.
        raw: The raw type of the values.
    """

    name: str
    before: int
    added: Values
    first_id: int
    reused: np.ndarray
    lost: Values
    gained: Values
    raw: str

    def examples(self, number: int) -> list[str]:
        """Return some values with their ids."""
        new = [
            f"{self.first_id + i} = {text}"
            for i, text in enumerate(_texts(self.added, self.raw, number))
        ]
        pairs = zip(
            self.reused[:number].tolist(),
            _texts(self.lost, self.raw, number),
            _texts(self.gained, self.raw, number),
            strict=True,
        )
        return (new + [f"{number} = {gained}, was {lost}" for number, lost, gained in pairs])[
            :number
        ]


def _texts(values: Values, raw: str, number: int) -> list[str]:
    return [RAW_TYPES[raw].log_text(value) for value in values[:number].tolist()]


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
    since = check_descent(before, old, after, new)
    sections = [_head(before, old, after, new)]
    if old.digest == new.digest:
        return "\n".join([*sections, "both encode every row equally"])
    changes = compare_vocabularies(before, old, after, new, since)
    sections.append("vocabularies\n" + _vocabularies(changes, new.spec, examples))
    sections.append("statistics of dense columns\n" + _statistics(old, new))
    return "\n\n".join(sections)


def check_descent(
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
    if text := first_difference(old.statistics, new.statistics, "statistics"):
        return text
    for name, columns in old.spec.vocabularies.items():
        pair = [read_vocabulary(d, columns[0]).values for d in (old, new)]
        shorter = min(map(len, pair))
        places = _unequal(pair[0][:shorter], pair[1][:shorter])
        if len(places):
            number = columns[0].reserved_ids + int(places[0])
            texts = [_texts(take(values, places[:1]), columns[0].raw, 1)[0] for values in pair]
            return f"id {number} of vocabulary {name} is {texts[0]} and {texts[1]}"
        if len(pair[0]) > len(pair[1]):
            return f"vocabulary {name} has {len(pair[0])} and {len(pair[1])} values"
    return f"they were fitted with other counts ({old.digest[:12]}… and {new.digest[:12]}…)"


def compare_vocabularies(
    before: Path, old: WorkflowDescription, after: Path, new: WorkflowDescription, since: int
) -> list[VocabularyDifference]:
    """Return what was added to each vocabulary; hashed columns have none.

    Raises:
        BadInputError: A vocabulary is damaged, or an id has another value although the line of
            descent does not say so.
    """
    reused = new.reused_ids(since)
    differences = []
    for name, columns in new.spec.vocabularies.items():
        column = columns[0]
        if column.hash_buckets:
            continue
        first = read_vocabulary(old, column).values
        second = read_vocabulary(new, column).values
        size = len(first)
        # ids that were new after the older one, and reused later, are not its own
        places = reused.get(name, np.empty(0, np.int64)) - column.reserved_ids
        places = places[places < size]
        unknown = np.setdiff1d(_unequal(first, second[:size]), places)
        if len(unknown):
            raise BadInputError(
                f"{after}: id {column.reserved_ids + int(unknown[0])} of vocabulary {name} has "
                f"another value than in {before}, from which it descends",
                _COPY_AGAIN,
            )
        differences.append(
            VocabularyDifference(
                name=name,
                before=size,
                added=second[size:],
                first_id=column.reserved_ids + size,
                reused=places + column.reserved_ids,
                lost=take(first, places),
                gained=take(second, places),
                raw=column.raw,
            )
        )
    return differences


def _unequal(first: Values, second: Values) -> np.ndarray:
    """Return the places in which values of the same number differ."""
    if not is_text(first):
        return np.flatnonzero(first != second)
    import pyarrow.compute as pc

    from nvt_torchrec.base.arrays import mask_to_numpy

    return np.flatnonzero(mask_to_numpy(pc.not_equal(first, second)))


def _head(before: Path, old: WorkflowDescription, after: Path, new: WorkflowDescription) -> str:
    lines = []
    for path, workflow in ((before, old), (after, new)):
        days = days_text([day for generation in workflow.lineage for day in generation.days])
        lines.append(
            f"{path}: generation {workflow.generation} ({workflow.digest[:12]}…), days {days}"
        )
    return "\n".join(lines)


def _vocabularies(changes: list[VocabularyDifference], spec: FeatureSpec, examples: int) -> str:
    columns = {name: columns[0] for name, columns in spec.vocabularies.items()}
    rows = [["vocabulary", "values", "added", "ids reused", "table size", "for example"]]
    for change in changes:
        rows.append(
            [
                change.name,
                str(change.before),
                str(len(change.added)),
                str(len(change.reused)),
                str(_table_size(change, columns[change.name])),
                "; ".join(change.examples(examples)),
            ]
        )
    return table(rows)


def _table_size(change: VocabularyDifference, column: CategoricalColumn) -> int:
    return column.reserved_ids + change.before + len(change.added)


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
    from nvt_torchrec.workflows.description import inspect

    if not settings.skip_digests:
        for path in (settings.before, settings.after):
            inspect(path).verify()
    print(difference(settings.before, settings.after, settings.examples))
