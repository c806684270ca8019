"""Whether a page fits into windows of several widths, measured in headless Chromium."""

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
#: A phone, an old one, a tablet, a screen.
WIDTHS = (390, 320, 800, 1200)
FRAME = '<iframe style="border: 0; width: {}px; height: 2000px" srcdoc="{}"></iframe>'
#: Runs beside the frames; Chromium prints what the body is at the end.
SCRIPT = """<script>
addEventListener("load", () => {
  const found = [];
  for (const frame of document.querySelectorAll("iframe")) {
    const page = frame.contentDocument, width = page.documentElement.clientWidth;
    const report = (what, e) => found.push(`${width} px: ${what}: ${e.outerHTML.slice(0, 200)}`);
    for (const details of page.querySelectorAll("details")) details.open = true;
    const { scrollWidth } = page.documentElement;
    if (scrollWidth > width) found.push(`${width} px: scrolls sideways, ${scrollWidth} px`);
    for (const e of page.body.querySelectorAll("*")) {
      const box = e.getBoundingClientRect();
      if (box.right > width + 1 || box.left < -1) report("outside", e);
      if (!e.closest("svg") && e.clientWidth && e.scrollWidth > e.clientWidth + 1)
        report("wider than its box", e);
    }
  }
  document.body.textContent = JSON.stringify(found);
});
</script>"""


def find_overflows(page: Path, directory: Path) -> list[str]:
    """Return what is cut or lies outside in windows of :data:`WIDTHS`; skip without Chromium.

    The windows are frames, as a window of Chromium has a least width.

    Args:
        page: The page.
        directory: A directory for temporary files.
    """
    if not CHROMIUM:
        pytest.skip("needs Chromium")
    wrapper = directory / "wrapper.html"
    text = html.escape(page.read_text(encoding="utf-8"))
    frames = "".join(FRAME.format(width, text) for width in WIDTHS)
    wrapper.write_text(f"<body>{frames}{SCRIPT}</body>", encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={directory / 'profile'}", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(html.unescape(done.stdout.split("<body>")[1].split("</body>")[0]))
