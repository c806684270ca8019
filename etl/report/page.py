"""``report.html``: what the data look like and what a run did, in one self-contained page."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clicklog import charts
from clicklog.etl_output import EtlOutput
from clicklog.files.atomic import read_json, write_text
from clicklog.splits import SPLITS
from etl.labels import ONE_LABEL_REMEDY, one_label_splits
from etl.report.charts import histogram
from etl.report.data import Dense, ReportData, collect
from workflows.description import WorkflowDescription

#: Embedding dimensions that table sizes are given for; float32, without the optimizer's state.
DIMENSIONS = (16, 64, 128)


def write_report(path: Path, manifest: dict[str, Any], description: WorkflowDescription) -> None:
    """Write the report of a run.

    Args:
        path: of the report, in the directory of the run beside ``workflow``, ``criteo_binary`` and
            ``timings.json``.
        manifest: of the run.
        description: of its workflow.

    Raises:
        OutputError: it cannot be written.
        BadInputError: ``timings.json`` is not there.
    """
    data = collect(path.parent, manifest, description)
    timings = read_json(EtlOutput(path.parent).timings, "the time that a run took")
    write_text(path, page(manifest, description, data, timings))


def page(
    manifest: dict[str, Any],
    description: WorkflowDescription,
    data: ReportData,
    timings: dict[str, Any],
) -> str:
    """The page as HTML; it loads nothing from elsewhere."""
    body = [
        "<h1>Click log after the ETL</h1>",
        _head(manifest, description, data, timings),
        _splits(manifest),
        _days(manifest),
        _missing(data),
        _dense(data, description),
        _categorical(data),
        _top_values(data),
        _rejected(manifest),
        _stages(timings),
        _settings(manifest, description, data),
    ]
    return charts.page("ETL report", body)


def _head(
    manifest: dict[str, Any],
    description: WorkflowDescription,
    data: ReportData,
    timings: dict[str, Any],
) -> str:
    rows, train = manifest["rows"], manifest["splits"]["train"]
    known = {v.name: v.values for v in description.vocabularies.values()}
    tables = sum(column.table_size for column in data.categorical)
    tiles = [
        (f"{rows['in']:,}", "rows read"),
        (f"{rows['out']:,}", "rows written"),
        (f"{rows['rejected']:,}", "rows rejected"),
        (charts.percent(_rate(train)), "click rate, training days"),
        (charts.shown(sum(known.values()), "count"), f"values in {len(known)} vocabularies"),
        (_bytes(tables, DIMENSIONS[-1]), f"of tables at dimension {DIMENSIONS[-1]}"),
        (f"{sum(timings['seconds'].values()):,.0f} s", "all stages"),
    ]
    if timings["rows_per_s"]:
        tiles.append((charts.shown(timings["rows_per_s"], "count"), "rows/s, fit and transform"))
    days = sorted(map(int, manifest["by_day"]))
    source = html.escape(str(Path(manifest["inputs"][0]["path"]).parent))
    named = f"days {days[0]} to {days[-1]}" if len(days) > 1 else f"day {days[0]}"
    return f"<p class=faint>{named} of <span class=mono>{source}</span></p>" + charts.tiles(tiles)


def _splits(manifest: dict[str, Any]) -> str:
    rows = []
    for split in SPLITS:
        one = manifest["splits"][split]
        parts = [f for f in manifest["files"] if f["file"].startswith(f"{split}/")]
        size = sum(part["bytes"] for part in parts) / 1e6
        rows.append(
            [split, f"{one['rows']:,}", f"{one['positives']:,}", f"{_rate(one):.2%}"]
            + [f"{len(parts):,}", f"{size:,.1f}"]
        )
    headings = ["split", "rows", "clicks", "click rate", "files", "MB of parquet"]
    warnings = one_label_splits(manifest["splits"])
    said = "".join(f"<p><b>Warning</b>: {html.escape(line)}.</p>" for line in warnings)
    if said:
        said += f"<p>{html.escape(ONE_LABEL_REMEDY)}.</p>"
    return f"<h2>Splits</h2>{said}{charts.table(headings, rows)}"


def _days(manifest: dict[str, Any]) -> str:
    days = sorted(map(int, manifest["by_day"]))
    counts = [manifest["by_day"][str(day)] for day in days]
    labels = list(map(str, days))
    marked = 1 if len(days) > 1 else 0
    rows = charts.columns(
        labels, [c["rows"] for c in counts], x="day", y="rows", form="count", marked=marked
    )
    rates = charts.columns(
        labels, [_rate(c) for c in counts], x="day", y="click rate", form="share", marked=marked
    )
    key = (
        "<p class=faint><span class=key>training</span> &ensp; "
        "<span class='key other'>validation and test</span></p>"
        if marked
        else "<p class=faint>One day: its first four fifths for training.</p>"
    )
    return f"<h2>Rows and click rate by day</h2>{key}<div class=days>{rows}{rates}</div>"


def _missing(data: ReportData) -> str:
    columns = [*data.dense, *data.categorical]
    some = [column for column in columns if any(column.missing.values())]
    none = [column.name for column in columns if not any(column.missing.values())]
    half = (len(some) + 1) // 2
    tables = [
        charts.table(
            ["column", *SPLITS],
            [
                [
                    html.escape(column.name),
                    charts.bar(column.missing["train"], charts.percent(column.missing["train"])),
                    *(charts.percent(column.missing[split]) for split in SPLITS[1:]),
                ]
                for column in part
            ],
        )
        for part in (some[:half], some[half:])
        if part
    ]
    never = f"<p>Never missing: {html.escape(', '.join(none))}.</p>" if none else ""
    return (
        "<h2>Missing values</h2><p class=faint>Share of rows. Missing dense values are filled; "
        "missing categories have an id of their own, missing lists are empty.</p>"
        f"<div class=columns>{''.join(tables)}</div>{never}"
    )


def _dense(data: ReportData, description: WorkflowDescription) -> str:
    if not data.dense:
        return ""
    formula = {
        "log_normalize": "z = (log(max(x, −2) + 3) − mean) / std",
        "log": "y = log(max(x, −2) + 3)",
        "normalize": "z = (x − mean) / std",
    }[description.spec.dense_transform]
    cards = []
    for column in data.dense:
        pictures = [
            f"<figure>{histogram(one, f'{column.name} {when}')}"
            f"<figcaption>{when}</figcaption></figure>"
            for when, one in (("before", column.before), ("after", column.after))
        ]
        cards.append(
            f"<div class=card><h3>{html.escape(column.name)}</h3>"
            f"<div class=pair>{''.join(pictures)}</div>{_moments(column, description)}</div>"
        )
    return (
        f"<h2>Dense columns, before and after</h2><p class=faint>{formula}. Histograms of "
        f"{data.sampled_rows:,} training rows; heights are shares of rows, each scaled to its "
        "highest bin; axes go from the 0.5th to the 99th percentile. “Before” is the inverse of "
        "the transform: missing values appear as what they were filled with"
        f"{', values below −2 as −2' if description.spec.dense_transform != 'normalize' else ''}."
        f"</p><div class=cards>{''.join(cards)}</div>"
    )


def _moments(column: Dense, description: WorkflowDescription) -> str:
    known = description.statistics.get(column.name)
    if not known:
        return ""
    what = "of log(x + 3)" if description.spec.dense_transform == "log_normalize" else "of x"
    return f"<figcaption>mean {known['mean']:.4g}, std {known['std']:.4g} {what}</figcaption>"


def _categorical(data: ReportData) -> str:
    dimensions = [f"dimension<br>{dimension}" for dimension in DIMENSIONS]
    worst = max((c.unseen["valid"] for c in data.categorical if c.unseen), default=0.0) or 1.0
    headings = [
        "column",
        "values",
        "values for<br>99 %",
        "unseen in<br>train",
        "unseen in<br>valid",
    ]
    headings += ["unseen in<br>test", "table rows", *dimensions]
    rows = []
    for column in data.categorical:
        unseen = ["-"] * len(SPLITS)
        if column.unseen is not None:
            train, valid, test = (column.unseen[split] for split in SPLITS)
            unseen = [charts.percent(train), charts.bar(valid / worst, charts.percent(valid))]
            unseen.append(charts.percent(test))
        row = [
            html.escape(column.name),
            *("-" if n is None else f"{n:,}" for n in (column.values, column.most)),
            *unseen,
            f"{column.table_size:,}",
            *(_bytes(column.table_size, dimension) for dimension in DIMENSIONS),
        ]
        rows.append(row)
    total = sum(column.table_size for column in data.categorical)
    sums = [_bytes(total, dimension) for dimension in DIMENSIONS]
    last = ["all", *[""] * 5, f"{total:,}", *sums]
    return (
        "<h2>Categorical columns</h2><p class=faint>Cardinality over the training days, and how "
        "many of the most frequent values make 99 % of the occurrences; unseen: share of ids that "
        "are out of vocabulary (bars: relative to the largest); size of the embedding tables, "
        "float32, for three dimensions, without the optimizer's state.</p>"
        f"<div class=wide>{charts.table(headings, rows, last)}</div>"
    )


def _top_values(data: ReportData) -> str:
    cards = []
    shared: dict[str, list[str]] = {}
    for column in data.categorical:
        shared.setdefault(column.vocabulary, []).append(column.name)
    for column in data.categorical:
        names = shared[column.vocabulary]
        if not column.top or column.name != names[0]:
            continue
        rows = []
        for value, count, share in column.top:
            text = html.escape(value)
            rows.append(
                f"<tr><td class='mono words' title='{text}'>{text}</td><td>{count:,}</td>"
                f"<td>{charts.bar(share, charts.percent(share))}</td></tr>"
            )
        cards.append(
            f"<div class=card><h3>{html.escape(', '.join(names))}</h3>"
            f"<table>{''.join(rows)}</table></div>"
        )
    return (
        "<h2>Most frequent values</h2><p class=faint>Occurrences in the training days, and their "
        "share of all rows there, missing ones included (of all ids in columns of lists and in "
        f"shared vocabularies).</p><div class='cards broad'>{''.join(cards)}</div>"
    )


def _rejected(manifest: dict[str, Any]) -> str:
    rejected = manifest["rows"]["rejected"]
    if not rejected:
        return "<h2>Rejected rows</h2><p>None: every row of the input is in a split.</p>"
    rows = [
        [
            f"<span class=mono>{html.escape(one['path'])}</span>",
            f"{one['rows']['in']:,}",
            f"{one['rows']['rejected']:,}",
            charts.percent(one["rows"]["rejected"] / max(1, one["rows"]["in"])),
        ]
        for one in manifest["inputs"]
        if one["rows"]["rejected"]
    ]
    return (
        f"<h2>Rejected rows</h2><p>{rejected:,} of {manifest['rows']['in']:,} rows break the spec; "
        "they and the reasons are in <span class=mono>rejected/</span>.</p>"
        + charts.table(["file", "rows", "rejected", "share"], rows)
    )


def _stages(timings: dict[str, Any]) -> str:
    seconds = timings["seconds"]
    total = max(sum(seconds.values()), 1e-9)
    rows = [
        [html.escape(stage), charts.bar(value / total, f"{value:,.1f} s")]
        for stage, value in seconds.items()
    ]
    said = ""
    if timings["resumed"]:
        said = "<p class=faint>Of the last process only: the run was interrupted and resumed.</p>"
    elif timings["rows_per_s"]:
        said = (
            f"<p class=faint>{timings['rows_per_s']:,} rows/s, {timings['text_mb_per_s']} MB of "
            "input per second in fit and transform together.</p>"
        )
    return f"<h2>Time per stage</h2>{said}{charts.table(['stage', 'time'], rows)}"


def _settings(manifest: dict[str, Any], description: WorkflowDescription, data: ReportData) -> str:
    policies: dict[str, list[str]] = {}
    for column in data.categorical:
        policies.setdefault(column.policy, []).append(column.name)
    rows = [["vocabularies", f"{policy}: {_names(names)}"] for policy, names in policies.items()]
    rows.append(["dense transform", description.spec.dense_transform])
    for key, value in manifest["settings"].items():
        if key != "spec":
            rows.append([key, "-" if value is None else str(value)])
    rows += [[name, version] for name, version in description.versions.items()]
    rows.append(["workflow digest", description.digest])
    body = "".join(
        f"<tr><td>{html.escape(key)}</td><td class=words>{html.escape(value)}</td></tr>"
        for key, value in rows
    )
    sizes = html.escape(manifest["num_embeddings_per_feature"])
    return (
        f"<h2>Settings and versions</h2><table><tbody>{body}</tbody></table>"
        "<h2>Table sizes, to paste</h2>"
        f"<code class=paste>--num_embeddings_per_feature {sizes}</code>"
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{len(names)} columns"


def _rate(counts: dict[str, int]) -> float:
    return counts["positives"] / max(1, counts["rows"])


def _bytes(rows: int, dimension: int) -> str:
    """Size of a float32 table."""
    return charts.size(4 * rows * dimension)
