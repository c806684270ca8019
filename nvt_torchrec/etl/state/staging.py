"""Decompress days: blocks need random access, and both passes over the log read each block.

The text of a compressed day is written once: writing and reading it takes less processor time than
decompressing it again for the second pass. A file whose first rows are malformed is refused before
anything is written.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from nvt_torchrec.base.errors import BadInputError
from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import read_stream
from nvt_torchrec.clicklog.readers.log_format import get_format
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.state.output import COPIES

log = logging.getLogger(__name__)

#: Bytes of text to decompress at once.
_CHUNK_BYTES = 8 << 20


def decompress_days(days: list[DayFile], settings: EtlSettings, work: Path) -> list[DayFile]:
    """Return the days of a run, with compressed ones replaced by files of text below ``work``.

    Args:
        days: The days that were found; names ending in .gz, .bz2, .xz or .zst are compressed.
        settings: The settings of the run.
        work: The directory of the run's state.

    Raises:
        BadInputError: A file is truncated, or not in the format that its name says.
        BadRowError: The first rows of a file break the spec.
        OutputError: The disk is full, or the directory cannot be written.
    """
    copies = _name_copies([day for day in days if day.compressed], work / COPIES)
    missing = {day: copy for day, copy in copies.items() if not copy.exists()}
    if missing:
        for day in missing:
            get_format(settings.spec).check_head(day, reject=settings.reject)
        log.info("decompressing %s below %s", ", ".join(day.name for day in missing), work)
        _decompress_all(missing, min(settings.threads, len(missing)))
    files = []
    for day in days:
        if day in copies:
            copy = copies[day]
            day = dataclasses.replace(day, path=str(copy), size=copy.stat().st_size)
        files.append(day)
    return files


def _name_copies(days: list[DayFile], directory: Path) -> dict[DayFile, Path]:
    """Return the path of each compressed day's text; distinct even for files of equal names."""
    names = Counter(Path(day.path).name for day in days)
    copies = {}
    for day in days:
        name = Path(day.path).name
        text_name = name.rsplit(".", 1)[0]
        copies[day] = directory / (f"{day.day}.{text_name}" if names[name] > 1 else text_name)
    return copies


def _decompress_all(copies: dict[DayFile, Path], threads: int) -> None:
    """Decompress days in parallel; the first error stops all of them."""
    stop = Event()
    with (
        show_progress("decompress", unit="B") as bar,
        ThreadPoolExecutor(threads, "decompress") as pool,
    ):

        def report(size: int) -> None:
            if stop.is_set():
                raise _StoppedError
            bar.update(size)

        futures = [pool.submit(_decompress, day, copy, report) for day, copy in copies.items()]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # after an error in one day, or Ctrl-C, stop the others as well
            stop.set()
            pool.shutdown(cancel_futures=True)
        for future in futures:
            if not future.cancelled() and not isinstance(future.exception(), _StoppedError):
                future.result()


class _StoppedError(Exception):
    """Another day failed, or the run was interrupted."""


def _decompress(day: DayFile, copy: Path, report: Callable[[int], object]) -> None:
    """Write the text of a compressed day; after an error no file is left.

    Args:
        day: The day.
        copy: The path of its text.
        report: Called with the number of bytes written since the last call.

    Raises:
        BadInputError: The file is empty, truncated, or not in the format that its name says.
        OutputError: The copy cannot be written.
    """
    log.debug("begin decompress %s", day.path)
    with atomic_path(copy) as temporary, open(temporary, "wb") as out:
        for chunk in read_stream(day.path, _CHUNK_BYTES):
            out.write(chunk)
            report(len(chunk))
        if not out.tell():
            raise BadInputError(f"{day.source}: empty file", f"fetch {day.name} again")
