"""Errors a user can act on: each names the place, the value and the remedy.

Command lines turn a :class:`ClickLogError` into one message on stderr and exit status 2
(:func:`run_command`), and so, or silently, Ctrl-C, too little memory and a closed pipe; everything
else is a defect of this project and keeps its traceback.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable

#: Top-level loggers of this project: these speak at INFO on a command line, others at WARNING.
OUR_LOGGERS = ("clicklog", "workflows", "etl", "nvt_loader", "dlrm", "inference", "demo")


class ClickLogError(Exception):
    """Base of all errors that are the input's or the caller's, not this project's.

    Args:
        what: what is wrong, with the file, row or column and the value.
        remedy: what to do about it.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)  # both in args, so that it survives pickling by Dask
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  -> {self.remedy}" if self.remedy else self.what


class BadInputError(ClickLogError):
    """A file that cannot be read as what it should be: missing, empty, truncated, malformed."""


class BadRowError(BadInputError):
    """A row of a raw log that breaks the feature spec."""


class SchemaError(ClickLogError):
    """Data, tables, workflow or checkpoint that do not fit each other."""


class SettingsError(ClickLogError):
    """A setting or a combination of settings that makes no sense."""


class OutputError(ClickLogError):
    """An output path that cannot be written, or that holds something already."""


def run_command(main: Callable[[], int | None]) -> int:
    """Run a command line's ``main``, with its messages on stderr; see :func:`ended`."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    for room in OUR_LOGGERS:
        logging.getLogger(room).setLevel(logging.INFO)
    return ended(main)


def ended(main: Callable[[], int | None], report: Callable[[str], object] | None = None) -> int:
    """Run ``main``; its exit status, or that of an end which is no defect, told in one message.

    2 after a :class:`ClickLogError` or for want of memory, 130 after Ctrl-C, 141 if nobody reads
    the output any more (nothing is told then). Another error is raised.

    Args:
        main: returns the exit status; None is 0.
        report: prints a message.
    """
    from clicklog import interrupts

    report = report or interrupts.say
    try:
        try:
            status = main() or 0
        except SystemExit:  # argparse has printed help
            interrupts.flush()
            raise
        interrupts.flush()  # at Python's own end, a closed pipe could not be told any more
        return status
    except ClickLogError as error:
        report(f"error: {error}")
        return 2
    except BaseException as error:
        end = interrupts.ending(error)
        if end is None:
            raise
        status, message = end
        if message:
            report(message)
        if status == interrupts.NOT_READ:
            interrupts.drop_output()
        return status
