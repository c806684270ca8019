"""The report's histograms, as inline SVG."""

from __future__ import annotations

from clicklog import charts
from etl.report.data import Histogram


def histogram(one: Histogram, what: str) -> str:
    """A small histogram; its axis has the ends only."""
    width, height, bottom = 150, 78, 58
    highest = max(float(one.shares.max()), 1e-12)
    step = width / len(one.shares)
    bin_width = (one.high - one.low) / len(one.shares)
    parts = []
    for i, share in enumerate(one.shares):
        tall = max(0.0, (bottom - 2) * float(share) / highest)
        low = one.low + i * bin_width
        parts.append(
            f"<rect class=first x={i * step:.2f} y={bottom - tall:.2f} width={step - 0.6:.2f} "
            f"height={tall:.2f}><title>{low:.4g} to {low + bin_width:.4g}: {share:.1%}</title>"
            "</rect>"
        )
    parts.append(f"<line class=axis x1=0 x2={width} y1={bottom} y2={bottom} />")
    span = one.high - one.low
    parts.append(charts.text_at(0, height - 4, _tidy(one.low, span), "start"))
    parts.append(charts.text_at(width, height - 4, _tidy(one.high, span), "end"))
    return charts.svg(width, height, what, parts)


def _tidy(value: float, span: float) -> str:
    """Three digits; 0 for what is only a rounding error away from it on an axis of ``span``."""
    if abs(value) < 1e-3 * span:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
