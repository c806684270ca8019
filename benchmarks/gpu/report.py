"""What the steps found: a table on the terminal, and a page of docs/gpu.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.gpu.runner import FAILED, OK, Record
from benchmarks.harness import ROOT, Metric, Table
from benchmarks.process import Run
from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import write_text

PAGE = ROOT / "docs" / "gpu.md"
#: The lines of the page between which the figures stand.
BEGIN, END = "<!-- figures of benchmarks.gpu: begin -->", "<!-- figures of benchmarks.gpu: end -->"
METRICS = (
    Metric("rows_per_s", "M rows/s", ".3f", ratio=True, scale=1e-6),
    Metric("gb_per_s", "GB/s", ".2f", ratio=True),
    Metric("ms", "ms", ",.2f"),
    Metric("wait_share", "wait %", ".1f", scale=100),
)
#: What is asked of one H200.
LEAST_LOADER, LEAST_TRAINING, LEAST_SAMPLES, LEAST_TEXT = 0.8, 0.97, 4.1e6, 3.0


def table(records: Iterable[Record], device: str) -> Table:
    """Put the figures of the steps into a table."""
    records = list(records)
    figures = Table("gpu", f"On {device}", METRICS, base="limit")
    for record in records:
        for result in record.results:
            key = result["system"], result["case"]
            output = {**result, "versions": record.versions}
            figures.runs[key] = [Run(record.wall_s, 0.0, 0.0, output)]
        if record.status == FAILED:
            figures.fail(f"step {record.step}", "", record.error)
    versions = next((record.versions for record in records if record.versions), {})
    figures.notes = [f"on: {', '.join(f'{name} {value}' for name, value in versions.items())}"]
    if device != "cpu":
        figures.notes += _targets(figures)
    return figures


def _targets(figures: Table) -> list[str]:
    """Compare the figures with what is asked for."""
    reached = []
    best = 0.0
    for system, case in figures.runs:
        rate = figures.ratio(system, case, "rows_per_s")
        if case.startswith("loader") and system.startswith("ours"):
            reached.append((f"{case}, {system}: {rate or 0:.2f} of decoding", rate, LEAST_LOADER))
        if system.startswith("from "):
            words = f"{case}, {system}: {rate or 0:.3f} of ready batches"
            reached.append((words, rate, LEAST_TRAINING))
            best = max(best, figures.median(system, case, "rows_per_s") or 0.0)
    if best:
        reached.append((f"training: {best / 1e6:.2f} M samples/s", best, LEAST_SAMPLES))
    for engine in ("cpu", "dask"):
        text = figures.median(f"{engine} engine: both", "ETL", "gb_per_s")
        if text:
            reached.append((f"{engine} engine: {text:.2f} GB/s of text", text, LEAST_TEXT))
    lines = ["asked for, of one H200:"] if reached else []
    for words, value, least in reached:
        verdict = "reached" if value is not None and value >= least else "MISSED"
        lines.append(f"  {words}: {verdict} (>= {least:g})")
    return lines


def write_page(records: Mapping[str, Record], page: Path = PAGE) -> Path:
    """Replace the figures in the page by those of the records.

    Raises:
        BadInputError: The page lacks the lines that enclose the figures.
    """
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadInputError(f"{page}: no lines {BEGIN} and {END}", "put them where figures belong")
    write_text(page, f"{before}{BEGIN}\n\n{_figures(records.values())}\n\n{END}{after}")
    return page


def _figures(records: Iterable[Record]) -> str:
    """Two tables in Markdown: what became of each step, and its figures."""
    records = list(records)
    lines = ["| step | when | seconds | outcome |", "|---|---|---|---|"]
    for record in records:
        outcome = record.status if record.status == OK else f"{record.status}: {record.error:.200}"
        cells = (record.step, record.date, f"{record.wall_s:.1f}", outcome)
        lines.append(_row(cells))
    lines += ["", "| step | case | what | M rows/s | GB/s | ms | waiting |", "|---" * 7 + "|"]
    for record in records:
        for result in record.results:
            figures = [_shown(metric, result.get(metric.key)) for metric in METRICS]
            lines.append(_row((record.step, result["case"], result["system"], *figures)))
    versions = {_described(record) for record in records if record.versions}
    return "\n".join([*lines, "", *(f"Measured on {text}." for text in sorted(versions))])


def _described(record: Record) -> str:
    versions = ", ".join(f"{name} {value}" for name, value in record.versions.items())
    return f"{record.machine.get('cpu')}, {record.machine.get('cores')} cores; {versions}"


def _shown(metric: Metric, value: float | None) -> str:
    return "" if value is None else metric.show(value)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |"
