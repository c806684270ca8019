"""Hide TorchRec's needless warnings about data-parallel tables."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

#: How the messages begin. A data-parallel table is not split into shards and has no cache, so its
#: plan has no sharding spec, and the cache settings do not concern it.
_PREFIXES = ("Sharding spec not found for ", "Sharding Type is data_parallel, ")
#: The loggers of these messages; the planner uses the root logger.
_LOGGERS = ("root", "torchrec.distributed.utils")


@contextlib.contextmanager
def hide_data_parallel_warnings() -> Iterator[None]:
    """Drop these messages from the log while a model is planned and sharded."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(_is_kept)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_kept)


def _is_kept(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_PREFIXES)
