"""``report.html``: what the data look like and what a run did, in one self-contained page."""

from __future__ import annotations

from pathlib import Path

from nvt_torchrec.base.auroc import TOO_GOOD
from nvt_torchrec.base.files.atomic import read_json, write_text
from nvt_torchrec.base.pages import render
from nvt_torchrec.base.pages.charts import size
from nvt_torchrec.etl.finish.manifest import one_label_remedy, one_label_splits
from nvt_torchrec.etl.report.data import Categorical, Dense, collect
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
    columns: list[Dense | Categorical] = [*data.dense, *data.categorical]
    ranked = sorted(columns, key=lambda column: column.auroc or 0, reverse=True)
    page = render(
        Path(__file__).with_name("report.html"),
        manifest=manifest,
        data=data,
        timings=timings,
        description=description,
        ranked=ranked,
        splits=SPLITS,
        dimensions=DIMENSIONS,
        size_titles=[f"dimension {dimension}" for dimension in DIMENSIONS],
        sizes=lambda rows: [size(4 * rows * dimension) for dimension in DIMENSIONS],
        one_label=one_label_splits(manifest["splits"]),
        remedy=one_label_remedy(manifest["splits"], manifest.split),
        too_good=[column for column in ranked if (column.auroc or 0) > TOO_GOOD],
        days=[manifest.day_titles[day] for day in days],
        by_day=by_day,
        click_rate=_click_rate,
        click_rates=list(map(_click_rate, by_day)),
        missing=[column for column in columns if any(column.missing.values())],
        complete=[column for column in columns if not any(column.missing.values())],
        highest_rate=max((r for c in data.categorical for *_, r in c.top if r), default=1),
        highest_oov=max((c.oov["valid"] for c in data.categorical if c.oov), default=0) or 1,
        vocabularies={v.name: v.values for v in description.vocabularies.values()},
        folded_above=_FOLDED_ABOVE,
        by_vocabulary=_grouped(data.categorical, "vocabulary"),
        by_policy=_grouped(data.categorical, "policy"),
        transforms={c.name: description.spec.transform_of(c) for c in description.spec.dense},
    )
    write_text(path, page)


def _click_rate(counts: dict[str, int]) -> float:
    return counts["positives"] / max(1, counts["rows"])


def _grouped(columns: list[Categorical], attribute: str) -> list[list[Categorical]]:
    """Collect the columns that have the same attribute, in the order of the first of each."""
    groups: dict[str, list[Categorical]] = {}
    for column in columns:
        groups.setdefault(getattr(column, attribute), []).append(column)
    return list(groups.values())
