"""A checkpoint that only rank 1 cannot read, or finds gone; each rank writes what it got."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

from clicklog.errors import BadInputError, ClickLogError
from dlrm.checkpoint.resume import _agreed
from dlrm.launch.distributed import process_group


def main(path: Path) -> None:
    """Write each rank's errors, a line each."""
    with process_group() as group:

        def look(error: Exception) -> None:
            if group.rank == 1:
                raise error

        got = []
        for error in (OSError(errno.EIO, "Input/output error"), BadInputError("gone")):
            try:
                _agreed(group, path, look, error)
            except ClickLogError as found:
                got.append(f"{type(found).__name__}: {found.what}\n")
        (path / str(group.rank)).write_text("".join(got))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
