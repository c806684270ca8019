"""Decompressing days: blocks need random access, and both passes over the log read each block.

A copy of the text is written once: writing and reading it takes less processor time than
decompressing again for the second pass. Its size is estimated from its first bytes; a file that
becomes much larger is refused, and so is, before anything is written, a file whose first rows are
malformed.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Event

from nvt_torchrec.base.errors import BadInputError, OutputError
from nvt_torchrec.base.files.atomic import atomic_path
from nvt_torchrec.base.progress_bars import show_progress
from nvt_torchrec.clicklog.readers.days import DayFile
from nvt_torchrec.clicklog.readers.lines import measure_head, read_stream
from nvt_torchrec.clicklog.readers.log_format import format_of
from nvt_torchrec.etl.settings import EtlSettings
from nvt_torchrec.etl.state.output import COPIES

log = logging.getLogger(__name__)

#: A day may become so many times its estimated size, and so many bytes more.
MARGIN, SPARE_BYTES = 4, 64 << 20
_CHUNK_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True)
class CompressedDay:
    """A compressed day and its copy.

    Attributes:
        day: the compressed file.
        copy: where its text goes; if the file exists, an earlier process wrote it, and it is whole.
        estimate: bytes of text, extrapolated from the first bytes.
        limit: bytes of text at most; more are an error.
    """

    day: DayFile
    copy: Path
    estimate: int
    limit: int


def staged(days: list[DayFile], settings: EtlSettings, work: Path) -> list[DayFile]:
    """The days of a run, the compressed ones as files of text below ``work``.

    Args:
        days: as found; gzip, bzip2, xz and zstd by the endings of their names.
        settings: of the run.
        work: directory of the run's state.

    Raises:
        BadInputError: a file is truncated, not in the format its name says, or becomes much larger
            than estimated.
        BadRowError: its first rows break the spec.
        OutputError: there is too little room, or the directory cannot be written.
    """
    packed = [day for day in days if day.compressed]
    names = Counter(Path(day.path).name for day in packed)
    copies = {}
    for day in packed:
        name = Path(day.path).name
        prefix = f"{day.day}." if names[name] > 1 else ""  # files of several directories
        copies[day] = work / COPIES / f"{prefix}{name.rsplit('.', 1)[0]}"
    left = [day for day in packed if not copies[day].exists()]
    if left:
        for day in left:
            format_of(settings.spec).check_head(day, reject=settings.reject)
        estimates = [estimate(day, copies[day], settings.max_decompressed_gb) for day in left]
        _check_room(estimates, work)
        _decompress_all(estimates, min(settings.threads, len(left)))
    return [
        dataclasses.replace(day, path=str(copies[day]), size=copies[day].stat().st_size)
        if day in copies
        else day
        for day in days
    ]


def estimate(day: DayFile, copy: Path, max_gb: float | None = None) -> CompressedDay:
    """Estimate how large a compressed day will be; reads its first bytes.

    Args:
        day: the day.
        copy: where its text goes.
        max_gb: limit of its size, whatever the estimate; None: a multiple of the estimate.
    """
    text, packed_bytes, whole = measure_head(day.path)
    size = text if whole else round(day.size * text / packed_bytes)
    limit = MARGIN * size + SPARE_BYTES if max_gb is None else round(max_gb * 1e9)
    return CompressedDay(day, copy, min(size, limit), limit)


def _check_room(packed: list[CompressedDay], work: Path) -> None:
    free = shutil.disk_usage(work).free
    size = sum(day.estimate for day in packed)
    days = (
        "1 compressed day becomes" if len(packed) == 1 else f"{len(packed)} compressed days become"
    )
    text = f"{days} about {size / 1e9:.2f} GB of text"
    if size > free:
        raise OutputError(
            f"{work}: {text}, and {free / 1e9:.2f} GB are free",
            "free space, use fewer --days or another --output_path; if each of them becomes less "
            "than estimated from its first bytes, set --max_decompressed_gb to how much",
        )
    limit = sum(day.limit for day in packed) / 1e9
    log.info("%s (at most %.2f GB) below %s; %.1f GB are free", text, limit, work, free / 1e9)


def _decompress_all(packed: list[CompressedDay], threads: int) -> None:
    stop = Event()
    with (
        show_progress("decompress", unit="B") as bar,
        ThreadPoolExecutor(threads, "decompress") as pool,
    ):

        def report(size: int) -> None:
            if stop.is_set():
                raise _StoppedError
            bar.update(size)

        futures = [pool.submit(decompress, day, report=report) for day in packed]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:  # a day failed, or Ctrl-C: the others stop as well
            stop.set()
            pool.shutdown(cancel_futures=True)
        for future in futures:
            if not future.cancelled() and not isinstance(future.exception(), _StoppedError):
                future.result()


class _StoppedError(Exception):
    """Another day failed, or the run was interrupted."""


def decompress(
    packed: CompressedDay, *, report: Callable[[int], object] = lambda size: None
) -> None:
    """Write the text of a compressed day; after an error nothing is left of it.

    Args:
        packed: The day.
        report: Called with the number of bytes written since the last call.

    Raises:
        BadInputError: The file is empty, truncated, not in the format its name says, or becomes too
            large.
        OutputError: The copy cannot be written.
    """
    day, size = packed.day, 0
    log.debug("begin decompress %s", day.path)
    with atomic_path(packed.copy) as temporary, open(temporary, "wb") as out:
        for chunk in read_stream(day.path, _CHUNK_BYTES):
            if size + len(chunk) > packed.limit:
                raise BadInputError(
                    f"{day.source}: {day.size:,} bytes become more than {packed.limit:,} bytes of "
                    f"text; about {packed.estimate:,} were estimated from its first bytes",
                    "if its content is right, set --max_decompressed_gb to how much a day may "
                    "become",
                )
            out.write(chunk)
            size += len(chunk)
            report(len(chunk))
        if not size:
            raise BadInputError(f"{day.source}: empty file", f"fetch {day.name} again")
