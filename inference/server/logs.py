"""Rate limit of log lines."""

from __future__ import annotations

import logging
import re
import time

_INTERVAL_S = 10.0
_MAX_KINDS = 256
#: ``extra`` of lines that are always logged, because the operator waits for them.
ALWAYS = {"always": True}
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|\d+")


class RateLimit(logging.Filter):
    """Logs one line of a kind every ten seconds, with the number of those left out.

    Lines are of a kind if they differ only in arguments or numbers. Without the limit, an attacker
    or a defect could fill the disk.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kinds: dict[tuple, list[float]] = {}  # → time of the last line, number left out

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a line; see :class:`logging.Filter`."""
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
        if len(self._kinds) > _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        return True


def limit_log_rate() -> None:
    """Apply :class:`RateLimit` to all handlers of the root logger."""
    for handler in logging.getLogger().handlers:
        if not any(isinstance(known, RateLimit) for known in handler.filters):
            handler.addFilter(RateLimit())
