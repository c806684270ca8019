"""``report.html``: what the data look like and what a run did, in one self-contained page."""

from __future__ import annotations

from pathlib import Path

from nvt_torchrec.base.files.atomic import read_json, write_text
from nvt_torchrec.base.pages.render import render
from nvt_torchrec.clicklog.readers.days import day_title
from nvt_torchrec.etl.manifest import one_label_remedy, one_label_splits
from nvt_torchrec.etl.report.data import Categorical, collect
from nvt_torchrec.formats.etl_output import EtlOutput
from nvt_torchrec.formats.manifest import Manifest
from nvt_torchrec.formats.splits import SPLITS
from nvt_torchrec.formats.workflow_description import WorkflowDescription

#: Embedding dimensions that table sizes are given for, those of the trainer's ``--size``; float32,
#: without the optimizer's state.
DIMENSIONS = (16, 32, 128)
#: With more columns than this, what is told of each is folded.
_FOLDED_ABOVE = 64


def write_report(path: Path, manifest: Manifest, description: WorkflowDescription) -> None:
    """Write the report of a run.

    Args:
        path: The report, in the directory of the run beside ``workflow``, ``criteo_binary`` and
            ``timings.json``.
        manifest: The manifest of the run.
        description: The description of its workflow.

    Raises:
        OutputError: The report cannot be written.
        BadInputError: ``timings.json`` does not exist.
    """
    data = collect(path.parent, manifest, description)
    timings = read_json(EtlOutput(path.parent).timings, "the time that a run took")
    days = sorted(map(int, manifest["by_day"]))
    by_day = [manifest["by_day"][str(day)] for day in days]
    columns = [*data.dense, *data.categorical]
    titles = {file["day"]: day_title(file["path"]) for file in manifest["inputs"]}
    page = render(
        Path(__file__).with_name("report.html"),
        manifest=manifest,
        data=data,
        timings=timings,
        source=Path(manifest["inputs"][0]["path"]).parent,
        splits=SPLITS,
        dimensions=DIMENSIONS,
        files={
            split: [part for part in manifest["files"] if part["file"].startswith(f"{split}/")]
            for split in SPLITS
        },
        warnings=one_label_splits(manifest["splits"]),
        remedy=one_label_remedy(manifest["splits"], manifest.split),
        days=[titles[day] or day for day in days],
        split=_split_text(manifest),
        evaluated=0
        if manifest.split
        else len({*manifest["days"]["valid"], *manifest["days"]["test"]}),
        by_day=by_day,
        click_rate=_click_rate,
        click_rates=list(map(_click_rate, by_day)),
        missing=[column for column in columns if any(column.missing.values())],
        complete=[column for column in columns if not any(column.missing.values())],
        highest_oov=max((c.oov["valid"] for c in data.categorical if c.oov), default=0) or 1,
        vocabularies={v.name: v.values for v in description.vocabularies.values()},
        folded_above=_FOLDED_ABOVE,
        by_vocabulary=_grouped(data.categorical, "vocabulary"),
        by_policy=_grouped(data.categorical, "policy"),
        statistics=description.statistics,
        transforms={c.name: description.spec.transform_of(c) for c in description.spec.dense},
        versions=description.versions,
        digest=description.digest,
    )
    write_text(path, page)


def _split_text(manifest: Manifest) -> str:
    """Describe a division of rows; "" by days."""
    rule = dict(manifest.split or {})
    if not rule:
        return ""
    by = rule.pop("by")
    return f"Rows are split by {by}: " + ", ".join(
        f"{key} {', '.join(value) if isinstance(value, list) else value}"
        for key, value in rule.items()
    )


def _click_rate(counts: dict[str, int]) -> float:
    return counts["positives"] / max(1, counts["rows"])


def _grouped(columns: list[Categorical], attribute: str) -> list[list[Categorical]]:
    """Collect the columns that have the same attribute, in the order of the first of each."""
    groups: dict[str, list[Categorical]] = {}
    for column in columns:
        groups.setdefault(getattr(column, attribute), []).append(column)
    return list(groups.values())
