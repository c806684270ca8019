"""Where progress bars are shown."""

from __future__ import annotations

import sys


def hide_bars() -> bool | None:
    """Return tqdm's ``disable``: bars are shown on terminals and in notebooks."""
    return False if "ipykernel" in sys.modules else None
