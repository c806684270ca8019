"""Charts as inline SVG and HTML, for pages that need nothing from elsewhere.

Colours come from the style of :func:`page`.
"""

from __future__ import annotations

import dataclasses
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
    parts.append(_y_title(y))
    return svg(_WIDTH, _HEIGHT, f"{y} by {x}", parts)


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a :func:`lines` chart.

    Attributes:
        name: in the key below the chart.
        points: (x, y), by rising x.
        kind: "first" or "second", its colour; or "target", a dashed line.
        dots: mark each point.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "first"
    dots: bool = False


def lines(series: Sequence[Series], *, x: str, y: str, form: str, from_zero: bool = False) -> str:
    """A line chart with axes and, below it, a key.

    Args:
        series: at least one point altogether.
        x, y: titles of the axes.
        form: of the y values: "share", "count" or "number".
        from_zero: the y axis begins at 0, not near the lowest value.
    """
    xs = [point[0] for one in series for point in one.points]
    ys = [point[1] for one in series for point in one.points]
    ticks = _ticks_between(0.0 if from_zero else min(ys), max(ys))
    right, bottom = _WIDTH - 8, _HEIGHT - _BOTTOM
    x_ticks = ticks_to(max(xs))
    wide, tall = (right - _LEFT) / (max(xs) or 1), (bottom - _TOP) / (ticks[-1] - ticks[0])

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return _LEFT + point[0] * wide, bottom - (point[1] - ticks[0]) * tall

    parts = []
    for tick in ticks:
        at = place((0, tick))[1]
        parts.append(f"<line class=grid x1={_LEFT} x2={_WIDTH} y1={at:.1f} y2={at:.1f} />")
        parts.append(text_at(_LEFT - 6, at + 4, _tick(tick, ticks, form), "end"))
    for tick in x_ticks:
        if tick <= max(xs):
            parts.append(text_at(place((tick, 0))[0], bottom + 15, shown(tick, "count"), "middle"))
    for one in series:
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in map(place, one.points))
        parts.append(f"<polyline class='line {one.kind}' points='{path}' />")
        if one.dots:
            for point in one.points:
                a, b = place(point)
                parts.append(
                    f"<circle class={one.kind} cx={a:.1f} cy={b:.1f} r=3><title>"
                    f"{html.escape(x)} {point[0]:,.10g}: {exactly(point[1], form)}</title></circle>"
                )
    parts.append(text_at((_LEFT + right) / 2, _HEIGHT - 4, x, "middle"))
    parts.append(_y_title(y))
    keys = "".join(f"<span class='key {one.kind}'>{html.escape(one.name)}</span>" for one in series)
    picture = svg(_WIDTH, _HEIGHT, f"{y} by {x}", parts)
    return f"<figure>{picture}<figcaption class=keys>{keys}</figcaption></figure>"


def _ticks_between(lowest: float, highest: float) -> list[float]:
    """Round numbers from at most ``lowest`` to at least ``highest``."""
    if highest <= lowest:
        lowest, highest = lowest - abs(lowest) * 0.05 - 1e-9, highest + abs(highest) * 0.05 + 1e-9
    step = ticks_to(highest - lowest)[1]
    first = math.floor(lowest / step + 1e-9)
    return [step * i for i in range(first, math.ceil(highest / step - 1e-9) + 1)]


def _tick(value: float, ticks: Sequence[float], form: str) -> str:
    if form != "number":
        return shown(value, form)
    digits = max(len(f"{tick:.6g}".partition(".")[2]) for tick in ticks)
    return f"{value:.{digits}f}"


def _y_title(text: str) -> str:
    middle = (_HEIGHT - _BOTTOM + _TOP) / 2
    return (
        f"<text x=11 y={middle} text-anchor=middle transform='rotate(-90 11 {middle})'>"
        f"{html.escape(text)}</text>"
    )


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
    """The long form of a value: a "share", a "number", or a "count"."""
    return {"share": f"{value:.2%}", "number": f"{value:.5g}"}.get(form, f"{value:,.0f}")


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
