"""``report.html``: what the data look like, in pictures, in one self-contained file."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

from clicklog.files import write_text
from clicklog.splits import SPLITS
from workflows import WorkflowDescription

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: right }
th { border-bottom: 1px solid #888 } img { max-width: 100% } td:first-child { text-align: left }
"""


def write_report(path: Path, manifest: dict[str, Any], description: WorkflowDescription) -> None:
    """Write the report of a run. Raises :class:`clicklog.errors.OutputError`."""
    pictures = [
        ("Click rate by day", _click_rate(manifest)),
        ("Missing values", _missing(manifest, description)),
        ("Out-of-vocabulary values", _out_of_vocabulary(manifest, description)),
        ("Embedding table sizes", _table_sizes(description)),
    ]
    sizes = manifest["num_embeddings_per_feature"]
    body = [
        "<h1>Click log, after the ETL</h1>",
        _summary(manifest),
        *(
            f"<h2>{html.escape(title)}</h2><img alt='{html.escape(title)}' "
            f"src='data:image/png;base64,{picture}'>"
            for title, picture in pictures
        ),
        "<h2>Table sizes, to paste</h2>",
        f"<p><code>--num_embeddings_per_feature {sizes}</code></p>",
    ]
    head = f"<meta charset='utf-8'><title>ETL report</title><style>{_STYLE}</style>"
    write_text(path, f"<!doctype html><html><head>{head}</head><body>{''.join(body)}</body></html>")


def _summary(manifest: dict[str, Any]) -> str:
    rows = manifest["rows"]
    lines = [
        f"<p>{rows['in']:,} rows read, {rows['out']:,} written, {rows['rejected']:,} rejected; "
        f"{manifest['rows_per_s'] or 0:,} rows/s for fitting and transforming.</p>",
        "<table><tr><th>split</th><th>rows</th><th>clicks</th><th>click rate</th></tr>",
    ]
    for split in SPLITS:
        one = manifest["splits"][split]
        rate = one["positives"] / one["rows"] if one["rows"] else 0.0
        lines.append(
            f"<tr><td>{split}</td><td>{one['rows']:,}</td><td>{one['positives']:,}</td>"
            f"<td>{rate:.4f}</td></tr>"
        )
    return "".join([*lines, "</table>"])


def _figure():
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.2), layout="constrained")
    return figure, figure.subplots()


def _png(figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()


def _click_rate(manifest: dict[str, Any]) -> str:
    figure, axes = _figure()
    days = sorted(map(int, manifest["by_day"]))
    counts = [manifest["by_day"][str(day)] for day in days]
    axes.bar(days, [one["positives"] / max(1, one["rows"]) for one in counts], color="#4477aa")
    axes.set_xlabel("day")
    axes.set_ylabel("clicks / rows")
    return _png(figure)


def _shares(manifest: dict[str, Any], key: str, split: str, names: list[str]) -> list[float]:
    one = manifest["splits"][split]
    return [one[key][name] / max(1, one["rows"]) for name in names]


def _missing(manifest: dict[str, Any], description: WorkflowDescription) -> str:
    figure, axes = _figure()
    spec = description.spec
    names = spec.dense_names + spec.categorical_names
    axes.bar(names, _shares(manifest, "missing", "train", names), color="#4477aa")
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_ylabel("share of training rows")
    return _png(figure)


def _out_of_vocabulary(manifest: dict[str, Any], description: WorkflowDescription) -> str:
    figure, axes = _figure()
    names = description.spec.categorical_names
    for split, color in zip(SPLITS, ("#4477aa", "#ee6677", "#228833"), strict=True):
        shares = _shares(manifest, "out_of_vocabulary", split, names)
        axes.plot(names, shares, "o-", color=color, label=split)
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_ylabel("share of rows")
    axes.legend()
    return _png(figure)


def _table_sizes(description: WorkflowDescription) -> str:
    figure, axes = _figure()
    schema = description.table_schema
    axes.bar(schema.categorical, schema.table_sizes, color="#4477aa")
    axes.set_yscale("log")
    axes.tick_params(axis="x", labelrotation=90)
    axes.set_ylabel("rows of the table")
    return _png(figure)
