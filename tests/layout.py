"""How a page lies in a window of some width, measured in headless Chromium."""

from __future__ import annotations

import html
import json
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = tuple(
    f"--{name}"
    for name in (
        *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
        *("disable-background-networking", "disable-component-update", "dump-dom"),
    )
)
#: The page lies in a frame, as a window of Chromium has a least width.
WRAPPER = """<body>
<iframe style="border: 0; width: {width}px; height: 2000px" srcdoc="{page}"></iframe>
<script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument, found = [];
  const report = (what, e) => found.push(`${{what}}: ${{e.outerHTML.slice(0, 200)}}`);
  for (const details of page.querySelectorAll("details")) details.open = true;
  const width = page.documentElement.clientWidth;
  if (page.documentElement.scrollWidth > width) found.push("the page scrolls sideways");
  for (const e of page.body.querySelectorAll("*")) {{
    const box = e.getBoundingClientRect();
    if (box.right > width + 1 || box.left < -1) report("outside", e);
    if (!e.closest("svg") && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
      report("wider than its box", e);
  }}
  document.body.textContent = JSON.stringify(found);
}});
</script>"""


def find_overflows(page: Path, width: int, directory: Path) -> list[str]:
    """Return what is cut or lies outside in a window of a width; skip without Chromium.

    Args:
        page: The page.
        width: In pixels.
        directory: A directory for temporary files.
    """
    if not CHROMIUM:
        pytest.skip("needs Chromium")
    wrapper = directory / "wrapper.html"
    text = html.escape(page.read_text(encoding="utf-8"))
    wrapper.write_text(WRAPPER.format(width=width, page=text), encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={directory / 'profile'}", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(html.unescape(done.stdout.split("<body>")[1].split("</body>")[0]))
