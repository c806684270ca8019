"""Charts as inline SVG and HTML, for pages that need nothing from elsewhere.

Colours come from the style of :func:`page`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from importlib import resources

_WIDTH, _HEIGHT = 460, 180
_LEFT, _BOTTOM, _TOP = 58, 36, 8


def page(title: str, body: Sequence[str]) -> str:
    """A whole HTML page, whose style is in it."""
    style = (resources.files("clicklog") / "page.css").read_text(encoding="utf-8")
    head = (
        "<meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>{html.escape(title)}</title><style>{style}</style>"
    )
    return (
        f"<!doctype html><html lang='en'><head>{head}</head><body>{''.join(body)}</body></html>\n"
    )


def table(
    headings: Sequence[str], rows: Sequence[Sequence[str]], total: Sequence[str] | None = None
) -> str:
    """A table; headings and cells are HTML already."""
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    if total:
        lines += f"<tr class=total>{''.join(f'<td>{cell}</td>' for cell in total)}</tr>"
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"


def tiles(items: Sequence[tuple[str, str]]) -> str:
    """Figures, each with what it is below it; both are HTML already."""
    inner = "".join(f"<div><b>{value}</b><span>{what}</span></div>" for value, what in items)
    return f"<div class=tiles>{inner}</div>"


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
        parts.append(text_at(_LEFT - 6, at + 4, shown(tick, form), "end"))
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        left, height = _LEFT + (i + 0.15) * step, value * scale
        kind = "second" if i >= len(values) - marked else "first"
        parts.append(
            f"<rect class={kind} x={left:.1f} y={bottom - height:.1f} width={0.7 * step:.1f} "
            f"height={height:.1f}><title>{html.escape(x)} {html.escape(label)}: "
            f"{exactly(value, form)}</title></rect>"
        )
        if i % every == 0:
            parts.append(text_at(left + 0.35 * step, bottom + 15, label, "middle"))
    parts.append(text_at(_LEFT + inner / 2, _HEIGHT - 4, x, "middle"))
    middle = (bottom + _TOP) / 2
    parts.append(
        f"<text x=11 y={middle} text-anchor=middle transform='rotate(-90 11 {middle})'>"
        f"{html.escape(y)}</text>"
    )
    return svg(_WIDTH, _HEIGHT, f"{y} by {x}", parts)


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


def text_at(x: float, y: float, text: str, anchor: str) -> str:
    """A text of a picture; ``anchor`` is start, middle or end."""
    return f"<text x={x:.1f} y={y:.1f} text-anchor={anchor}>{html.escape(text)}</text>"


def svg(width: int, height: int, what: str, parts: Sequence[str]) -> str:
    """A picture of so many units, from its elements; ``what`` it shows is for screen readers."""
    return (
        f"<svg viewBox='0 0 {width} {height}' role=img aria-label='{html.escape(what)}'>"
        f"{''.join(parts)}</svg>"
    )
