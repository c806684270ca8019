"""Charts of the report as inline SVG and HTML; colours come from the page's style."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from etl.report_data import Histogram

_WIDTH, _HEIGHT = 460, 180
_LEFT, _BOTTOM, _TOP = 58, 36, 8


def columns(
    labels: Sequence[str], values: Sequence[float], *, x: str, y: str, form: str, marked: int = 0
) -> str:
    """A column chart with axes.

    Args:
        labels: below the columns.
        values: their heights, from 0.
        x, y: titles of the axes.
        form: of values, ``"share"`` or ``"count"``.
        marked: so many of the last columns have the second colour.
    """
    ticks = ticks_to(max(values, default=0.0))
    inner, bottom = _WIDTH - _LEFT - 6, _HEIGHT - _BOTTOM
    scale = (bottom - _TOP) / ticks[-1]
    step = inner / max(1, len(values))
    every = math.ceil(len(labels) / 24)
    parts = []
    for tick in ticks:
        at = bottom - tick * scale
        parts.append(f"<line class=grid x1={_LEFT} x2={_WIDTH} y1={at:.1f} y2={at:.1f} />")
        parts.append(_text(_LEFT - 6, at + 4, shown(tick, form), "end"))
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        left, height = _LEFT + (i + 0.15) * step, value * scale
        kind = "second" if i >= len(values) - marked else "first"
        parts.append(
            f"<rect class={kind} x={left:.1f} y={bottom - height:.1f} width={0.7 * step:.1f} "
            f"height={height:.1f}><title>{html.escape(x)} {html.escape(label)}: "
            f"{exactly(value, form)}</title></rect>"
        )
        if i % every == 0:
            parts.append(_text(left + 0.35 * step, bottom + 15, label, "middle"))
    parts.append(_text(_LEFT + inner / 2, _HEIGHT - 4, x, "middle"))
    middle = (bottom + _TOP) / 2
    parts.append(
        f"<text x=11 y={middle} text-anchor=middle transform='rotate(-90 11 {middle})'>"
        f"{html.escape(y)}</text>"
    )
    return _svg(_WIDTH, _HEIGHT, f"{y} by {x}", parts)


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
    parts.append(_text(0, height - 4, _tidy(one.low, span), "start"))
    parts.append(_text(width, height - 4, _tidy(one.high, span), "end"))
    return _svg(width, height, what, parts)


def bar(share: float, text: str) -> str:
    """A bar of ``share`` of its place, and a text (HTML) beside it."""
    return (
        f"<span class=bar><span class=track><i style='width:{100 * min(share, 1):.2f}%'>"
        f"</i></span><span class=value>{text}</span></span>"
    )


def ticks_to(highest: float) -> list[float]:
    """Round numbers from 0 to at least ``highest``: three to six of them."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def shown(value: float, form: str) -> str:
    """A short form: ``1.2 M``, ``25 %``."""
    if form == "share":
        return f"{100 * value:.3g} %"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"


def exactly(value: float, form: str) -> str:
    """The long form of a value."""
    return f"{value:.2%}" if form == "share" else f"{value:,.0f}"


def percent(share: float) -> str:
    """``25.0 %``, ``0.1 %``, ``< 0.1 %``, ``0``."""
    if not share:
        return "0"
    if share < 0.0005:
        return "&lt; 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.9995 or share == 1 else "&gt; 99.9 %"


def size(count: float) -> str:
    """Bytes with a binary unit, ``7.1 GiB``; at least one."""
    power, unit = next((p, u) for p, u in ((30, "GiB"), (20, "MiB"), (0, "KiB")) if count >= 2**p)
    return f"{count / 2 ** (power or 10):,.1f} {unit}"


def _tidy(value: float, span: float) -> str:
    """Three digits; 0 for what is only a rounding error away from it on an axis of ``span``."""
    if abs(value) < 1e-3 * span:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f"<text x={x:.1f} y={y:.1f} text-anchor={anchor}>{html.escape(text)}</text>"


def _svg(width: int, height: int, what: str, parts: list[str]) -> str:
    return (
        f"<svg viewBox='0 0 {width} {height}' role=img aria-label='{html.escape(what)}'>"
        f"{''.join(parts)}</svg>"
    )
