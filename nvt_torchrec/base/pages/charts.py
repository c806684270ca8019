"""Charts with two axes, which ``macros.html`` draws, and formats of numbers on pages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

#: The size of a picture, in units of its coordinates.
WIDTH = 460
HEIGHT = 180
#: The edges of the area between the axes.
LEFT = 72
RIGHT = WIDTH - 8
TOP = 8
BOTTOM = HEIGHT - 36
#: The number of column labels that fit below the axis.
_MAX_LABELS = 24


class Tick(NamedTuple):
    """A label of an axis, and its position along it."""

    at: float
    text: str


class Bar(NamedTuple):
    """A column of a column chart; ``kind`` is its colour, "first" or "second"."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    tooltip: str


class Line(NamedTuple):
    """A line of a line chart; ``kind`` as in :class:`Series`, ``dots`` are (x, y, tooltip)."""

    name: str
    kind: str
    points: list[tuple[float, float]]
    dots: list[tuple[float, float, str]]


@dataclasses.dataclass(frozen=True)
class Chart:
    """A chart, with positions in a picture of ``WIDTH`` by ``HEIGHT``."""

    x: str
    y: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    bars: Sequence[Bar] = ()
    lines: Sequence[Line] = ()
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    top: int = TOP
    bottom: int = BOTTOM


def columns(
    labels: Sequence[str], values: Sequence[float], *, x: str, y: str, form: str, marked: int = 0
) -> Chart:
    """Make a column chart.

    Args:
        labels: The text below each column.
        values: The height of each column, at least 0.
        x: The title of the x axis.
        y: The title of the y axis.
        form: The kind of the values, "share" or "count".
        marked: The number of columns, counted from the last, that have the second colour.
    """
    ticks = choose_ticks_from_zero(max(values, default=0.0))
    scale = (BOTTOM - TOP) / ticks[-1]
    step = (RIGHT - LEFT) / max(1, len(values))
    bars = []
    for i, (label, value) in enumerate(zip(labels, values, strict=True)):
        bars.append(
            Bar(
                kind="second" if i >= len(values) - marked else "first",
                x=LEFT + (i + 0.15) * step,
                y=BOTTOM - value * scale,
                width=0.7 * step,
                height=value * scale,
                tooltip=f"{x} {label}: {exact(value, form)}",
            )
        )
    label_step = math.ceil(len(labels) / _MAX_LABELS) or 1
    x_ticks = []
    for i in range(0, len(labels), label_step):
        x_ticks.append(Tick(LEFT + (i + 0.5) * step, labels[i]))
    y_ticks = [Tick(BOTTOM - tick * scale, short(tick, form)) for tick in ticks]
    return Chart(x, y, x_ticks, y_ticks, bars=bars)


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a :func:`lines` chart.

    Attributes:
        name: The text in the key below the chart.
        points: Pairs (x, y) in ascending order of x.
        kind: The colour, "first" or "second"; or "target", a dashed line.
        dots: Whether each point is marked.
    """

    name: str
    points: Sequence[tuple[float, float]]
    kind: str = "first"
    dots: bool = False


def lines(series: Sequence[Series], *, x: str, y: str, form: str, from_zero: bool = False) -> Chart:
    """Make a line chart.

    Args:
        series: The lines, with at least one point altogether.
        x: The title of the x axis.
        y: The title of the y axis.
        form: The kind of the y values, "share", "count" or "number".
        from_zero: Whether the y axis begins at 0 instead of near the lowest value.
    """
    xs: list[float] = []
    ys: list[float] = []
    for line in series:
        xs += [point[0] for point in line.points]
        ys += [point[1] for point in line.points]
    ticks = _choose_ticks(0.0 if from_zero else min(ys), max(ys))
    x_scale = (RIGHT - LEFT) / (max(xs) or 1)
    y_scale = (BOTTOM - TOP) / (ticks[-1] - ticks[0])

    def locate(point: tuple[float, float]) -> tuple[float, float]:
        """Return the position of a point in the picture."""
        return LEFT + point[0] * x_scale, BOTTOM - (point[1] - ticks[0]) * y_scale

    drawn = []
    for line in series:
        dots = []
        if line.dots:
            for point in line.points:
                tooltip = f"{x} {point[0]:,.10g}: {exact(point[1], form)}"
                dots.append((*locate(point), tooltip))
        drawn.append(Line(line.name, line.kind, [locate(point) for point in line.points], dots))
    x_ticks = []
    for tick in choose_ticks_from_zero(max(xs)):
        if tick <= max(xs):
            left, _ = locate((tick, 0))
            x_ticks.append(Tick(left, short(tick)))
    y_ticks = []
    for tick in ticks:
        _, top = locate((0, tick))
        y_ticks.append(Tick(top, _format_tick(tick, ticks, form)))
    return Chart(x, y, x_ticks, y_ticks, lines=drawn)


def _choose_ticks(lowest: float, highest: float) -> list[float]:
    """Choose round numbers from at most ``lowest`` to at least ``highest``."""
    if highest <= lowest:  # a single value: make an axis around it
        lowest = lowest - abs(lowest) * 0.05 - 1e-9
        highest = highest + abs(highest) * 0.05 + 1e-9
    # 1e-9 here and 0.999 below tolerate rounding errors of multiples of the step
    step = choose_ticks_from_zero(highest - lowest)[1]
    first = math.floor(lowest / step + 1e-9)
    return [step * i for i in range(first, math.ceil(highest / step - 1e-9) + 1)]


def _format_tick(value: float, ticks: Sequence[float], form: str) -> str:
    """Format a number at an axis, with as many digits as the tick that needs the most."""
    if form != "number":
        return short(value, form)
    digits = max(len(f"{tick:.6g}".partition(".")[2]) for tick in ticks)
    return f"{value:.{digits}f}"


def choose_ticks_from_zero(highest: float) -> list[float]:
    """Choose three to six round numbers from 0 to at least ``highest``."""
    if highest <= 0:
        return [0.0, 1.0]
    rough = highest / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    return [step * i for i in range(math.ceil(highest / step - 1e-9) + 1)]


def number(value: float | None, spec: str = ",") -> str:
    """Format a number by a Python format specification, by default with commas; None as a dash."""
    return "–" if value is None else format(value, spec)


def short(value: float, form: str = "count") -> str:
    """Format in few characters: ``1.2 M`` for a "count", ``25 %`` for a "share"."""
    if form == "share":
        return f"{100 * value:.3g} %"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"


def exact(value: float, form: str) -> str:
    """Format a "share", a "number" or a "count" with all significant digits."""
    if form == "share":
        return f"{value:.2%}"
    return f"{value:.5g}" if form == "number" else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Format a share as ``25.0 %``; only exact values become ``0`` and ``100.0 %``; None a dash."""
    if share is None:
        return "–"
    if not share:
        return "0"
    if share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.9995 or share == 1 else "> 99.9 %"


def size(count: float) -> str:
    """Format bytes with a binary unit, as in ``7.1 GiB``; ``count`` is at least 1."""
    if count >= 2**30:
        return f"{count / 2**30:,.1f} GiB"
    if count >= 2**20:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 2**10:,.1f} KiB"
