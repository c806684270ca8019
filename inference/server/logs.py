"""Logs that do not repeat themselves."""

from __future__ import annotations

import logging
import re
import time

_INTERVAL_S = 10.0
_MOST_KINDS = 256
#: Pass this as ``extra`` for lines that the operator caused, and waits for.
ALWAYS = {"always": True}
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


class OneOfAKind(logging.Filter):
    """Lets a line of a kind through every ten seconds, which says how many there were meanwhile.

    Lines are of a kind if they differ in their arguments or in numbers only. An attacker, or a
    defect, would otherwise fill a disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple, list[float]] = {}  # → when one was let through, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is let through; see :class:`logging.Filter`."""
        if getattr(record, "always", False):
            return True
        error = record.exc_info[0] if record.exc_info else None
        kind = (record.name, record.levelno, _NUMBERS.sub("0", str(record.msg)), error)
        now = time.monotonic()
        last = self._kinds.get(kind)
        if last is not None and now - last[0] < _INTERVAL_S:
            last[1] += 1
            return False
        if last is not None and last[1]:
            record.msg = f"{record.getMessage()} (and {last[1]:.0f} more like it)"
            record.args = None
        self._kinds.pop(kind, None)
        self._kinds[kind] = [now, 0]
        if len(self._kinds) > _MOST_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return True


def keep_short() -> None:
    """Apply it to all that is logged."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(one, OneOfAKind) for one in handler.filters):
            handler.addFilter(OneOfAKind())
