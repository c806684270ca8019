"""Keep rows in memory between counting and encoding, so that their text is parsed once."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from nvt_torchrec.clicklog.readers.log_format import Block
from nvt_torchrec.formats.rows import RawRows, count_bytes

#: The most bytes of rows that are kept: three million rows in Criteo's format. A larger log takes
#: no more memory; the rest of it is parsed twice. With events it is half of that.
MAX_BYTES = 512 << 20


class KeptRows:
    """The rows of blocks that were counted, until they are encoded. Thread-safe.

    Args:
        max_bytes: The most bytes of rows that are kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._blocks: dict[Block, list[RawRows]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def keep(self, block: Block, pieces: Iterable[RawRows]) -> Iterator[RawRows]:
        """Return the rows of a block as they come; keep them, unless they are too many.

        Args:
            block: The block.
            pieces: Its rows, which nobody may change.
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
        """Return the rows of a block, which are no longer kept; None if they were not."""
        kept = self._blocks.pop(block, None)
        if kept is not None:
            self._release(kept)
        return kept

    def _reserve(self, num_bytes: int) -> bool:
        """Count rows as kept; return whether there was room for them."""
        with self._lock:
            self._num_bytes += num_bytes
            return self._num_bytes <= self._max_bytes

    def _release(self, rows: Iterable[RawRows]) -> None:
        """Count rows as kept no longer."""
        with self._lock:
            self._num_bytes -= sum(map(count_bytes, rows))
