"""Keep rows in memory between counting and encoding, so that their text is parsed once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.formats.rows import RawRows, count_bytes

#: Maximum number of bytes of kept rows, enough for three million rows in Criteo's format. The rest
#: of a larger log is parsed twice. With events the limit is half of this.
MAX_BYTES = 512 << 20


class KeptRows:
    """The rows of blocks that were counted, until they are encoded. Thread-safe.

    Args:
        max_bytes: Maximum number of bytes of kept rows.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: dict[Block, list[RawRows]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def keep(self, block: Block, pieces: Iterable[RawRows]) -> Iterator[RawRows]:
        """Yield the rows of a block, and keep them, unless they are too many.

        Args:
            block: The block.
            pieces: The rows of the block, which must not be modified.
        """
        kept: list[RawRows] | None = []
        for piece in pieces:
            if kept is not None:
                kept.append(piece)
                if not self._reserve(count_bytes(piece)):
                    self._release(kept)
                    kept = None
            yield piece
        if kept is not None:
            self._blocks[block] = kept

    def take(self, block: Block) -> list[RawRows] | None:
        """Return the kept rows of a block, and forget them; None if they were not kept."""
        kept = self._blocks.pop(block, None)
        if kept is not None:
            self._release(kept)
        return kept

    def _reserve(self, num_bytes: int) -> bool:
        """Add bytes to the total; return True if the total is within the limit."""
        with self._lock:
            self._num_bytes += num_bytes
            return self._num_bytes <= self._max_bytes

    def _release(self, rows: Iterable[RawRows]) -> None:
        """Subtract the bytes of rows from the total."""
        with self._lock:
            self._num_bytes -= sum(map(count_bytes, rows))
