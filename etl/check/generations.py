"""Checks of an output that days were added to: generations, days of the splits, part numbers.

Ids of a part are below the table sizes of the generation that encoded it, not only below those of
today.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from nvt_torchrec.base.errors import ClickLogError
from nvt_torchrec.etl.check.files import AGAIN, Output
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.workflow_description import WorkflowDescription
from nvt_torchrec.workflows.description import inspect

_KIND = "generations"


def check(output: Output) -> None:
    """Check days and generations by the manifest; find the table sizes of each part."""
    manifest = output.manifest
    if manifest is None or manifest.format_version < Manifest.VERSION:
        return
    if any(finding.kind == "manifest" for finding in output.findings):
        return  # it is damaged
    try:
        for what, remedy in _differences(manifest):
            output.error(_KIND, EtlOutput(output.path).manifest, what, remedy)
        _check_workflow(output, manifest)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        where = EtlOutput(output.path).manifest
        output.error("manifest", where, f"damaged: {error!r}", AGAIN)


def _differences(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with the manifest itself, and its remedy."""
    days = {split: set(manifest["days"][split]) for split in SPLITS}
    evaluated = days["valid"] | days["test"]
    later = sorted(day for day in days["train"] if evaluated and day > min(evaluated))
    if later and not manifest.split:  # else the rows of one file are in several splits
        yield (
            f"day {later[0]} is for training, and later than day {min(evaluated)}, which is not",
            AGAIN,
        )
    rows: Counter = Counter()
    for file in manifest["files"]:
        split, number = file["file"].split("/")[0], int(file["file"].split(".")[1])
        rows[str(file["day"])] += file["rows"]
        if file["day"] not in days[split]:
            yield (
                f"{file['file']} is of day {file['day']}, which is not among the {split} days",
                AGAIN,
            )
        if number >= manifest["next_parts"][split]:
            yield f"next_parts of {split} is not above the number of {file['file']}", AGAIN
        if manifest["generation"] is not None and not (
            0 <= file["generation"] <= manifest["generation"]
        ):
            yield f"{file['file']} is of generation {file['generation']}", AGAIN
    for day, counts in manifest["by_day"].items():
        if counts["rows"] != rows[day]:
            yield f"day {day} has {counts['rows']} rows, its files have {rows[day]}", AGAIN


def _check_workflow(output: Output, manifest: Manifest) -> None:
    """Compare the generation with the workflow's, and check what extensions need."""
    paths = EtlOutput(output.path)
    try:
        description = inspect(paths.workflow)
    except ClickLogError:
        return  # it is reported with the other files
    if description.generation != manifest["generation"]:
        output.error(
            _KIND,
            paths.workflow,
            f"generation {description.generation}, the manifest says {manifest['generation']}",
            "workflow and data are of different days: restore both from the same copy",
        )
        return
    if description.generation is None:
        return
    sizes = table_sizes(description)
    output.sizes = {file["file"]: sizes[file["generation"]] for file in manifest["files"]}
    from nvt_torchrec.workflows.extension.state import read_state

    try:
        read_state(paths.extension, description)
    except ClickLogError as error:
        output.warning(_KIND, paths.extension, f"no day can be added: {error.what}", error.remedy)


def table_sizes(description: WorkflowDescription) -> dict[int, dict[str, int]]:
    """Return the rows of each categorical column's table, by generation."""
    return {
        generation.number: {
            column.name: column.reserved_ids + generation.values.get(column.vocabulary_name, 0)
            if not column.hash_buckets
            else description.vocabularies[column.name].table_size
            for column in description.spec.categorical
        }
        for generation in description.lineage
    }
