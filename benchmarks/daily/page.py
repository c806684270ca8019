"""``daily.html``: AUROC and work by morning of the ways to serve a model while days arrive."""

from __future__ import annotations

import itertools
from pathlib import Path

from benchmarks.daily.results import ORACLE, TARGET, Results
from benchmarks.daily.ways import STAGES, WAYS
from nvt_torchrec.base.files.atomic import write_text
from nvt_torchrec.base.pages.charts import Chart, Series, lines
from nvt_torchrec.base.pages.render import render

_MORNING = "morning"


def write_page(path: Path, results: Results) -> None:
    """Write the page from what was measured."""
    template = Path(__file__).with_name("daily.html")
    charts = [_aurocs(results)]
    if "refit" in results.ways and len(results.ways) > 1:
        charts += [_differences(results), _work(results)]
    page = render(
        template,
        results=results,
        charts=charts,
        names=WAYS,
        stages=STAGES,
        target=TARGET,
        oracle=ORACLE,
    )
    write_text(path, page)


def _points(values: list[float]) -> list[tuple[float, float]]:
    return list(enumerate(values, 1))


def _aurocs(results: Results) -> Chart:
    kinds = {"refit": "target", "daily": "first", "never": "second"}
    series = [
        Series(WAYS[way], _points(results.aurocs(way)), kinds[way], dots=way != "refit")
        for way in ("refit", "daily", "never")
        if way in results.ways
    ]
    return lines(series, x=_MORNING, y="AUROC on the next day", form="number")


def _differences(results: Results) -> Chart:
    """Draw how far each way is above or below refitting."""
    refit = results.aurocs("refit")
    kinds = {"daily": "first", "never": "second"}
    series = [
        Series(
            WAYS[way],
            _points([own - other for own, other in zip(results.aurocs(way), refit, strict=True)]),
            kinds[way],
            dots=True,
        )
        for way in ("daily", "never")
        if way in results.ways
    ]
    series.append(Series(f"-{TARGET}", [(1, -TARGET), (len(refit), -TARGET)], "target"))
    return lines(series, x=_MORNING, y="AUROC less that of refitting", form="number")


def _work(results: Results) -> Chart:
    kinds = {"daily": "first", "refit": "second"}
    series = []
    for way in ("daily", "refit"):
        if way in results.ways:
            seconds = [found[way].cost.cpu_s for found in results.mornings.values()]
            together = list(itertools.accumulate(seconds))
            series.append(Series(WAYS[way], [(0, 0.0), *_points(together)], kinds[way]))
    return lines(series, x=_MORNING, y="CPU seconds, together", form="count", from_zero=True)
