"""Write the Python of README and docs as modules, which `make lint` checks with mypy --strict.

A page is a module: its blocks stand in it one after the other, as a reader follows them. Names that
a page leaves to its reader, such as the rank, are declared before.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: What is left out of a row: `{"int_0": 1, ...}`, `{…, "recent": …}`.
_LEFT_OUT = re.compile(r", \.\.\.(?=})|(?<=, )…, ")
#: Without these a page takes nothing of this project for granted, and is not checked.
_IMPORT = re.compile(r"^(from|import) ", re.MULTILINE)
_FRAMES = "import pandas as pd\nframe: pd.DataFrame\nnew_frame: pd.DataFrame"
#: Names that a page does not define, with their types, by page.
READERS_NAMES = {
    "estimator": _FRAMES,
    "loader": (
        "from merlin.dataloader.torch import Loader\n"
        "rank: int\nworld_size: int\nsteps_of_this_epoch: int\nmerlin_loader: Loader"
    ),
    "readme": _FRAMES,
}


def modules() -> dict[str, str]:
    """Return the Python of each page that imports something, by the name of the page."""
    found = {}
    for path in [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]:
        blocks = _BLOCK.findall(path.read_text(encoding="utf-8"))
        if not any(map(_IMPORT.search, blocks)):
            continue
        name = re.sub(r"\W", "_", path.stem).lower()
        parts = [READERS_NAMES.get(name, ""), *(_LEFT_OUT.sub("", block) for block in blocks)]
        found[name] = "\n".join(filter(None, parts))
    return found


def write(folder: Path) -> None:
    """Write the modules into a folder, in which nothing else is left."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, text in modules().items():
        (folder / f"{name}.py").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
