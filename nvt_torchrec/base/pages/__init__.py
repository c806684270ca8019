"""Self-contained HTML pages: one template engine, one style, charts as inline SVG.

A page is rendered from its template, which extends ``page.html`` of this package.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2

from nvt_torchrec.base.pages import charts


def render(template: Path, **values: Any) -> str:
    """Render a template file to a self-contained page.

    Args:
        template: The template. It may use ``page.html``, the macros of ``macros.html``, and the
            functions and filters of :mod:`base.pages.charts`.
        values: The variables of the template; text in them is escaped.

    Raises:
        jinja2.UndefinedError: The template uses a variable or an attribute that does not exist.
    """
    return get_environment(template.parent).get_template(template.name).render(**values)


@functools.cache  # an environment keeps compiled templates; compiling takes longer than rendering
def get_environment(directory: Path) -> jinja2.Environment:
    """Return the environment of the templates in ``directory``, one for all pages of a process."""
    here = Path(__file__).parent
    result = jinja2.Environment(
        loader=jinja2.FileSystemLoader([directory, here]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    result.filters["number"] = charts.number
    result.filters["short"] = charts.short
    result.filters["percent"] = charts.percent
    result.filters["size"] = charts.size
    result.globals["columns"] = charts.columns
    result.globals["lines"] = charts.lines
    return result
