"""How numbers are written on pages and axes."""

from __future__ import annotations


def number(value: float, spec: str = ",") -> str:
    """Format by a format specification of Python; by default with commas between thousands."""
    return format(value, spec)


def short(value: float, form: str = "count") -> str:
    """Format in few characters: ``1.2 M`` for a "count", ``25 %`` for a "share"."""
    if form == "share":
        return f"{100 * value:.3g} %"
    for unit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:.3g} {letter}"
    return f"{value:.3g}"


def exact(value: float, form: str) -> str:
    """Format with all digits that matter: a "share", a "number", or a "count"."""
    return {"share": f"{value:.2%}", "number": f"{value:.5g}"}.get(form, f"{value:,.0f}")


def percent(share: float) -> str:
    """Format a share as ``25.0 %``; ``0`` and ``100.0 %`` stand for exactly these."""
    if not share:
        return "0"
    if share < 0.0005:
        return "< 0.1 %"
    return f"{100 * share:.1f} %" if share < 0.9995 or share == 1 else "> 99.9 %"


def size(count: float) -> str:
    """Format bytes with a binary unit, as in ``7.1 GiB``; ``count`` is at least 1."""
    power, unit = next((p, u) for p, u in ((30, "GiB"), (20, "MiB"), (0, "KiB")) if count >= 2**p)
    return f"{count / 2 ** (power or 10):,.1f} {unit}"
