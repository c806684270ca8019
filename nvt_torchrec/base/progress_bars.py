"""Progress bars for long work."""

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
        what: The name of the work, for example ``encode``.
        total: The total amount of work; None if it is not known.
        unit: The unit of work, as it is written after a number.
        initial: The amount of work that is already done.
    """
    from tqdm import tqdm

    # None means: disabled unless stderr is a terminal, which it never is in a notebook.
    disable = False if _is_notebook() else None
    return tqdm(
        desc=what, total=total, initial=initial, unit=unit, unit_scale=True, disable=disable
    )


def _is_notebook() -> bool:
    """Return whether this process is a Jupyter kernel; importing IPython is not enough."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and "IPKernelApp" in shell.config
