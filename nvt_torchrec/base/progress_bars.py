"""Progress bars of long work."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm


def show_progress(
    what: str, total: float | None = None, *, unit: str = " rows", initial: float = 0
) -> tqdm:
    """Make a progress bar, which is shown on terminals and in notebooks, not in a log.

    Args:
        what: The work, for example ``encode``.
        total: How much there is of it, if that is known.
        unit: What is counted, as it is written after a number.
        initial: How much is done already.
    """
    from tqdm import tqdm

    # None hides the bar unless stderr is a terminal, which it never is in a notebook.
    disable = False if _is_notebook() else None
    return tqdm(
        desc=what, total=total, initial=initial, unit=unit, unit_scale=True, disable=disable
    )


def _is_notebook() -> bool:
    """Return whether a kernel of Jupyter runs this process, and has not merely been imported."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config
